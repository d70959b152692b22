"""How much memory is there now: what others hold of a card, and what is left of the RAM.

Read from the kernel's files below a root, and never from HIP: asking HIP makes a context, which
takes the memory that is asked about.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sdamd.hardware.gpu import Gpu
from sdamd.hardware.linux import KFD_NODES, read_number, read_text

_DRM: Final = "sys/class/drm"
_PROCESSES: Final = "sys/class/kfd/kfd/proc"
_PAGE: Final = 4096
"""Of every system that has a Radeon; a larger one would only make a reading smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at one moment; None for what cannot be read.

    `used_bytes` and `gtt_used_bytes` are what other programs hold of a card's own memory and of the
    RAM that it maps. `ram_bytes` is all RAM, `available_bytes` what the kernel could still give.
    """

    used_bytes: int | None = None
    gtt_used_bytes: int | None = None
    ram_bytes: int | None = None
    available_bytes: int | None = None


def read_memory(root: Path, gpu: Gpu | None) -> Memory:
    """Read it for the machine below `root` and, of its cards, for this one.

    What this program holds itself counts as free: it lets go of it before the next run.
    """
    text = read_text(root / "proc/meminfo")
    ram, available = (_kilobytes(text, name) for name in ("MemTotal", "MemAvailable"))
    if available is not None:
        available += _private(root)
    if gpu is None or not gpu.card:
        return Memory(ram_bytes=ram, available_bytes=available)
    device = root / _DRM / gpu.card / "device"
    used, mapped = (
        read_number(device / f"mem_info_{pool}_used") for pool in ("vram", "gtt")
    )  # fmt: skip
    ours = _held_by_us(root, gpu)
    if gpu.bank_bytes > gpu.vram_bytes:
        # KFD hands out RAM as if it were the card's own.
        mapped = _without(mapped, ours)
        available = None if available is None else available + (ours or 0)
    else:
        used = _without(used, ours)
    return Memory(used_bytes=used, gtt_used_bytes=mapped, ram_bytes=ram, available_bytes=available)


def _without(used: int | None, ours: int | None) -> int | None:
    return None if used is None or ours is None else max(0, used - ours)


def _private(root: Path) -> int:
    """RAM of this process that is nobody else's and no file's."""
    fields = read_text(root / "proc/self/statm").split()
    if len(fields) < 3 or not all(field.isdecimal() for field in fields[:3]):
        return 0
    return max(0, int(fields[1]) - int(fields[2])) * _PAGE


def _kilobytes(text: str, name: str) -> int | None:
    match = re.search(rf"(?m)^{name}:\s*([0-9]{{1,15}}) kB", text)
    return None if match is None else int(match[1]) * 1024


def _held_by_us(root: Path, gpu: Gpu) -> int | None:
    """What this process, its parent and its children hold of the card.

    None where processes compute on it and none of them is known to be ours: in a container the
    kernel lists them by numbers that mean nothing inside.
    """
    try:
        processes = [int(name) for name in os.listdir(root / _PROCESSES) if name.isdecimal()]  # noqa: PTH208
    except OSError:
        return 0
    number = read_number(root / KFD_NODES / str(gpu.node) / "gpu_id")
    held = {
        process: read_number(root / _PROCESSES / str(process) / f"vram_{number}") or 0
        for process in processes
    }
    ours = [process for process in processes if _is_ours(process)]
    if not ours and any(held.values()):
        return None
    return sum(held[process] for process in ours)


def _is_ours(process: int) -> bool:
    own = os.getpid()
    return process in {own, os.getppid()} or _parent_of(process) == own


def _parent_of(process: int) -> int | None:
    """Read the fourth field of `stat`; the second one is a name that may hold anything."""
    fields = read_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else None
