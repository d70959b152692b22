import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from sdamd.backends import selftest
from sdamd.backends.selftest import CHECKS, Check, Operation, Report, Run, check, on_device

CPU = partial(on_device, device=torch.device("cpu"))
SMALL = [
    one for one in CHECKS if one.name.startswith(("matrix", "group", "attention, heads of 40"))
]
Spoil = Callable[[torch.Tensor], torch.Tensor]


def zeros(made: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(made)


def nan(made: torch.Tensor) -> torch.Tensor:
    made = made.clone()
    made.view(-1)[7] = torch.nan
    return made


def grid(made: torch.Tensor) -> torch.Tensor:
    """Every eighth column is off, as fused float32 attention drew it on gfx1103."""
    made = made.clone()
    made[..., ::8] *= 1.5
    return made


def shifted(made: torch.Tensor) -> torch.Tensor:
    return made + 0.1 * made.abs().max()


def one_tile(made: torch.Tensor) -> torch.Tensor:
    """C13: one corner is missing."""
    made = made.clone()
    made[..., -8:, :8] = 0
    return made


def short(made: torch.Tensor) -> torch.Tensor:
    return made[:1, ..., :-1]


def raises(made: torch.Tensor) -> torch.Tensor:
    raise torch.AcceleratorError("HIP error: invalid device function\nand much more")


def wrong_in(name: str, spoil: Spoil) -> Run:
    """A device with one bad kernel; for all others the reference itself is what it makes."""
    operation = next(one.operation for one in CHECKS if one.name == name)
    shapes = next(one.shapes for one in CHECKS if one.name == name)

    def run(asked: Operation, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        made = asked(*inputs)
        same = asked is operation and tuple(tuple(i.shape) for i in inputs) == shapes
        return spoil(made) if same else made

    return run


@pytest.mark.report("C15", "C13")
@pytest.mark.parametrize("spoil", [zeros, nan, grid, shifted, one_tile, short, raises])
@pytest.mark.parametrize("name", ["matrix product", "attention, heads of 40, in blocks"])
def test_a_wrong_kernel_is_named(name: str, spoil: Spoil) -> None:
    report = check(wrong_in(name, spoil), checks=SMALL)
    assert not report.ok
    assert [one.name for one in report.checks if not one.ok] == [f"{name}, float32"]


@pytest.mark.report("C15")
@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.name)
def test_each_check_can_fail(one: Check) -> None:
    (reading,) = check(wrong_in(one.name, shifted), [torch.float16], checks=[one]).checks
    assert (reading.name, reading.ok) == (f"{one.name}, float16", False)
    assert reading.error == pytest.approx(0.1, rel=0.01)
    assert reading.limit == 1e-2


@pytest.mark.report("C15")
def test_a_device_that_adds_to_every_convolution_is_found_with_the_number() -> None:
    def run(asked: Operation, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        made = asked(*inputs)
        return made + 0.1 if asked is CHECKS[0].operation else made

    report = check(run, checks=[*CHECKS[:2], *SMALL])
    wrong = [one for one in report.checks if not one.ok]
    assert [one.name for one in wrong] == [
        "convolution of the UNet, float32",
        "convolution of the VAE, float32",
    ]
    for one in wrong:
        assert one.error is not None
        assert one.error > 10 * one.limit
        assert f"off by {one.error:.2g}" in one.reading


def test_a_kernel_that_raises_is_told_in_one_line() -> None:
    name = CHECKS[0].name
    reading = check(wrong_in(name, raises), checks=CHECKS[:1]).checks[0]
    assert reading.reading == "failed: HIP error: invalid device function"
    assert reading.error is None


def test_a_device_without_checks_is_not_right() -> None:
    assert not Report(device="cpu").ok


def test_the_cpu_is_right() -> None:
    report = check(CPU, device="cpu")
    assert [one for one in report.checks if not one.ok] == []
    names = [one.name for one in report.checks]
    assert len(set(names)) == len(names) == len(CHECKS)
    # The very same kernels.
    assert all(one.error == 0 for one in report.checks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_right_within_its_limit_and_not_exact(dtype: torch.dtype) -> None:
    report = check(CPU, [dtype], checks=SMALL)
    assert report.ok
    assert all(one.error is not None and 0 < one.error < one.limit for one in report.checks)


def test_every_operation_of_a_picture_is_checked() -> None:
    names = " ".join(one.name for one in CHECKS)
    for needed in (
        "heads of 40", "heads of 64", "heads of 80", "heads of 160", "512", "of the VAE",
        "convolution", "matrix product", "group norm", "fused", "in blocks",
    ):  # fmt: skip
        assert needed in names


def test_the_program_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main(["--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"device", "checks"}
    assert told["device"] == "cpu"
    for row in told["checks"]:
        assert set(row) == {"name", "ok", "error", "limit", "reading"}


@pytest.mark.parametrize("device", ["meta", "cuda:99", "gpu"])
def test_a_device_that_cannot_be_reached_is_status_3(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selftest.main(["--device", device, "--json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)["checks"]
    assert (row["name"], row["ok"]) == ("device", False)
    assert row["reading"].startswith("cannot be reached: ")


def test_a_person_reads_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main(["--device", "cuda:99"]) == 3
    assert capsys.readouterr().out.startswith("WRONG device: cannot be reached: ")


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdamd.backends.selftest", "--device", "gpu", "--json"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["device"] == "gpu"


def test_inputs_are_rounded_before_they_are_compared() -> None:
    """Only what the device computes may differ, and not what it was given."""

    def run(asked: Operation, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        assert all(torch.equal(value, value.to(dtype).float()) for value in inputs)
        return asked(*inputs)

    assert check(run, [torch.bfloat16], checks=SMALL).ok
