"""Which torch and which onnxruntime this Python has: read from their files, never imported."""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sdamd.hardware.linux import read_text
from sdamd.hardware.runtime import (
    AMD_ROCM714,
    PYTORCH_ROCM63,
    PYTORCH_ROCM64,
    PYTORCH_ROCM72,
    Wheel,
)

_WHEELS = {w.torch: w for w in (PYTORCH_ROCM63, PYTORCH_ROCM64, PYTORCH_ROCM72, AMD_ROCM714)}
_DIST_INFO = re.compile(r"((?:torch|onnxruntime|amd_torch|rocm)\w*)-([^-]+)\.dist-info")
_DEVICE_PACKAGE = re.compile(r"amd-torch-device-(gfx[0-9a-f]{3,4})")
_ASSIGNMENT = re.compile(
    r"""(?m)^(__version__|hip|cuda)\s*(?::[^=\n]{0,60})?=\s*(?:None|['"]([^'"\n]{0,80})['"])"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The torch that an import would load.

    `version` is empty where its files do not tell. `archs` are the gfx targets whose kernels it
    holds, or None where that is not known without asking it.
    """

    folder: Path
    version: str = ""
    hip: str | None = None
    cuda: str | None = None
    archs: frozenset[str] | None = None

    @property
    def kind(self) -> str:
        """What it computes on, for people."""
        if self.hip:
            return f"built for ROCm {self.hip}"
        if self.cuda:
            return f"built for CUDA {self.cuda}"
        return "built for the CPU alone" if self.version else "of an unknown kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """This Python, and the packages in it that decide what computes.

    `packages` are versions by normalised name: torch, onnxruntime and what belongs to them.
    `known` is false where the machine is a recording of another operating system, `borrowed` true
    where it is a recording that has no Python of its own, so that this one stands in.
    """

    executable: str
    python: tuple[int, int]
    torch: Torch | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    known: bool = True
    borrowed: bool = False

    @property
    def by_device(self) -> bool:
        """Whether torch's kernels come in packages of their own, one for each target."""
        return any(_DEVICE_PACKAGE.fullmatch(name) for name in self.packages)


def read_installed(
    path: Sequence[str] | None = None,
    executable: str = sys.executable,
    python: tuple[int, int] = sys.version_info[:2],
) -> Installed:
    """Look through the folders of `sys.path`, or those that are given."""
    folders = [Path(entry or ".") for entry in (sys.path if path is None else path)]
    packages = _packages(folders)
    torch = _read_torch(_find_torch(folders if path is not None else None), packages)
    return Installed(executable=executable, python=python, torch=torch, packages=packages)


def _packages(folders: Sequence[Path]) -> dict[str, str]:
    """By the names of the .dist-info folders; the first on the path counts, as in imports."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = os.listdir(folder)  # noqa: PTH208 - a missing folder raises here
        except OSError:
            continue
        for name in names:
            match = _DIST_INFO.fullmatch(name)
            if match:
                found.setdefault(match[1].replace("_", "-").lower(), match[2])
    return found


def _find_torch(folders: Sequence[Path] | None) -> Path | None:
    """Return the folder of the package, or its file where it is one module."""
    if folders is not None:
        return next((f / "torch" for f in folders if (f / "torch").is_dir()), None)
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def _read_torch(folder: Path | None, packages: Mapping[str, str]) -> Torch | None:
    if folder is None:
        return None
    told = {name: text or None for name, text in _ASSIGNMENT.findall(_version_file(folder))}
    version = told.get("__version__") or ""
    wheel = _WHEELS.get(version)
    return Torch(
        folder=folder,
        version=version,
        hip=told.get("hip"),
        cuda=told.get("cuda"),
        archs=None if wheel is None else _archs(wheel, packages),
    )


def _version_file(folder: Path) -> str:
    return read_text(folder / "version.py") if folder.is_dir() else ""


def _archs(wheel: Wheel, packages: Mapping[str, str]) -> frozenset[str] | None:
    """Return the wheel's targets; of AMD's own wheel those whose packages are installed."""
    if not wheel.per_device:
        return wheel.archs
    matches = [_DEVICE_PACKAGE.fullmatch(name) for name in packages]
    return frozenset(match[1] for match in matches if match) & wheel.archs or None
