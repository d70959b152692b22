"""Every way to run a job that its settings leave open, with what each needs and takes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from sdamd import learnt, scheduler, speed, vram
from sdamd.checkpoint import Checkpoint
from sdamd.hardware.runtime import Engine
from sdamd.plan.value import BANDS, CHUNKS, TILES, Plan, Stages, Times
from sdamd.prompt import subprompts
from sdamd.request import Job
from sdamd.settings import Offload, Settings, Storage, VaeTiling, VramMode

FLOAT8: Final = "float8_e4m3fn"
ALLOCATOR: Final = 1.05
"""What torch's allocator takes for what is allocated, on the least card that a run goes through."""
ALLOCATOR_SEGMENTS: Final = 24 * vram.MIB
"""And what is left of the segments of 20 and of 2 MiB in which it takes small tensors."""
ALLOCATOR_WORKSPACE: Final = 1.3
"""The same for activations among which buffers of gigabytes come and go. Source: replays of whole
runs in a model of the allocator: at most 4.5 % of everything without such buffers, and 29 % of the
activations with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job on a checkpoint, as far as memory and time depend on it.

    `pooled` is whether the device's memory is RAM. The factors are measured over predicted, by
    `learnt.key`. `guided` is how many samples a picture is to the UNet, two with guidance;
    `prompts` how many `AND` joins, `calls_per_step` how often the sampler asks in a step.
    """

    job: Job
    checkpoint: Checkpoint
    engine: Engine
    rates: speed.Rates
    weights: vram.Weights
    vram_bytes: int
    pooled: bool
    bytes_factors: Mapping[str, float]
    seconds_factors: Mapping[str, float]
    guided: int
    prompts: int
    calls_per_step: int


def work_of(
    job: Job, checkpoint: Checkpoint, engine: Engine, rates: speed.Rates, usual: Plan,
    *, vram_bytes: int, pooled: bool, bytes_factors: Mapping[str, float],
    seconds_factors: Mapping[str, float],
) -> Work:  # fmt: skip
    """Read from a job what is asked again for every way."""
    return Work(
        job=job, checkpoint=checkpoint, engine=engine, rates=rates, vram_bytes=vram_bytes,
        weights=vram.weights_of(
            checkpoint, usual.dtype, usual.vae_dtype, storage=usual.storage
        ),
        pooled=pooled, bytes_factors=bytes_factors, seconds_factors=seconds_factors,
        guided=2 if job.guidance_scale > 1 else 1,
        prompts=len(subprompts(job.prompt)) if "AND" in job.prompt else 1,
        calls_per_step=scheduler.parse(job.scheduler)[0].evaluations,
    )  # fmt: skip


def final_size(job: Job) -> tuple[int, int]:
    """The size that is decoded last."""
    return job.hires_size if job.hires_scale > 1 else (job.width, job.height)


def second_size(job: Job) -> tuple[int, int] | None:
    """The size at which the UNet works in the second pass, or nothing."""
    if job.hires_scale <= 1:
        return None
    tile = job.hires_tile
    width, height = job.hires_size
    return (min(tile, width), min(tile, height)) if tile else (width, height)


def is_encoded(job: Job) -> bool:
    """Whether the VAE encodes something before a denoising pass."""
    enlarged = job.hires_scale > 1 and not (job.hires_upscaler or "").startswith("latent")
    return job.init_image is not None or enlarged


# -- what is open ---------------------------------------------------------------------------------


def offloads(work: Work, settings: Settings) -> tuple[str, ...]:
    """Where weights may wait, from the fastest."""
    if settings.offload is not Offload.AUTO:
        return (str(settings.offload),)
    by_mode = {VramMode.FAST: "none", VramMode.BALANCED: "model", VramMode.MINIMAL: "stream"}
    if settings.vram_mode in by_mode:
        return (by_mode[settings.vram_mode],)
    if work.engine is Engine.DIRECTML:
        return ("none", "model")
    if work.engine is Engine.DIRECTML_CPU:
        return ("none",)
    if work.pooled and work.engine is not Engine.CPU:
        return ("none",)  # what waits would wait in the same memory
    return ("none", "model", "stream")


def denoise_ways(work: Work, settings: Settings, batch: int) -> Iterator[dict[str, int]]:
    """How the UNet may do a step, as fields of a plan."""
    samples = work.guided * batch
    every = [1]
    while every[-1] < samples:
        every.append(min(samples, 2 * every[-1]))
    passes: list[int] = [min(settings.passes, samples)] if settings.passes else every
    chunks = [settings.feed_forward_chunks] if settings.feed_forward_chunks else [1, CHUNKS]
    if work.engine in {Engine.DIRECTML, Engine.DIRECTML_CPU}:
        chunks = [1]
    match settings.vram_mode:
        case VramMode.FAST:
            passes, chunks = passes[:1], chunks[:1]
        case VramMode.BALANCED:
            chunks = chunks[-1:]
        case VramMode.MINIMAL:
            passes, chunks = passes[-1:], chunks[-1:]
        case _:
            pass
    for some, pieces in product(passes, chunks):
        yield {"passes": some, "feed_forward_chunks": pieces}


def vae_ways(
    work: Work, settings: Settings, width: int, tuned_tile: int
) -> Iterator[dict[str, int]]:
    """How the VAE may work, as fields of a plan: whole, in bands, in tiles."""
    directml = work.engine in {Engine.DIRECTML, Engine.DIRECTML_CPU}
    bands = 0 if directml else settings.vae_bands or max(8, BANDS * 1024 // width)
    tiles = [settings.vae_tile] if settings.vae_tile else [
        t for t in (*TILES, *((64,) if directml else ())) if not tuned_tile or t <= tuned_tile
    ]  # fmt: skip
    whole = [{"vae_bands": settings.vae_bands, "vae_tile": 0}]
    if bands and not settings.vae_bands:
        whole.append({"vae_bands": bands, "vae_tile": 0})
    tiled = [{"vae_bands": 0, "vae_tile": tile} for tile in tiles]
    if settings.vae_tiling is VaeTiling.ALWAYS or settings.vae_tile:
        yield from tiled
        return
    if tuned_tile:
        whole = []
    match settings.vram_mode:
        case VramMode.FAST:
            yield from (whole or tiled)[:1]
        case VramMode.BALANCED if settings.vae_tiling is not VaeTiling.NEVER:
            yield from (*whole[1:], *tiled)
        case VramMode.MINIMAL:
            yield from whole[-1:] if settings.vae_tiling is VaeTiling.NEVER else tiled[-2:-1]
        case _:
            yield from whole
            if settings.vae_tiling is not VaeTiling.NEVER:
                yield from tiled


def denoise_tiles(work: Work) -> tuple[int, ...]:
    """Sides of the tiles of the UNet, from 0 for none; what the job says is kept to."""
    if work.job.denoise_tile is not None:
        return (work.job.denoise_tile,)
    family = work.checkpoint.family
    side = max(family.width, family.height)
    larger = max(*final_size(work.job), work.job.width, work.job.height) > side
    return (0, side) if larger and family.name != "tiny" else (0,)


def storage_of(settings: Settings) -> str:
    """Only what is asked for: it is the one choice that loses something everywhere."""
    return FLOAT8 if settings.storage is Storage.FLOAT8 else ""


# -- what a way needs -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one stage: bytes on the device with margins, those beyond the weights, and seconds."""

    needed: int
    activations: int
    seconds: float


def text_cost(work: Work, way: Plan) -> Cost:
    """Of all prompts of the pass."""
    samples = work.guided * way.batch
    fused = way.attention == "fused"
    active = vram.text_bytes(work.checkpoint.family.name, way.dtype, samples=samples, fused=fused)
    flops = speed.UNETS[work.checkpoint.family.name]
    seconds = flops.text * samples / _flops(work, way.dtype) + work.rates.call
    return _cost(work, way, "text", vram.Need(tensors=active), seconds)


def denoise_cost(work: Work, way: Plan, stage: str, size: tuple[int, int], steps: float) -> Cost:
    """Of all steps of a pass."""
    family = work.checkpoint.family.name
    samples = work.guided * way.batch
    together = -(-samples // way.passes)
    side = way.denoise_tile
    tiled = side and max(size) > side
    width, height = (min(side, length) for length in size) if tiled else size
    need = vram.denoise_need(
        family, way.dtype, width=width, height=height, samples=together,
        attention=way.attention, block_bytes=way.block_bytes,
        feed_forward_chunks=way.feed_forward_chunks, workspace_limit=_limit(work, way.dtype),
        waiting=samples - together,
    )  # fmt: skip
    if tiled or way.passes > 1:
        # What the calls gave so far, and the picture of which they see a part: latents in float32.
        need = need.and_beside(samples * size[0] * size[1] // 64 * 16 * 4 * 3)
    number, pixels = speed.cut(*size, side if tiled else 0)
    weights = work.weights
    moving = weights.unet - way.resident_bytes if way.offload == "stream" else 0
    seconds = speed.call_seconds(
        work.rates, speed.UNETS[family], half=_half(work, way.dtype), pixels=pixels,
        samples=together, attention=way.attention, weights=weights.unet, streamed=moving,
    )  # fmt: skip
    if way.feed_forward_chunks > 1:
        seconds *= speed.CHUNKED
    others = seconds / together * (work.prompts - 1) * way.batch
    per_step = number * (seconds * way.passes + others)
    return _cost(work, way, stage, need, per_step * steps * work.calls_per_step)


def vae_cost(work: Work, way: Plan, stage: str, size: tuple[int, int]) -> Cost:
    """Of decoding or encoding all pictures of a pass."""
    family, decoding = work.checkpoint.family.name, stage == "decode"
    need = vram.vae_need(
        vram.DECODE if decoding else vram.ENCODE, way.vae_dtype, width=size[0], height=size[1],
        batch=way.batch, attention=way.vae_attention, tile=way.vae_tile, bands=way.vae_bands,
        block_bytes=way.block_bytes,
        workspace_limit=_limit(work, way.vae_dtype) if way.miopen else None,
    )  # fmt: skip
    flops = (
        speed.DECODE.get(family, speed.DECODE_SD) if decoding
        else speed.ENCODE.get(family, speed.ENCODE_SD)
    )  # fmt: skip
    number, pixels = speed.cut(*size, way.vae_tile)
    weights = work.weights.vae
    seconds = number * way.batch * speed.call_seconds(
        work.rates, flops, half=_half(work, way.vae_dtype), pixels=pixels, samples=1,
        attention=way.vae_attention, weights=weights,
    )  # fmt: skip
    if way.vae_bands:
        seconds *= speed.BANDED
    return _cost(work, way, stage, need, seconds)


def moving_seconds(work: Work, way: Plan) -> float:
    """Bringing parts to the device and away again, once for the pictures of a pass."""
    weights = work.weights
    if way.offload == "none" or work.pooled:
        return 0.0
    # What streams is moved within the steps, the first one of them with all of it.
    unet = 0 if way.offload == "stream" else weights.unet
    return speed.moved_seconds(work.rates, weights.text + unet + weights.vae)


def _cost(work: Work, way: Plan, stage: str, need: vram.Need, seconds: float) -> Cost:
    key = learnt.key(
        stage, dtype=way.dtype, vae_dtype=way.vae_dtype, attention=way.attention,
        vae_attention=way.vae_attention,
    )  # fmt: skip
    need = need.times(work.bytes_factors.get(key, 1.0))
    if work.engine in {Engine.CPU, Engine.DIRECTML_CPU}:
        need = replace(need, with_workspace=0)  # no MIOpen there
    part = {"text": "text", "denoise": "unet", "hires": "unet"}.get(stage, "vae")
    there, slots = _lying(work, way, part)
    active = need.bytes + slots
    margin = max(
        ALLOCATOR * need.tensors, ALLOCATOR_WORKSPACE * need.with_workspace
    )  # fmt: skip
    return Cost(
        needed=round(ALLOCATOR * (there + slots) + margin) + ALLOCATOR_SEGMENTS, activations=active,
        seconds=seconds * work.seconds_factors.get(key, 1.0),
    )  # fmt: skip


def _lying(work: Work, way: Plan, part: str) -> tuple[int, int]:
    """Weights that lie on the device in the turn of a part, and the layers that pass through."""
    weights = work.weights
    if way.offload == "none":
        return weights.total, 0
    if way.offload == "model":
        return int(getattr(weights, part)), 0
    family = work.checkpoint.family.name
    layer, dtype = {
        "text": (vram.TEXTS[family][-1].largest_layer, way.dtype),
        "unet": (vram.UNETS[family].largest_layer, way.dtype),
        "vae": (vram.VAE_LAYER, way.vae_dtype),
    }[part]  # fmt: skip
    whole = int(getattr(weights, part))
    slots = min(whole, vram.in_flight(layer, dtype))
    return (way.resident_bytes if part == "unet" else 0), slots


def host_bytes(work: Work, way: Plan) -> int:
    """What waits in RAM."""
    return 0 if way.offload == "none" else work.weights.total


def _limit(work: Work, dtype: str) -> int:
    return vram.miopen_limit(dtype, work.vram_bytes)


def _half(work: Work, dtype: str) -> bool:
    return dtype != "float32" and work.engine is not Engine.CPU


def _flops(work: Work, dtype: str) -> float:
    return work.rates.flops if _half(work, dtype) else work.rates.flops_float32


# -- all together ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A way through one or several stages, and what they cost."""

    fields: Mapping[str, int]
    costs: Mapping[str, Cost]

    @property
    def needed(self) -> int:
        return max((cost.needed for cost in self.costs.values()), default=0)

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs.values())

    @property
    def means(self) -> int:
        return sum(1 for name, value in self.fields.items() if value > (name not in _FROM_ZERO))


_FROM_ZERO: Final = frozenset({"vae_tile", "vae_bands", "denoise_tile", "resident_bytes"})


def ways(
    work: Work, usual: Plan, settings: Settings, batches: list[int], tuned_tile: int = 0
) -> list[Plan]:
    """The best way with each batch, place of the weights and kind of canvas, from the fastest.

    What a stage costs depends on these and on its own choices alone, so for each of them the
    fastest choice that fits is the best one; where none fits, the most frugal.
    """
    return [
        _best(work, replace(usual, offload=offload, batch=batch, denoise_tile=side), settings,
              tuned_tile)
        for side in denoise_tiles(work)
        for offload in offloads(work, settings)
        for batch in batches
    ]  # fmt: skip


def _best(work: Work, way: Plan, settings: Settings, tuned_tile: int) -> Plan:
    budget = way.budget_bytes
    if way.offload == "stream" and budget is not None and settings.vram_mode is VramMode.AUTO:
        least = _denoised(work, way, settings, budget)
        way = replace(way, resident_bytes=_resident(work, least, budget))
    denoised = _denoised(work, way, settings, budget)
    final = second_size(work.job) or (work.job.width, work.job.height)
    # What is exact goes before what is not, and large tiles, with fewer seams, before small ones.
    coded = _first(
        (
            _Choice(fields=fields, costs=_coded(work, replace(way, **fields), final))  # type: ignore[arg-type]
            for fields in vae_ways(work, settings, final[0], tuned_tile)
        ),
        budget,
    )
    costs = {**denoised.costs, **coded.costs, "text": text_cost(work, way)}
    way = replace(way, **denoised.fields, **coded.fields)  # type: ignore[arg-type]
    upscaled = _upscaled(work, way)
    if upscaled is not None:
        costs["upscale"] = upscaled
    return replace(
        way,
        stages=Stages(**{"text": 0, **{n: c.needed for n, c in costs.items()}}),
        activations=Stages(**{"text": 0, **{n: c.activations for n, c in costs.items()}}),
        times=Times(
            **{n: c.seconds for n, c in costs.items()}, moving=moving_seconds(work, way)
        ),
        host_bytes=host_bytes(work, way),
    )  # fmt: skip


def _denoised(work: Work, way: Plan, settings: Settings, budget: int | None) -> _Choice:
    job = work.job
    steps = job.steps * (1.0 if job.strength is None else job.strength)
    second = second_size(job)

    def costs(tried: Plan) -> dict[str, Cost]:
        made = {"denoise": denoise_cost(work, tried, "denoise", (job.width, job.height), steps)}
        if second is not None:
            again = (job.hires_steps or job.steps) * (job.hires_strength or 0.5)
            number = speed.cut(*job.hires_size, job.hires_tile)[0]
            made["hires"] = denoise_cost(work, tried, "hires", second, again * number)
        return made

    return _fastest(
        (
            _Choice(fields=fields, costs=costs(replace(way, **fields)))  # type: ignore[arg-type]
            for fields in denoise_ways(work, settings, way.batch)
        ),
        budget,
    )


def _coded(work: Work, way: Plan, final: tuple[int, int]) -> dict[str, Cost]:
    # Of a second pass in tiles each tile is encoded and decoded by itself.
    made = {"decode": vae_cost(work, way, "decode", final)}
    if is_encoded(work.job):
        made["encode"] = vae_cost(work, way, "encode", final)
    return made


def _upscaled(work: Work, way: Plan) -> Cost | None:
    if work.job.upscale <= 1:
        return None
    width, height = final_size(work.job)
    there = _lying(work, way, "vae")[0] if way.offload == "none" else 0
    flops = speed.UPSCALE_FLOPS * width * height
    return Cost(
        needed=round(ALLOCATOR * (there + vram.UPSCALE_BYTES)), activations=vram.UPSCALE_BYTES,
        seconds=way.batch * (flops / work.rates.flops_float32 + work.rates.call),
    )  # fmt: skip


def _resident(work: Work, denoised: _Choice, budget: int) -> int:
    """As many of the UNet's weights as the budget leaves room for, in whole steps of 64 MiB."""
    room = (budget - denoised.needed) / ALLOCATOR
    unet = work.weights.unet
    step = 64 * vram.MIB
    return max(0, min(int(room), unet - step) // step * step)


def _fastest(choices: Iterator[_Choice], budget: int | None) -> _Choice:
    """The plain one if it fits, or else the fastest that does, or else the most frugal."""
    every = list(choices)
    fitting = [c for c in every if budget is None or c.needed <= budget]
    if not fitting:
        return min(every, key=lambda c: (c.needed, c.seconds))
    return min(fitting, key=lambda c: (c.means > 0, c.seconds, c.means))


def _first(choices: Iterator[_Choice], budget: int | None) -> _Choice:
    """The first that fits, or else the most frugal."""
    every = list(choices)
    fitting = (c for c in every if budget is None or c.needed <= budget)
    return next(fitting, None) or min(every, key=lambda c: (c.needed, c.seconds))
