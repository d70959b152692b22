"""From a job, a device and a checkpoint to the plan: enumerate, drop, sort, and say why."""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from sdamd import learnt, speed
from sdamd import tuned as measured
from sdamd.checkpoint import Checkpoint
from sdamd.hardware.device import Device
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.memory import Memory, read_memory
from sdamd.hardware.runtime import Engine
from sdamd.hardware.tuning import libraries_of, to_set, tuning_of, variables_of
from sdamd.plan import precision
from sdamd.plan.budget import Budget, budget_of
from sdamd.plan.value import BLOCK_BYTES, BLOCK_BYTES_CPU, GIB, Plan, Stages, Verdict
from sdamd.plan.ways import final_size, storage_of, ways, work_of
from sdamd.request import Job
from sdamd.settings import Attention, Dtype, Settings, VramMode
from sdamd.tuned import Tuned

log = logging.getLogger(__name__)

BATCH_MAX: Final = 4
"""On a GPU more pictures at once gain nothing: measured on RDNA 2 and 3, flat beyond four."""
BATCH_MAX_SMALL: Final = 16
"""For small models, whose steps are shorter than Python's share of them: at 128 pixels a picture
of sixteen takes 60 % of the time of a single one."""
BATCH_PIXELS_SMALL: Final = 16 * 128 * 128
"""With more pixels in a pass that gain is gone, and the first picture only comes later."""
NOTHING_LEARNT: Final[Mapping[str, float]] = {}


def plan_on(
    job: Job, device: Device, checkpoint: Checkpoint, settings: Settings,
    *, count: int = 1, budget_bytes: int | None = None, environ: Mapping[str, str] | None = None,
    root: Path = Path("/"), here: bool = True, platform: str = sys.platform,
) -> Plan:  # fmt: skip
    """The plan of a job on a device: with what was measured and learnt there, and what is free now.

    `here` is whether the device is in this machine, so that its memory can be read.

    Raises:
        BadRequest: a setting asks for what the device cannot do.
    """
    gpu, engine, family = device.gpu, device.engine, checkpoint.family.name
    found, known = None, None
    if here:
        found = measured.for_device(settings.cache, gpu, engine, family)
        known = learnt.for_device(settings.cache, gpu, engine, family)
    return make_plan(
        job, gpu, checkpoint, settings, engine=engine, count=count, budget_bytes=budget_bytes,
        tuned=found, environ=environ, platform=platform,
        factors=NOTHING_LEARNT if known is None else known.bytes,
        time_factors=NOTHING_LEARNT if known is None else known.seconds,
        memory=read_memory(root, gpu) if here else None,
    )  # fmt: skip


def make_plan(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings,
    *, engine: Engine | None = None, count: int = 1, budget_bytes: int | None = None,
    tuned: Tuned | None = None, environ: Mapping[str, str] | None = None,
    memory: Memory | None = None, platform: str = sys.platform, exactly: bool = False,
    factors: Mapping[str, float] = NOTHING_LEARNT,
    time_factors: Mapping[str, float] = NOTHING_LEARNT,
) -> Plan:  # fmt: skip
    """Choose how `count` jobs like `job` run on `gpu`, or on the CPU when it is None.

    What was measured on this device (`tuned`) goes before the table. `environ` is what the user
    has set: what of it differs from what sdamd would set is among the reasons. `factors` and
    `time_factors` are measured over predicted bytes and seconds, by `learnt.key`. `memory` is how
    things stand now; None for a card elsewhere. `budget_bytes` replaces what it would give.
    `exactly` lets no fewer share a pass than `count` and the settings say.

    Without `engine` that is ROCm on a GPU. Of the ways that fit the budget it is the fastest by
    prediction, with the fewest means; where none fits the most frugal, and its `verdict` says so.

    Raises:
        BadRequest: a setting asks for what the device cannot do.
    """
    engine = engine or (Engine.CPU if gpu is None else Engine.ROCM)
    budget = budget_of(
        gpu, engine, settings, memory=memory, budget_bytes=budget_bytes, platform=platform
    )
    usual = _usual(gpu, engine, checkpoint, settings, budget, tuned)
    rates = speed.rates_of(gpu, engine)
    work = work_of(
        job, checkpoint, engine, rates or speed.NOBODY_KNOWS, usual,
        vram_bytes=0 if gpu is None else gpu.vram_bytes or 0, pooled=budget.pooled,
        bytes_factors=factors, seconds_factors=time_factors,
    )  # fmt: skip
    batches = _batches(job, gpu, checkpoint, settings, count, tuned)
    made = ways(work, usual, settings, batches[:1] if exactly else batches, usual.vae_tile)
    chosen = _chosen(made, memory)
    own: tuple[str, ...] = ()
    if gpu is not None and engine is Engine.ROCM:
        own = to_set(variables_of(gpu.arch), environ or {})[1]
    reasons = (
        *chosen.reasons, *own, *budget.warnings, *_reasons(chosen, usual, batches[0], settings),
        *_memory_reasons(chosen, memory), *_figures(chosen),
    )  # fmt: skip
    log.debug("plan: %s", "; ".join(reasons))
    return replace(chosen, reasons=reasons, times=chosen.times if rates else None)


def _chosen(made: list[Plan], memory: Memory | None) -> Plan:
    """The fastest for one picture; the picture changes (tiles of the UNet) only if it must."""
    room = None if memory is None else memory.available_bytes
    fitting = [way for way in made if way.verdict is not Verdict.DOES_NOT_FIT]
    fitting = [w for w in fitting if room is None or w.host_bytes <= room] or fitting
    if fitting:
        return min(
            fitting, key=lambda w: (w.denoise_tile > 0, w.seconds or 0.0, w.means.count(","))
        )
    return min(made, key=lambda w: (w.stages.peak, w.seconds or 0.0))


def _usual(
    gpu: Gpu | None, engine: Engine, checkpoint: Checkpoint, settings: Settings, budget: Budget,
    tuned: Tuned | None,
) -> Plan:  # fmt: skip
    """What holds for every way: types, attention, libraries."""
    dtype, vae_dtype, why = precision.dtypes(gpu, engine, checkpoint, settings)
    attention, vae_attention, said = precision.attention(gpu, engine, settings)
    kernels = () if gpu is None or engine is not Engine.ROCM else tuple(_kernels_of(gpu))
    row = tuning_of("" if gpu is None else gpu.arch)
    usual = Plan(
        device=_device_name(gpu, engine), dtype=dtype, vae_dtype=vae_dtype, batch=1, vae_tile=0,
        attention=attention, vae_attention=vae_attention, offload="none",
        block_bytes=BLOCK_BYTES_CPU if gpu is None else BLOCK_BYTES,
        miopen=row.miopen, channels_last=row.channels_last,
        storage=storage_of(settings),
        stages=Stages(text=0, denoise=0, decode=0), budget_bytes=budget.bytes,
        reasons=(*checkpoint.reasons, *why, *said, *budget.reasons, *kernels),
    )  # fmt: skip
    return usual if tuned is None else _as_measured(usual, tuned, checkpoint, settings)


def _as_measured(usual: Plan, tuned: Tuned, checkpoint: Checkpoint, settings: Settings) -> Plan:
    """What was measured in the place of what the table says; what the user asks for stays."""
    own_attention = settings.attention is not Attention.AUTO
    overflows = tuned.vae_dtype == "float16" and checkpoint.family.vae_needs_float32
    own_dtype = settings.dtype is not Dtype.AUTO or overflows
    made = replace(
        usual, vae_tile=tuned.vae_tile, miopen=tuned.miopen, channels_last=tuned.channels_last,
        attention=usual.attention if own_attention else tuned.attention,
        vae_dtype=usual.vae_dtype if own_dtype else tuned.vae_dtype,
    )  # fmt: skip
    tiles = f" in tiles of {tuned.vae_tile} pixels" if tuned.vae_tile else ""
    reason = (
        f"measured on this {'CPU' if usual.device == 'cpu' else 'card'} on {tuned.date}: attention "
        f"{tuned.attention}, {tuned.batch} at a time, the VAE in {tuned.vae_dtype}{tiles}"
        f"{'' if tuned.miopen else ', without MIOpen'}"
        f"{', channels last' if tuned.channels_last else ''}"
    )
    return replace(made, reasons=(*usual.reasons, reason))


def _device_name(gpu: Gpu | None, engine: Engine) -> str:
    if engine is Engine.DIRECTML and gpu is not None:
        return f"directml:{gpu.index}"
    if engine is Engine.DIRECTML_CPU:
        return "directml-cpu"
    # The mask that the worker starts under leaves torch this GPU alone, so it needs no index.
    return "cpu" if gpu is None else "cuda"


def _batches(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings, count: int,
    tuned: Tuned | None,
) -> list[int]:  # fmt: skip
    """How many pictures may share a pass: from the most that make sense down to one."""
    most = BATCH_MAX if gpu is not None else 1
    if checkpoint.family.name == "tiny":
        width, height = final_size(job)
        most = max(1, min(BATCH_MAX_SMALL, BATCH_PIXELS_SMALL // (width * height)))
    elif tuned is not None:
        most = tuned.batch
    batches = [min(count, settings.batch_size or most)]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    return batches


def _kernels_of(gpu: Gpu) -> Iterator[str]:
    known = gpu.architecture
    if known is None or known.rocm:
        yield libraries_of(gpu)
    else:
        yield f"no current ROCm build has kernels for {gpu.arch}, so sdamd takes the CPU instead"


def _reasons(chosen: Plan, usual: Plan, most: int, settings: Settings) -> Iterator[str]:
    """Each means that is on, and whether memory or the user wants it."""
    asked = settings.vram_mode is not VramMode.AUTO
    why = f"as vram_mode {settings.vram_mode} asks" if asked else "to fit"
    if chosen.batch < most:
        yield f"{chosen.batch} at a time instead of {most}, to fit"
    said = {
        "offload": f"{_LYING.get(chosen.offload, '')}{_resident(chosen)}",
        "passes": f"each step in {chosen.passes} calls of the UNet",
        "feed_forward_chunks": f"feed-forward layers in {chosen.feed_forward_chunks} pieces",
        "vae_bands": f"VAE in bands of {chosen.vae_bands} rows, exactly as whole",
        "vae_tile": f"VAE in tiles of {chosen.vae_tile} pixels",
        "denoise_tile": f"the UNet sees tiles of {chosen.denoise_tile} pixels, which changes what "
        "is in the picture",
        "storage": f"the UNet's weights are kept in {chosen.storage}",
    }
    for name, words in said.items():
        if getattr(chosen, name) != ("" if name == "storage" else getattr(usual, name)):
            own = _own(name, settings)
            yield f"{words}, {'as you asked' if own else why}"


_LYING: Final = {
    "model": "parts wait in RAM until their turn",
    "stream": "layers wait in RAM until their turn",
}


def _resident(chosen: Plan) -> str:
    if not chosen.resident_bytes:
        return ""
    return f" but for {chosen.resident_bytes / GIB:.1f} GiB of the UNet"


def _own(name: str, settings: Settings) -> bool:
    """Whether the user has said how this one choice is to be."""
    given = getattr(settings, name, None)
    tiled = name == "vae_tile" and settings.vae_tiling != "auto"
    return tiled or given not in {None, 0, "auto"}


def _memory_reasons(chosen: Plan, memory: Memory | None) -> Iterator[str]:
    room = None if memory is None else memory.available_bytes
    if room is not None and chosen.host_bytes > room:
        yield (
            f"{chosen.host_bytes / GIB:.1f} GiB of weights wait in RAM, of which "
            f"{room / GIB:.1f} GiB are free: they are read from the disk each time"
        )


def _figures(chosen: Plan) -> Iterator[str]:
    if chosen.budget_bytes is not None:
        peak, budget = chosen.stages.peak / GIB, chosen.budget_bytes / GIB
        yield f"{peak:.1f} of {budget:.1f} GiB that a run may take"
