"""What `tune` measured on a card: kept in a small file, and read for every plan.

One file a machine, below the cache. An entry holds for one architecture, one torch and one
version of sdamd; after an update nothing old is believed.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import sdamd
from sdamd.errors import BadRequest, StorageError
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import Engine

FILE: Final = "tuned.json"
FORMAT: Final = 1
CPU: Final = "cpu"
BYTES_MAX: Final = 2**20
"""A file beyond this is none of ours."""

_CHOICES: Final[Mapping[str, tuple[object, ...]]] = {
    "attention": ("fused", "chunked", "sliced", "xformers", "flash"),
    "vae_dtype": ("float32", "float16", "bfloat16"),
    "batch": (1, 2, 4),
    "vae_tile": (0, 256, 512),
    "miopen": (True, False),
    "channels_last": (True, False),
}
"""What can be measured, and each value that a plan can take."""

_TEXTS: Final[Mapping[str, str]] = {
    # Shown to people, and compared: never more than a short word.
    "gfx": r"cpu|gfx[0-9]{1,2}[0-9a-f]{2}",
    "torch": r"[0-9A-Za-z.+_-]{1,60}",
    "sdamd": r"[0-9A-Za-z.+_-]{1,60}",
    "family": r"[0-9a-z-]{1,20}",
    "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The fastest way of one architecture with one family of checkpoints.

    `gfx` is `cpu` for the CPU. `seconds` is of one picture at the family's native size with few
    steps, only for comparing; `date` when it was measured (ISO). The others are as in `Plan`.
    """

    gfx: str
    torch: str
    sdamd: str
    family: str
    date: str
    seconds: float
    attention: str
    batch: int
    vae_dtype: str
    vae_tile: int
    miopen: bool
    channels_last: bool

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Read one entry.

        Raises:
            BadRequest: with everything that is wrong with it.
        """
        if not isinstance(values, Mapping):
            raise BadRequest(f"an entry is {_short(values)}; allowed is an object")
        names = [f.name for f in fields(cls)]
        problems = [f"{name} is missing" for name in names if name not in values]
        problems += [f"{_short(name)} is not known" for name in values if name not in names]
        problems += [p for n in names if n in values and (p := _problem(n, values[n]))]
        if problems:
            raise BadRequest(*problems)
        return cls(**values)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What must be the same for it to hold."""
        return (self.gfx, self.torch, self.sdamd, self.family)


def find(cache: Path, gfx: str, family: str) -> Tuned | None:
    """What was measured here with this torch and this sdamd, or nothing.

    A file that cannot be read is the same as none: it is made again by `tune`.
    """
    try:
        entries = read(cache / FILE)
    except (BadRequest, StorageError):
        return None
    wanted = (gfx, torch_version(), sdamd.__version__, family)
    return next((entry for entry in entries if entry.key == wanted), None)


def for_device(cache: Path, gpu: Gpu | None, engine: Engine, family: str) -> Tuned | None:
    """What was measured here for torch on this device; other engines have nothing to choose."""
    if engine is Engine.CPU:
        return find(cache, CPU, family)
    return find(cache, gpu.arch, family) if gpu is not None and engine is Engine.ROCM else None


def torch_version() -> str:
    """The installed torch with its local part, such as 2.9.1+rocm6.4, without importing it."""
    # It reads packages as mails, and loads all that this takes.
    from importlib import metadata  # noqa: PLC0415

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def read(path: Path) -> tuple[Tuned, ...]:
    """Read a file of `write`, of this machine or another one.

    Raises:
        BadRequest: it is none, with everything that is wrong.
        StorageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > BYTES_MAX:
        raise BadRequest(f"{path} is larger than {BYTES_MAX} bytes; allowed is a file of tune")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        said = found.get("format") if isinstance(found, dict) else None
        raise BadRequest(f"{path}: format is {_short(said)}; allowed {FORMAT}, a file of tune")
    entries = found.get("tuned")
    if not isinstance(entries, list):
        raise BadRequest(f"{path}: tuned is {_short(entries)}; allowed is a list")
    made: list[Tuned] = []
    problems: list[str] = []
    for number, entry in enumerate(entries, start=1):
        try:
            made.append(Tuned.from_dict(entry))
        except BadRequest as error:
            problems += [f"{path}: entry {number}: {problem}" for problem in error.problems]
    if problems:
        raise BadRequest(*problems)
    return tuple(made)


def write(path: Path, entries: tuple[Tuned, ...]) -> None:
    """Write the file whole or not at all; of two entries for the same, the last one stays.

    Raises:
        StorageError: it cannot be written.
    """
    kept = {entry.key: entry for entry in entries}
    text = json.dumps({"format": FORMAT, "tuned": [asdict(e) for e in kept.values()]}, indent=2)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def keep(cache: Path, entries: tuple[Tuned, ...]) -> None:
    """Add entries to those of this machine.

    Raises:
        StorageError: the file cannot be written.
    """
    path = cache / FILE
    try:
        before = read(path)
    except (BadRequest, StorageError):
        before = ()  # none yet, or nothing that anybody could use
    write(path, (*before, *entries))


def _problem(name: str, value: Any) -> str | None:
    if name in _TEXTS:
        if isinstance(value, str) and re.fullmatch(_TEXTS[name], value):
            return None
        return f"{name} is {_short(value)}; allowed is {_TEXTS[name]}"
    if name in _CHOICES:
        # Not just `in`: to Python 1 is True.
        if any(type(value) is type(one) and value == one for one in _CHOICES[name]):
            return None
        allowed = ", ".join(map(str, _CHOICES[name]))
        return f"{name} is {_short(value)}; allowed {allowed}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 < value < 10**6:
        return None
    return f"{name} is {_short(value)}; allowed above 0 to 1000000"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
