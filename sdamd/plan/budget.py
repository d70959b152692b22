"""What a run may take of the memory, and who says so."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sdamd.hardware.gpu import Gpu
from sdamd.hardware.memory import Memory
from sdamd.hardware.runtime import Engine
from sdamd.plan.value import GIB
from sdamd.settings import Settings

CONTEXT_BYTES: Final = round(0.4 * GIB)
"""What HIP itself takes in every process: code objects and queues. Nobody has published a figure
for a Radeon; on other makers' cards 0.13 to 0.6 GiB."""
RESERVE_BYTES: Final = round(0.4 * GIB)
RESERVE_BYTES_WINDOWS: Final = round(0.7 * GIB)
"""Room for the desktop to grow while a run lasts. Source: ComfyUI's values for each system."""
DESKTOP_BYTES: Final = round(0.3 * GIB)
"""What a desktop holds where that cannot be read, as of a card that is not here."""
RAM_RESERVE_BYTES: Final = 3 * GIB
"""Where the RAM is the video memory: what the system and the other programs keep."""
RAM_RESERVE_BYTES_CPU: Final = GIB
RAM_SHARE_CPU: Final = 4
"""On the CPU a run may take at least this part of all RAM: what is free changes from one moment to
the next, and the system makes room by itself."""
PLACEHOLDER_BYTES: Final = GIB
"""DirectML cannot tell, so drivers and programs write this or less for any card."""
APU_POOL_BYTES: Final = 8 * GIB
"""From here on RAM that an APU could map is worth a word about the BIOS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`bytes` is None where the size of the memory is unknown; `given` if the user said it.

    `pooled` is whether the memory is RAM, so that keeping weights in RAM gains nothing.
    """

    bytes: int | None
    given: bool = False
    pooled: bool = False
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def budget_of(
    gpu: Gpu | None, engine: Engine, settings: Settings, *, memory: Memory | None = None,
    budget_bytes: int | None = None, platform: str = sys.platform,
) -> Budget:  # fmt: skip
    """What a run may take of `gpu`, or of the RAM where it is None.

    `memory` is how things stand on the machine that has the card; None for a card elsewhere.
    `budget_bytes`, or else the settings, replace what is found out; a reserve in the settings is
    subtracted in any case.
    """
    memory = memory or Memory()
    reserve = None if settings.vram_reserve_gb is None else round(settings.vram_reserve_gb * GIB)
    given = budget_bytes or round((settings.vram_budget_gb or 0.0) * GIB)
    total, pooled, said = _total(gpu, engine, memory)
    if given:
        above = [] if total is None or given <= total else [
            f"the budget of {given / GIB:.1f} GiB is above the {total / GIB:.1f} GiB that the "
            "machine reports; taken as you asked"
        ]  # fmt: skip
        return Budget(
            bytes=max(0, given - (reserve or 0)), given=True, pooled=pooled,
            reasons=(*said, *_reserved(reserve)), warnings=tuple(above),
        )  # fmt: skip
    if total is None:
        return Budget(bytes=None, pooled=pooled, reasons=said)
    if gpu is None:
        kept = RAM_RESERVE_BYTES_CPU if reserve is None else reserve
        least = 0 if memory.ram_bytes is None else memory.ram_bytes // RAM_SHARE_CPU
        return Budget(
            bytes=max(least, total - kept), pooled=True, reasons=tuple(_reserved(reserve))
        )
    if engine is Engine.DIRECTML:
        # What does not fit spills into RAM without an error and runs ten times slower, so a
        # tenth is left alone.
        total = total * 9 // 10
    usual = RESERVE_BYTES_WINDOWS if platform in {"win32", "windows"} else RESERVE_BYTES
    kept = usual if reserve is None else reserve
    used = memory.gtt_used_bytes if pooled else memory.used_bytes
    others = DESKTOP_BYTES if used is None else used
    left = total - CONTEXT_BYTES - kept - others
    if pooled and memory.available_bytes is not None:
        left = min(left, memory.available_bytes - RAM_RESERVE_BYTES)
    held = () if used is None else (f"other programs hold {used / GIB:.1f} GiB of it now",)
    return Budget(
        bytes=max(0, left), pooled=pooled, reasons=(*said, *_reserved(reserve), *held),
    )  # fmt: skip


def _total(
    gpu: Gpu | None, engine: Engine, memory: Memory
) -> tuple[int | None, bool, tuple[str, ...]]:
    """All the memory that a runtime can hand out, whether that is RAM, and what is to be said."""
    if gpu is None:
        return memory.available_bytes, True, ()
    vram = gpu.vram_bytes or 0
    if not gpu.is_apu:
        if not vram or (engine is Engine.DIRECTML and vram <= PLACEHOLDER_BYTES):
            said = "the size of the memory is unknown, so nothing is spared; a budget says it"
            return None, False, (said,)
        if 0 < gpu.hip_bytes < vram:
            said = f"HIP reports {_gib(gpu.hip_bytes)} of {_gib(vram)} GiB, and it hands them out"
            return gpu.hip_bytes, False, (said,)
        return vram, False, ()
    total = _of_apu(gpu, engine)
    if not total:
        said = "the size of the memory is unknown, so nothing is spared; a budget says it"
        return None, True, (said,)
    said_all = list(_of_an_apu(gpu, engine, total))
    if memory.ram_bytes is not None and total > vram and total > memory.ram_bytes:
        said_all.append(f"{_gib(total)} GiB are reported, of {_gib(memory.ram_bytes)} GiB of RAM")
        total = memory.ram_bytes
    return total, total > vram, tuple(said_all)


def _of_apu(gpu: Gpu, engine: Engine) -> int:
    if engine is not Engine.ROCM:
        return gpu.usable_bytes  # Windows hands out both
    return gpu.hip_bytes or gpu.bank_bytes or gpu.vram_bytes or gpu.gtt_bytes


def _of_an_apu(gpu: Gpu, engine: Engine, total: int) -> Iterator[str]:
    """Both pools; and where the small one counts, what makes it larger."""
    if not gpu.gtt_bytes:
        return
    yield (
        f"an APU: {_gib(gpu.vram_bytes)} GiB set aside for it and {_gib(gpu.gtt_bytes)} GiB of RAM "
        f"that it can map; {_gib(total)} GiB count"
    )
    small = total < gpu.gtt_bytes and gpu.gtt_bytes >= APU_POOL_BYTES
    if engine is Engine.ROCM and small and gpu.gtt_bytes >= 4 * total:
        yield "set the UMA frame buffer size in the BIOS higher to give it more"


def _reserved(reserve: int | None) -> Iterator[str]:
    if reserve is not None:
        yield f"{_gib(reserve)} GiB are kept free, as you asked"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
