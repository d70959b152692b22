"""How a job will run on a GPU: chosen before the run, with reasons and predicted bytes."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import product

from sdamd import vram
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadRequest
from sdamd.hardware.gpu import FusedAttention, Gpu
from sdamd.hardware.runtime import Engine
from sdamd.request import Job
from sdamd.settings import Dtype, Settings

log = logging.getLogger(__name__)

GIB = 2**30
DESKTOP_BYTES = 700 * 2**20
"""What a desktop usually holds of the card that drives the screen: 0.3 to 1.5 GiB."""
TILES = (0, 512, 256)
"""Sides of the VAE's tiles in pixels, in order of preference; 0 is no tiles."""
BATCH_MAX = 4
"""On a GPU more pictures at once gain nothing: measured on RDNA 2 and 3, flat beyond four."""
BATCH_MAX_SMALL = 16
"""For small models, whose steps are shorter than Python's share of them: at 128 pixels a picture
of sixteen takes 60 % of the time of a single one."""
BATCH_PIXELS_SMALL = 16 * 128 * 128
"""With more pixels in a pass that gain is gone, and the first picture only comes later."""


class Verdict(StrEnum):
    """Whether a job fits a card."""

    FITS = "fits"
    SLOWER = "slower"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Peak bytes on the device while each stage runs, weights included."""

    text: int
    denoise: int
    decode: int

    @property
    def peak(self) -> int:
        """The highest of them."""
        return max(self.text, self.denoise, self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choices for one run. `dtype` is `float32`, `float16` or `bfloat16`.

    `vae_dtype` may be wider than `dtype`, since some VAEs overflow in float16. `vae_tile` is the
    side of the tiles in which the VAE works, in pixels, on one picture after another; 0 is all
    pictures whole and at once. `batch` is how many pictures share one denoising pass.
    `attention` is `sdpa` or `sliced`, `offload` `none` or `model` (parts wait in RAM until their
    turn). `budget_bytes` is None on the CPU, and where nobody knows the size of the memory.
    """

    device: str
    dtype: str
    vae_dtype: str
    batch: int
    vae_tile: int
    attention: str
    offload: str
    stages: Stages
    budget_bytes: int | None
    reasons: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """`slower` when the card forced tiles or offloading."""
        if self.budget_bytes is not None and self.stages.peak > self.budget_bytes:
            return Verdict.DOES_NOT_FIT
        return Verdict.SLOWER if self.vae_tile or self.offload != "none" else Verdict.FITS

    def to_dict(self) -> dict[str, object]:
        """The shape of `plan --json`, but for what the caller knows better."""
        return {
            "verdict": str(self.verdict),
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.stages.peak,
            "stages": asdict(self.stages),
            "choices": {
                "device": self.device,
                "dtype": self.dtype,
                "vae_dtype": self.vae_dtype,
                "attention": self.attention,
                "offload": self.offload,
                "vae_tile": self.vae_tile,
                "denoise_tile": 0,
                "batch": self.batch,
            },
            "reasons": list(self.reasons),
            "seconds": None,
        }


def make_plan(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings,
    *, engine: Engine | None = None, count: int = 1, budget_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """Choose how `count` jobs like `job` run on `gpu`, or on the CPU when it is None.

    Without `engine` that is ROCm on a GPU. Takes the first way that fits the budget, from the
    fastest to the most frugal; the last one is returned even when it does not fit, and its
    `verdict` says so.

    Raises:
        BadRequest: a setting asks for what the device cannot do.
    """
    engine = engine or (Engine.CPU if gpu is None else Engine.ROCM)
    ways = list(_ways(job, gpu, engine, checkpoint, settings, count, budget_bytes))
    chosen = next((w for w in ways if w.verdict is not Verdict.DOES_NOT_FIT), ways[-1])
    reasons = (*chosen.reasons, *_reasons(chosen, ways[0]))
    log.debug("plan: %s", "; ".join(reasons))
    return replace(chosen, reasons=reasons)


def more_frugal(plan: Plan) -> Plan | None:
    """The next way down after the device ran out of memory; None at the end of the ladder."""
    said = (*plan.reasons, "the device ran out of memory, so a more frugal way was taken")
    if plan.batch > 1:
        return replace(plan, batch=plan.batch // 2, reasons=said)
    smaller = [t for t in TILES if t and (plan.vae_tile == 0 or t < plan.vae_tile)]
    if smaller:
        return replace(plan, vae_tile=smaller[0], reasons=said)
    if plan.offload == "none" and plan.device not in {"cpu", "directml-cpu"}:
        return replace(plan, offload="model", reasons=said)
    return None


def nearest_that_fits(
    job: Job, gpu: Gpu, checkpoint: Checkpoint, settings: Settings,
    *, engine: Engine | None = None, budget_bytes: int | None = None,
) -> dict[str, int] | None:  # fmt: skip
    """The largest size of about the same shape that fits, as request fields; None for none."""
    for percent in range(95, 5, -5):
        width, height = (
            max(64, side * percent // 100 // 64 * 64) for side in (job.width, job.height)
        )
        smaller = replace(job, width=width, height=height)
        plan = make_plan(
            smaller, gpu, checkpoint, settings, engine=engine, budget_bytes=budget_bytes
        )
        if plan.verdict is not Verdict.DOES_NOT_FIT:
            return {"width": width, "height": height}
    return None


def budget_of(gpu: Gpu, engine: Engine = Engine.ROCM) -> int | None:
    """What a run may take of the memory, less what is spoken for; None where its size is unknown.

    Windows often cannot tell the size, and a guess would force tiles on a large card. There,
    what does not fit spills into RAM without an error and runs ten times slower, so a tenth of
    the card is left alone.
    """
    if not gpu.usable_bytes:
        return None
    usable = gpu.usable_bytes
    if engine is Engine.DIRECTML:
        usable = usable * 9 // 10
    return max(0, usable - vram.CONTEXT_BYTES - DESKTOP_BYTES)


def _ways(
    job: Job, gpu: Gpu | None, engine: Engine, checkpoint: Checkpoint, settings: Settings,
    count: int, budget_bytes: int | None,
) -> Iterator[Plan]:  # fmt: skip
    dtype, vae_dtype, why = _dtypes(gpu, engine, checkpoint, settings)
    reasons = (*checkpoint.reasons, *why)
    device = _device_name(gpu, engine)
    fused = gpu is None or engine is Engine.DIRECTML or _fused(gpu)
    attention = "sdpa" if fused else "sliced"
    if gpu is not None:
        reasons += tuple(_limits_of(gpu, engine))
        budget_bytes = budget_of(gpu, engine) if budget_bytes is None else budget_bytes
    offloads = ("none",) if gpu is None else ("none", "model")
    batches = _batches(job, gpu, checkpoint, settings, count)
    for offload, tile, batch in product(offloads, TILES, batches):
        way = Plan(
            device=device, dtype=dtype, vae_dtype=vae_dtype, batch=batch, vae_tile=tile,
            attention=attention, offload=offload, stages=Stages(text=0, denoise=0, decode=0),
            budget_bytes=budget_bytes, reasons=reasons,
        )  # fmt: skip
        fused_vae = gpu is None or engine is Engine.DIRECTML or _fused_vae(gpu)
        yield replace(way, stages=_stages(way, job, checkpoint, fused_vae=fused_vae))


def _device_name(gpu: Gpu | None, engine: Engine) -> str:
    if engine is Engine.DIRECTML and gpu is not None:
        return f"directml:{gpu.index}"
    if engine is Engine.DIRECTML_CPU:
        return "directml-cpu"
    # The mask that the worker starts under leaves torch this GPU alone, so it needs no index.
    return "cpu" if gpu is None else "cuda"


def _batches(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings, count: int
) -> list[int]:  # fmt: skip
    """How many pictures may share a pass: from the most that make sense down to one."""
    most = BATCH_MAX if gpu is not None else 1
    if checkpoint.family.name == "tiny":
        most = max(1, min(BATCH_MAX_SMALL, BATCH_PIXELS_SMALL // (job.width * job.height)))
    batches = [min(count, settings.batch_size or most)]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    return batches


def _stages(way: Plan, job: Job, checkpoint: Checkpoint, *, fused_vae: bool) -> Stages:
    size = {"width": job.width, "height": job.height, "batch": way.batch}
    denoise = vram.denoise_bytes(checkpoint, way.dtype, attention=way.attention, **size)
    decode = vram.decode_bytes(way.vae_dtype, tile=way.vae_tile, fused=fused_vae, **size)
    parts = checkpoint.parameters
    if way.offload == "model":
        unet = parts.unet * vram.BYTES_OF[way.dtype]
        vae = parts.vae * vram.BYTES_OF[way.vae_dtype]
        text = vram.text_bytes(checkpoint, way.dtype, batch=way.batch)
        return Stages(text=text, denoise=unet + denoise, decode=vae + decode)
    weights = vram.weights_bytes(checkpoint, way.dtype, way.vae_dtype)
    text = weights + vram.TEXT_ACTIVATIONS * way.batch
    return Stages(text=text, denoise=weights + denoise, decode=weights + decode)


def _dtypes(
    gpu: Gpu | None, engine: Engine, checkpoint: Checkpoint, settings: Settings
) -> tuple[str, str, tuple[str, ...]]:
    """The type of the UNet, that of the VAE, and why."""
    if engine is Engine.DIRECTML_CPU:
        if settings.dtype not in {Dtype.AUTO, Dtype.FLOAT32}:
            raise BadRequest(f"dtype is {settings.dtype}; allowed on directml-cpu is float32")
        return "float32", "float32", ("DirectML's graphs in float32 on the CPU",)
    if gpu is None:
        if settings.dtype is Dtype.FLOAT16:
            raise BadRequest(
                "dtype is float16; allowed on the CPU are float32 and bfloat16, since most of "
                "its kernels have no float16"
            )
        dtype = "float32" if settings.dtype is Dtype.AUTO else str(settings.dtype)
        return dtype, "float32", (f"{dtype} on the CPU",)
    known = gpu.architecture
    has_bfloat16 = known is not None and known.bf16 and engine is not Engine.DIRECTML
    if settings.dtype is Dtype.BFLOAT16 and not has_bfloat16:
        where = "DirectML" if engine is Engine.DIRECTML else gpu.arch
        raise BadRequest(f"dtype is bfloat16; allowed on {where} are float16 and float32")
    dtype = "float16" if settings.dtype is Dtype.AUTO else str(settings.dtype)
    if dtype == "float32":
        return dtype, dtype, ("float32 was asked for",)
    if has_bfloat16:
        return dtype, "bfloat16", (f"{dtype}; the VAE in bfloat16, whose range it cannot leave",)
    if checkpoint.family.vae_needs_float32:
        why = f"{dtype}; the VAE in float32, since {checkpoint.family.title}'s overflows float16"
        return dtype, "float32", (why,)
    return dtype, dtype, (f"{dtype}, which {gpu.arch or 'this card'} computes at full rate",)


def _fused(gpu: Gpu) -> bool:
    known = gpu.architecture
    return known is not None and known.fused_attention is not FusedAttention.NO


def _fused_vae(gpu: Gpu) -> bool:
    """Whether a kernel takes the VAE's heads, which are 512 wide; RDNA 3's stop at 256.

    Source: AOTriton 0.11 and 0.12, which torch's ROCm builds from 2.9 on hold.
    """
    known = gpu.architecture
    return known is not None and _fused(gpu) and not known.generation.startswith("RDNA3")


def _limits_of(gpu: Gpu, engine: Engine) -> Iterator[str]:
    if not gpu.usable_bytes:
        yield "the size of the memory is unknown, so nothing is spared; a budget says it"
    if engine is Engine.DIRECTML:
        return
    known = gpu.architecture
    if not _fused(gpu):
        yield f"attention one head at a time: {gpu.arch or gpu.name} has no fused kernel"
    if known is not None and not known.rocm:
        yield f"no current ROCm build has kernels for {gpu.arch}, so sdamd takes the CPU instead"


def _reasons(chosen: Plan, fastest: Plan) -> Iterator[str]:
    if chosen.batch < fastest.batch:
        yield f"{chosen.batch} at a time instead of {fastest.batch}, to fit"
    if chosen.vae_tile:
        yield f"VAE in tiles of {chosen.vae_tile} pixels, to fit"
    if chosen.offload != "none":
        yield "parts wait in RAM until their turn, to fit"
    if chosen.budget_bytes is not None:
        peak, budget = chosen.stages.peak / GIB, chosen.budget_bytes / GIB
        yield f"{peak:.1f} of {budget:.1f} GiB that a run may take"
