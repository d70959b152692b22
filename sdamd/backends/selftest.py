"""Does this device compute right: real kernels on it, against the CPU in float32.

    python -m sdamd.backends.selftest --device cuda --json

A card can be found, take every kernel, and still draw grids or black: wheels without the right
images, drivers, overrides. What is compared here are the operations of UNet and VAE, at their
shapes. Run it in a child process: a wrong driver may take the process with it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from sdamd.backends.attention import chunked
from sdamd.errors import HardwareError
from sdamd.hardware.gpu import ARCHITECTURES
from sdamd.hardware.tuning import tuning_of

Operation: TypeAlias = Callable[..., torch.Tensor]
Run: TypeAlias = Callable[[Operation, Sequence[torch.Tensor], torch.dtype], torch.Tensor]
"""(operation, float32 inputs on the CPU, dtype) -> what the device makes of it in that dtype."""

LIMITS: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far the worst element may be off, as a share of the largest one. Sums of a thousand products
round by a tenth of it; a kernel that is wrong is off by about one."""

COSINE: Final = 0.999
"""Below it the result as a whole is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An operation at one size; `shapes` are of its inputs."""

    name: str
    operation: Operation
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One check in one dtype. `error` is None where there is no number: it was NaN, or raised."""

    name: str
    ok: bool
    error: float | None
    limit: float
    reading: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was checked on one device."""

    device: str
    checks: tuple[Reading, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether each check is right, and there was one."""
        return bool(self.checks) and all(check.ok for check in self.checks)


def _convolution(pixels: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(pixels, weights / weights[0].numel() ** 0.5, bias, padding=1)


def _linear(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return functional.linear(tokens, weights / weights.shape[1] ** 0.5)


def _group_norm(pixels: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.silu(functional.group_norm(pixels, 32, weights, bias, eps=1e-6))


_IN_BLOCKS: Final = partial(chunked, block_bytes=2**20)

# Shapes of SD 1.5 and XL at small sizes; on two cores of a CPU they take seconds together.
CHECKS: Final = (
    Check(name="convolution of the UNet", operation=_convolution,
          shapes=((2, 320, 32, 32), (320, 320, 3, 3), (320,))),
    Check(name="convolution of the VAE", operation=_convolution,
          shapes=((1, 128, 192, 192), (128, 128, 3, 3), (128,))),
    Check(name="matrix product", operation=_linear, shapes=((2, 1024, 640), (1280, 640))),
    Check(name="group norm", operation=_group_norm, shapes=((2, 320, 32, 32), (320,), (320,))),
    *(
        Check(name=f"attention, heads of {width}, {how}", operation=operation,
              shapes=((2, 2, 1024, width),) * 3)
        for width in (40, 64, 80, 160)
        for how, operation in (
            ("fused", functional.scaled_dot_product_attention), ("in blocks", _IN_BLOCKS)
        )
    ),
    Check(name="attention of the VAE, one head of 512, in blocks", operation=_IN_BLOCKS,
          shapes=((1, 1, 1024, 512),) * 3),
)  # fmt: skip
"""Every operation that a picture depends on."""


def check(
    run: Run,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: str = "",
    checks: Sequence[Check] = CHECKS,
) -> Report:
    """Try every operation in every dtype.

    `run` is the device: `on_device`, or in tests one that is wrong on purpose.
    """
    return Report(device=device, checks=tuple(_readings(run, dtypes, checks)))


def _readings(
    run: Run, dtypes: Sequence[torch.dtype], checks: Sequence[Check]
) -> Iterator[Reading]:
    for number, one in enumerate(checks):
        drawn = torch.Generator().manual_seed(number)
        inputs = [torch.randn(shape, generator=drawn) for shape in one.shapes]
        for dtype in dtypes:
            # Both sides start from the rounded numbers, so that only computing differs.
            rounded = [value.to(dtype).float() for value in inputs]
            expected = one.operation(*rounded)
            yield _reading(one, expected, run, rounded, dtype)


def _reading(
    one: Check,
    expected: torch.Tensor,
    run: Run,
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> Reading:
    said = partial(Reading, name=f"{one.name}, {str(dtype).removeprefix('torch.')}")
    limit = LIMITS[dtype]
    try:
        made = run(one.operation, inputs, dtype)
    except RuntimeError as error:  # torch's errors of every kind, the device's among them
        line = next(iter(str(error).splitlines()), type(error).__name__)
        return said(ok=False, error=None, limit=limit, reading=f"failed: {line}")
    if made.shape != expected.shape:
        shapes = f"{tuple(made.shape)} instead of {tuple(expected.shape)}"
        return said(ok=False, error=None, limit=limit, reading=f"the shape is {shapes}")
    wrong = int((~made.isfinite()).sum())
    if wrong:
        reading = f"{wrong} of {made.numel()} numbers are NaN or infinite"
        return said(ok=False, error=None, limit=limit, reading=reading)
    off = float((made - expected).abs().max() / expected.abs().max())
    flat = made.double().flatten(), expected.double().flatten()
    cosine = float(functional.cosine_similarity(*flat, dim=0))
    return said(
        ok=off <= limit and cosine >= COSINE,
        error=off,
        limit=limit,
        reading=f"off by {off:.2g} of the largest number, cosine {cosine:.6f}",
    )


@torch.inference_mode()
def on_device(
    operation: Operation,
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    device: torch.device,
) -> torch.Tensor:
    """Run it there, and wait: some faults come to light only when the device is waited for."""
    made = operation(*(value.to(device, dtype) for value in inputs))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return made.float().cpu()


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes in which plans let this device compute."""
    if device.type != "cuda":
        return (torch.float32,)
    # Such as gfx90a:sramecc+:xnack-. Other makers' cards have no such name.
    gfx = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
    gfx = gfx.partition(":")[0]
    row = tuning_of(gfx)
    names = {"float32", "float16", row.dtype, row.vae_dtype}
    if gfx not in ARCHITECTURES and torch.cuda.is_bf16_supported():
        names.add("bfloat16")
    return tuple(dtype for dtype in LIMITS if str(dtype).removeprefix("torch.") in names)


def selftest(name: str) -> Report:
    """Check a device of torch by name: `cpu`, `cuda`, `cuda:1`."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        line = next(iter(str(error).splitlines()), type(error).__name__)
        reading = f"cannot be reached: {line}"
        missing = Reading(name="device", ok=False, error=None, limit=0.0, reading=reading)
        return Report(device=name, checks=(missing,))
    if device.type == "cuda":
        name = f"{name}: {torch.cuda.get_device_name(device)}"
    return check(partial(on_device, device=device), dtypes_of(device), name)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; status 3 when something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m sdamd.backends.selftest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args(argv)
    report = selftest(asked.device)
    if asked.json:
        rows = [asdict(reading) for reading in report.checks]
        sys.stdout.write(json.dumps({"device": report.device, "checks": rows}) + "\n")
    else:
        for reading in report.checks:
            mark = "ok   " if reading.ok else "WRONG"
            sys.stdout.write(f"{mark} {reading.name}: {reading.reading}\n")
    return 0 if report.ok else HardwareError.exit_status


if __name__ == "__main__":
    sys.exit(main())
