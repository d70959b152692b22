"""What runs on this machine took, over what was predicted: memory and time, kept for later plans.

One observation a line in a file below the cache. Lines are only ever added, so that several
processes may write at once, and one that cannot be read is skipped; when the file has grown, it is
written anew with what still matters. An observation holds for one architecture, one torch and one
version of sdamd; after an update nothing old is believed.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import sdamd
from sdamd.errors import BadRequest, StorageError
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import Engine
from sdamd.tuned import torch_version

FILE: Final = "learnt.jsonl"
BYTES_MAX: Final = 2**18
"""Beyond it the file is written anew; a tenth of that is a year of one card's pictures."""
KEPT: Final = 8
"""Of how many runs, the last ones, the middle time is taken: a driver changes what is usual, and
the search for kernels makes a first run many times slower."""
TIMES: Final = (0.1, 20.0)
SIZES: Final = (1.0, 4.0)
"""A stage that took less than predicted says nothing about other sizes, so 1 is the least."""

_TEXTS: Final[Mapping[str, str]] = {
    "device": r"cpu|directml-cpu|(directml-)?(gfx[0-9]{1,2}[0-9a-f]{2}|unknown)",
    "torch": r"[0-9A-Za-z.+_-]{1,60}",
    "sdamd": r"[0-9A-Za-z.+_-]{1,60}",
    "family": r"[0-9a-z-]{1,20}",
    "key": r"(text|encode|denoise|hires|decode|upscale)(/[0-9a-z_]{1,20}){1,2}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Measured over predicted, by `key`; what is missing is 1."""

    bytes: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One stage of one run. `bytes` and `seconds` are measured over predicted; None is unknown."""

    device: str
    torch: str
    sdamd: str
    family: str
    key: str
    bytes: float | None
    seconds: float | None

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Read one line.

        Raises:
            BadRequest: with everything that is wrong with it.
        """
        if not isinstance(values, Mapping):
            raise BadRequest(f"a line is {_short(values)}; allowed is an object")
        names = [f.name for f in fields(cls)]
        problems = [f"{name} is missing" for name in names if name not in values]
        problems += [f"{_short(name)} is not known" for name in values if name not in names]
        problems += [p for n in names if n in values and (p := _problem(n, values[n]))]
        if problems:
            raise BadRequest(*problems)
        return cls(**values)

    @property
    def about(self) -> tuple[str, ...]:
        """What must be the same for another one to say something about it."""
        return (self.device, self.torch, self.sdamd, self.family, self.key)


def key(
    stage: str, *, dtype: str, vae_dtype: str, attention: str, vae_attention: str
) -> str:  # fmt: skip
    """The name of a factor: the stage, and the choices that decide which kernels it runs."""
    if stage in {"decode", "encode"}:
        return f"{stage}/{vae_dtype}/{vae_attention}"
    return f"{stage}/{dtype}" if stage == "text" else f"{stage}/{dtype}/{attention}"


def device_name(gpu: Gpu | None, engine: Engine) -> str:
    """How this device is called in the file."""
    if engine is Engine.DIRECTML_CPU:
        return "directml-cpu"
    if gpu is None or engine is Engine.CPU:
        return "cpu"
    arch = gpu.arch or "unknown"
    return f"directml-{arch}" if engine is Engine.DIRECTML else arch


def observation(
    gpu: Gpu | None, engine: Engine, family: str, key: str, *,
    bytes: float | None = None, seconds: float | None = None,
) -> Observation:  # fmt: skip
    """What has just been measured here; figures beyond all reason are cut to what is allowed."""
    return Observation(
        device=device_name(gpu, engine), torch=torch_version(), sdamd=sdamd.__version__,
        family=family, key=key, bytes=_within(bytes, SIZES), seconds=_within(seconds, TIMES),
    )  # fmt: skip


def for_device(cache: Path, gpu: Gpu | None, engine: Engine, family: str) -> Learnt:
    """What was learnt here with this torch and this sdamd.

    A file that cannot be read is the same as none: it is learnt again.
    """
    wanted = (device_name(gpu, engine), torch_version(), sdamd.__version__, family)
    found: dict[str, list[Observation]] = {}
    for each in _read(cache / FILE):
        if each.about[:-1] == wanted:
            found.setdefault(each.key, []).append(each)
    sizes = {name: [o.bytes for o in seen if o.bytes] for name, seen in found.items()}
    times = {name: [o.seconds for o in seen if o.seconds] for name, seen in found.items()}
    return Learnt(
        bytes={name: max(values) for name, values in sizes.items() if values},
        seconds={name: _middle(values[-KEPT:]) for name, values in times.items() if values},
    )


def keep(cache: Path, observations: Iterable[Observation]) -> None:
    """Add observations to those of this machine.

    Raises:
        StorageError: the file cannot be written.
    """
    text = "".join(map(_line, observations))
    if not text:
        return
    path = cache / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size + len(text) > BYTES_MAX:
            _write_anew(path)
        # One write of whole lines, at the end wherever that is by then.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _write_anew(path: Path) -> None:
    """Keep of each factor the highest, and the last times; of all factors those used last."""
    found: dict[tuple[str, ...], list[Observation]] = {}
    for each in _read(path):
        found.setdefault(each.about, []).append(each)
        found[each.about] = found.pop(each.about)  # to the end
    lines: list[str] = []
    for seen in found.values():
        highest = max(seen, key=lambda each: each.bytes or 0.0)
        last = seen[-KEPT:]
        lines += map(_line, last if highest in last else [highest, *last])
    while sum(map(len, lines)) > BYTES_MAX // 2:
        del lines[: len(lines) // 4 + 1]
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> Iterator[Observation]:
    try:
        with path.open("rb") as file:
            # A file that is far larger is none of ours.
            lines = file.read(2 * BYTES_MAX).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield Observation.from_dict(json.loads(line))
        except (ValueError, RecursionError, BadRequest):
            continue  # cut off when a process died, or nothing of ours


def _line(each: Observation) -> str:
    return json.dumps(asdict(each), separators=(",", ":")) + "\n"


def _within(value: float | None, bounds: tuple[float, float]) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return round(min(max(value, bounds[0]), bounds[1]), 4)


def _middle(values: list[float]) -> float:
    """The median; of two the lower, since what delays a run is more than what speeds it up."""
    return sorted(values)[(len(values) - 1) // 2]


def _problem(name: str, value: Any) -> str | None:
    if name in _TEXTS:
        if isinstance(value, str) and re.fullmatch(_TEXTS[name], value):
            return None
        return f"{name} is {_short(value)}; allowed is {_TEXTS[name]}"
    low, high = SIZES if name == "bytes" else TIMES
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (number and low <= value <= high):
        return None
    return f"{name} is {_short(value)}; allowed {low:g} to {high:g}, or null"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
