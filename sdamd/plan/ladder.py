"""What is next when the device runs out of memory after all: pure, from plan to plan.

Every step is exact, but for the VAE's tiles at the end: what changes no picture comes first.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from sdamd.hardware.tuning import CHUNKED
from sdamd.plan.value import BANDS, CHUNKS, GIB, TILES, Plan, Stage


def more_frugal(plan: Plan, stage: str = Stage.RUN) -> Plan | None:
    """The next cheaper plan for one stage after memory ran out in it; None at the end.

    What other stages do stays as it is, but for where weights lie. The `batch` stays too, since
    the latents of its pictures live; only `run`, for an engine that must begin again, halves it.
    `stages` and `activations` go on saying what was predicted at first.

    Raises:
        ValueError: there is no such stage.
    """
    smaller = _LADDERS[Stage(stage)](plan)
    if smaller is None:
        return None
    said = f"{stage}: the device ran out of memory, so a more frugal way was taken"
    return replace(smaller, reasons=(*plan.reasons, said))


def in_figures(plan: Plan, stage: str) -> str:
    """What the stage was predicted to need and what a run may take, as half a sentence."""
    needed = getattr(plan.stages, stage, 0) or plan.stages.peak
    said = f"{stage} needs {needed / GIB:.1f} GiB"
    if plan.budget_bytes is None:
        return f"{said}, and nobody knows how much there is"
    return f"{said}, and a run may take {plan.budget_bytes / GIB:.1f} GiB"


def _run(plan: Plan) -> Plan | None:
    if plan.batch > 1:
        return replace(plan, batch=plan.batch // 2, passes=min(plan.passes, plan.batch // 2 * 2))
    return _vae(plan) or _denoise(plan)


def _denoise(plan: Plan) -> Plan | None:
    if plan.attention in {"math", "sliced"} and not _is_directml(plan):
        return replace(plan, attention=CHUNKED)
    if plan.feed_forward_chunks < CHUNKS and not _is_directml(plan):
        return replace(plan, feed_forward_chunks=CHUNKS)
    samples = 2 * plan.batch
    if plan.passes < samples:
        return replace(plan, passes=min(samples, 2 * plan.passes))
    return _less_resident(plan)


def _vae(plan: Plan) -> Plan | None:
    if not plan.vae_tile and not plan.vae_bands and not _is_directml(plan):
        return replace(plan, vae_bands=BANDS)
    if plan.offload == "none" and (moved := _less_resident(plan)):
        return moved
    tiles = (*TILES, 64) if _is_directml(plan) else TILES
    tile = next((t for t in tiles if not plan.vae_tile or t < plan.vae_tile), None)
    return None if tile is None else replace(plan, vae_tile=tile, vae_bands=0)


def _less_resident(plan: Plan) -> Plan | None:
    """Fewer weights on the device; none of it helps where the device is the host."""
    if plan.device in {"cpu", "directml-cpu"}:
        return None
    if plan.offload == "none":
        return replace(plan, offload="model")
    if plan.offload == "model" and not _is_directml(plan):
        return replace(plan, offload="stream", resident_bytes=0)
    return replace(plan, resident_bytes=0) if plan.resident_bytes else None


def _is_directml(plan: Plan) -> bool:
    """Its graphs are computed whole: nothing in them can be cut, but what goes in can."""
    return plan.device.startswith("directml")


_LADDERS: Final[Mapping[Stage, Callable[[Plan], Plan | None]]] = {
    Stage.TEXT: _less_resident,
    Stage.ENCODE: _vae,
    Stage.DENOISE: _denoise,
    Stage.HIRES: _denoise,
    Stage.DECODE: _vae,
    Stage.LOAD: _less_resident,
    Stage.RUN: _run,
}
