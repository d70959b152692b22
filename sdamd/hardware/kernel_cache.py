"""Where MIOpen may keep what it finds out: a folder of its own for each process that runs."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sdamd.hardware.tuning import MIOPEN_FOLDERS, kernel_cache

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

KERNELS, LOCK = "kernels", "lock"
SLOTS = 8
"""How many sdamd at once get a folder that lasts; more than that is no usual day."""


@dataclass(slots=True, kw_only=True)
class KernelCache:
    """Variables that name the folder, sentences about it, and the lock that keeps others out.

    The lock goes with this value, or with the process.
    """

    variables: dict[str, str]
    said: tuple[str, ...] = ()
    lock: IO[bytes] | None = None

    def close(self) -> None:
        """Leave the folder to the next one."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None


def claim(cache: Path, torch: str, gfx: str, environ: Mapping[str, str]) -> KernelCache:
    """Make MIOpen's folder for one torch and one architecture, readable by its owner alone.

    Its database breaks when two processes write it, so a second sdamd gets a second folder. Where
    none can be made, MIOpen's own default stays, and the sentence says why. Folders that the user
    has named stay theirs.
    """
    if all(name in environ for name in MIOPEN_FOLDERS):
        return KernelCache(variables={})
    first = kernel_cache(cache, torch, gfx)
    try:
        for slot in range(1, SLOTS + 1):
            folder = first if slot == 1 else first.with_name(f"{first.name}-{slot}")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (folder / LOCK).open("ab")
            try:
                if _locked(lock):
                    named = _made(folder)
                    found = {name: path for name, path in named.items() if name not in environ}
                    return KernelCache(variables=found, lock=lock)
            except OSError:
                lock.close()
                raise
            lock.close()
    except OSError as error:
        return KernelCache(
            variables={},
            said=(
                f"{first} cannot be used ({error.strerror}), so MIOpen keeps its kernels where it "
                "does by itself; --home names another place",
            ),
        )
    return KernelCache(
        variables={},
        said=(f"{SLOTS} sdamd use {first.parent} already, so MIOpen's own folder is taken",),
    )


def mark_of(environ: Mapping[str, str], shape: str) -> Path | None:
    """The mark to leave once `shape` has run with the kernels of this folder.

    None where it has run before, or where the folder is not one of ours.
    """
    kernels = Path(environ.get(MIOPEN_FOLDERS[1], ""))
    if kernels.name != KERNELS or not (kernels.parent / LOCK).exists():
        return None
    mark = kernels.parent / "shapes" / shape
    return None if mark.exists() else mark


def leave(mark: Path) -> None:
    """Remember that a shape has run; where that cannot be written, the notice comes once more."""
    with suppress(OSError):
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        mark.touch()


def _made(folder: Path) -> dict[str, str]:
    """The database and the compiled kernels, in folders that can be written for sure."""
    named = {}
    for name, part in zip(MIOPEN_FOLDERS, ("database", KERNELS), strict=True):
        path = folder / part
        path.mkdir(mode=0o700, exist_ok=True)
        trial = path / f"writable-{os.getpid()}"
        trial.write_bytes(b"1")
        trial.unlink()
        named[name] = str(path)
    return named


def _locked(file: IO[bytes]) -> bool:
    with suppress(BlockingIOError, PermissionError):
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
