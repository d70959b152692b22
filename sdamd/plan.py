"""How a job will run on a GPU: chosen before the run, with reasons and predicted bytes."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import product

from sdamd import vram
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadRequest
from sdamd.hardware.gpu import ARCHITECTURES, Gpu, Kind
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
BATCH_MAX_SMALL = 8
"""For the embedded model, whose steps are shorter than Python's share of them."""


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
    side of the tiles in which the VAE works, in pixels; 0 is the whole picture at once. `batch`
    is how many pictures share one denoising pass. `attention` is `sdpa` or `sliced`, `offload`
    `none` or `model` (parts wait in RAM until their turn). `budget_bytes` is None on the CPU.
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
    *, count: int = 1, budget_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """Choose how `count` jobs like `job` run on `gpu`, or on the CPU when it is None.

    Takes the first way that fits the budget, from the fastest to the most frugal; the last one
    is returned even when it does not fit, and its `verdict` says so.

    Raises:
        BadRequest: a setting asks for what the device cannot do.
    """
    ways = list(_ways(job, gpu, checkpoint, settings, count, budget_bytes))
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
    if plan.offload == "none" and plan.device != "cpu":
        return replace(plan, offload="model", reasons=said)
    return None


def nearest_that_fits(
    job: Job, gpu: Gpu, checkpoint: Checkpoint, settings: Settings, *, budget_bytes: int | None = None
) -> dict[str, int] | None:  # fmt: skip
    """The largest size of about the same shape that fits, as request fields."""
    for percent in range(95, 5, -5):
        width, height = (
            max(64, side * percent // 100 // 64 * 64) for side in (job.width, job.height)
        )
        smaller = replace(job, width=width, height=height)
        plan = make_plan(smaller, gpu, checkpoint, settings, budget_bytes=budget_bytes)
        if plan.verdict is not Verdict.DOES_NOT_FIT:
            return {"width": width, "height": height}
    return None


def budget_of(gpu: Gpu) -> int:
    """What a run may take: an APU's share of RAM or a card's own memory, less what is spoken for."""
    memory = max(gpu.vram_bytes, gpu.gtt_bytes) if gpu.kind is Kind.APU else gpu.vram_bytes
    return max(0, memory - vram.CONTEXT_BYTES - DESKTOP_BYTES)


def _ways(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings,
    count: int, budget_bytes: int | None,
) -> Iterator[Plan]:  # fmt: skip
    dtype, vae_dtype, reasons = _dtypes(gpu, checkpoint, settings)
    # The mask that the worker starts under leaves torch this GPU alone, so it needs no index.
    device = "cpu" if gpu is None else "cuda"
    attention = "sdpa" if gpu is None or _fused(gpu) else "sliced"
    if attention == "sliced" and gpu is not None:
        reasons = (*reasons, f"attention one head at a time: {gpu.arch} has no fused kernel")
    most = (
        BATCH_MAX_SMALL if checkpoint.family.name == "tiny" else (1 if gpu is None else BATCH_MAX)
    )
    largest = min(count, settings.batch_size or most)
    batches = [largest]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    if budget_bytes is None and gpu is not None:
        budget_bytes = budget_of(gpu)
    offloads = ("none",) if gpu is None else ("none", "model")
    for offload, tile, batch in product(offloads, TILES, batches):
        stages = _stages(
            job, checkpoint, dtype=dtype, vae_dtype=vae_dtype, batch=batch, tile=tile,
            attention=attention, offload=offload,
        )  # fmt: skip
        yield Plan(
            device=device, dtype=dtype, vae_dtype=vae_dtype, batch=batch, vae_tile=tile,
            attention=attention, offload=offload, stages=stages, budget_bytes=budget_bytes,
            reasons=reasons,
        )  # fmt: skip


def _stages(
    job: Job, checkpoint: Checkpoint, *, dtype: str, vae_dtype: str, batch: int, tile: int,
    attention: str, offload: str,
) -> Stages:  # fmt: skip
    denoise = vram.denoise_bytes(
        checkpoint, dtype, width=job.width, height=job.height, batch=batch, attention=attention
    )
    decode = vram.decode_bytes(
        vae_dtype, width=job.width, height=job.height, batch=batch, tile=tile
    )
    text = vram.text_bytes(checkpoint, dtype)
    parts = checkpoint.parameters
    if offload == "model":
        unet, vae = parts.unet * vram.BYTES_OF[dtype], parts.vae * vram.BYTES_OF[vae_dtype]
        return Stages(text=text, denoise=unet + denoise, decode=vae + decode)
    weights = vram.weights_bytes(checkpoint, dtype, vae_dtype)
    return Stages(text=weights + 16 * 2**20, denoise=weights + denoise, decode=weights + decode)


def _dtypes(
    gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings
) -> tuple[str, str, tuple[str, ...]]:
    """The type of the UNet, that of the VAE, and why."""
    if gpu is None:
        if settings.dtype is Dtype.FLOAT16:
            raise BadRequest(
                "dtype is float16; allowed on the CPU are float32 and bfloat16, since most of "
                "its kernels have no float16"
            )
        dtype = "float32" if settings.dtype is Dtype.AUTO else str(settings.dtype)
        return dtype, "float32", (f"{dtype} on the CPU",)
    known = ARCHITECTURES.get(gpu.arch)
    has_bfloat16 = known is not None and known.bf16
    if settings.dtype is Dtype.BFLOAT16 and not has_bfloat16:
        raise BadRequest(f"dtype is bfloat16; allowed on {gpu.arch} are float16 and float32")
    dtype = "float16" if settings.dtype is Dtype.AUTO else str(settings.dtype)
    if dtype == "float32":
        return dtype, dtype, ("float32 was asked for",)
    if has_bfloat16:
        return dtype, "bfloat16", (f"{dtype}; the VAE in bfloat16, whose range it cannot leave",)
    if checkpoint.family.vae_needs_float32:
        title = checkpoint.family.title
        return (
            dtype,
            "float32",
            (f"{dtype}; the VAE in float32, since {title}'s overflows float16",),
        )
    return dtype, dtype, (f"{dtype}, which {gpu.arch or 'this card'} computes at full rate",)


def _fused(gpu: Gpu) -> bool:
    known = ARCHITECTURES.get(gpu.arch)
    return known is not None and known.fused_attention != "no"


def _reasons(chosen: Plan, fastest: Plan) -> Iterator[str]:
    if chosen.batch < fastest.batch:
        yield f"{chosen.batch} at a time instead of {fastest.batch}, to fit"
    if chosen.vae_tile:
        yield f"VAE in tiles of {chosen.vae_tile} pixels, to fit"
    if chosen.offload != "none":
        yield "parts wait in RAM until their turn, to fit"
    if chosen.budget_bytes is not None:
        yield (
            f"{chosen.stages.peak / GIB:.1f} of {chosen.budget_bytes / GIB:.1f} GiB that a run may take"
        )
