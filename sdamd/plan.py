"""How a job will run on a GPU: chosen before the run, with reasons and predicted bytes."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import product

from sdamd import vram
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadRequest
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import Engine
from sdamd.hardware.tuning import (
    CHUNKED,
    FUSED,
    attention_of,
    libraries_of,
    to_set,
    tuning_of,
    variables_of,
)
from sdamd.request import Job
from sdamd.settings import Attention, Dtype, Settings
from sdamd.tuned import Tuned

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


BLOCK_BYTES = 64 * 2**20
"""What the scores of attention may take on a GPU: fits the large caches of RDNA 2 and later."""
BLOCK_BYTES_CPU = 8 * 2**20
"""On a CPU larger blocks leave its caches and gain nothing: `scripts/bench.py attention`."""


class Verdict(StrEnum):
    """Whether a job fits a card."""

    FITS = "fits"
    SLOWER = "slower"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Peak bytes on the device while each stage runs, weights included; 0 for one that is not.

    `encode` is of an init image by the VAE, `hires` of the second denoising pass.
    """

    text: int
    denoise: int
    decode: int
    encode: int = 0
    hires: int = 0
    upscale: int = 0

    @property
    def peak(self) -> int:
        """The highest of them."""
        return max(asdict(self).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choices for one run. `dtype` is `float32`, `float16` or `bfloat16`.

    `vae_dtype` may be wider than `dtype`, since some VAEs overflow in float16. `vae_tile` is the
    side of the tiles in which the VAE works, in pixels, on one picture after another; 0 is all
    pictures whole and at once. `batch` is how many pictures share one denoising pass.
    `attention` is how the UNet attends: `fused`, `chunked` (blocks of scores of `block_bytes`),
    `sliced`, `xformers`, `flash`, or `math` for all scores at once; `vae_attention` is `fused` or
    `chunked`. `miopen` is whether the VAE's convolutions go through it, `channels_last` the layout
    of all convolutions.
    `offload` is `none`, `model` (parts wait in RAM until their turn) or `stream` (layers do, but
    for `resident_bytes` of the UNet's). `passes` is in how many calls the UNet does one step, whose
    samples are two for each picture with guidance; `feed_forward_chunks` in how many pieces its
    feed-forward layers take the tokens. `vae_bands` is how many rows of pixels the VAE's
    convolutions make at a time; 0 is all. `storage` is the type in which the UNet's weights are
    kept; empty is `dtype`. `denoise_tile` is the side in pixels of the tiles in which the UNet
    sees a picture, 0 the whole: the one choice that changes what is in the picture.
    `budget_bytes` is None on the CPU, and where nobody knows the size of the memory.
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
    vae_attention: str = FUSED
    block_bytes: int = BLOCK_BYTES
    miopen: bool = True
    channels_last: bool = False
    passes: int = 1
    feed_forward_chunks: int = 1
    vae_bands: int = 0
    resident_bytes: int = 0
    storage: str = ""
    denoise_tile: int = 0

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
                "vae_attention": self.vae_attention,
                "miopen": self.miopen,
                "channels_last": self.channels_last,
                "offload": self.offload,
                "vae_tile": self.vae_tile,
                "denoise_tile": self.denoise_tile,
                "batch": self.batch,
            },
            "reasons": list(self.reasons),
            "seconds": None,
        }


def make_plan(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings,
    *, engine: Engine | None = None, count: int = 1, budget_bytes: int | None = None,
    tuned: Tuned | None = None, environ: Mapping[str, str] | None = None,
) -> Plan:  # fmt: skip
    """Choose how `count` jobs like `job` run on `gpu`, or on the CPU when it is None.

    What was measured on this device (`tuned`) goes before the table. `environ` is what the user
    has set: what of it differs from what sdamd would set is among the reasons.

    Without `engine` that is ROCm on a GPU. Takes the first way that fits the budget, from the
    fastest to the most frugal; the last one is returned even when it does not fit, and its
    `verdict` says so.

    Raises:
        BadRequest: a setting asks for what the device cannot do.
    """
    engine = engine or (Engine.CPU if gpu is None else Engine.ROCM)
    ways = list(_ways(job, gpu, engine, checkpoint, settings, count, budget_bytes, tuned))
    chosen = next((w for w in ways if w.verdict is not Verdict.DOES_NOT_FIT), ways[-1])
    own: tuple[str, ...] = ()
    if gpu is not None and engine is Engine.ROCM:
        own = to_set(variables_of(gpu.arch), environ or {})[1]
    reasons = (*chosen.reasons, *own, *_reasons(chosen, ways[0]))
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
    count: int, budget_bytes: int | None, tuned: Tuned | None,
) -> Iterator[Plan]:  # fmt: skip
    dtype, vae_dtype, why = _dtypes(gpu, engine, checkpoint, settings)
    attention, vae_attention, said = _attention(gpu, engine, settings)
    reasons = (*checkpoint.reasons, *why, *said)
    if gpu is not None:
        reasons += tuple(_limits_of(gpu, engine))
        budget_bytes = budget_of(gpu, engine) if budget_bytes is None else budget_bytes
    row = tuning_of("" if gpu is None else gpu.arch)
    usual = Plan(
        device=_device_name(gpu, engine), dtype=dtype, vae_dtype=vae_dtype, batch=1, vae_tile=0,
        attention=attention, vae_attention=vae_attention, offload="none",
        block_bytes=BLOCK_BYTES_CPU if gpu is None else BLOCK_BYTES,
        miopen=row.miopen, channels_last=row.channels_last,
        stages=Stages(text=0, denoise=0, decode=0), budget_bytes=budget_bytes, reasons=reasons,
    )  # fmt: skip
    if tuned is not None:
        usual = _as_measured(usual, tuned, checkpoint, settings)
    tiles = [t for t in TILES if not usual.vae_tile or 0 < t <= usual.vae_tile]
    offloads = ("none",) if gpu is None else ("none", "model")
    batches = _batches(job, gpu, checkpoint, settings, count, tuned)
    for offload, tile, batch in product(offloads, tiles, batches):
        way = replace(usual, offload=offload, vae_tile=tile, batch=batch)
        yield replace(way, stages=_stages(way, job, checkpoint))


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


def _attention(
    gpu: Gpu | None, engine: Engine, settings: Settings
) -> tuple[str, str, tuple[str, ...]]:
    """How the UNet attends, how the VAE does, and what is to be said about it."""
    asked = settings.attention
    if engine in {Engine.DIRECTML, Engine.DIRECTML_CPU}:
        _refuse(asked, {Attention.AUTO, Attention.FUSED}, "with DirectML")
        return FUSED, FUSED, ()
    if gpu is None:
        # Packages for GPUs; torch's own kernel of the CPU takes heads of any width.
        _refuse(asked, set(Attention) - {Attention.XFORMERS, Attention.FLASH}, "on the CPU")
        kind = FUSED if asked is Attention.AUTO else str(asked)
        return kind, CHUNKED if asked is Attention.CHUNKED else FUSED, ()
    row = tuning_of(gpu.arch)
    if asked is Attention.FUSED and row.attention != FUSED:
        name = gpu.arch or gpu.name
        said = f"attention fused was asked for; {name} has no kernel, so it holds all scores"
        return "math", row.vae_attention, (said,)
    if asked is Attention.AUTO:
        return row.attention, row.vae_attention, tuple(attention_of(gpu))
    package = {Attention.XFORMERS: "xformers", Attention.FLASH: "flash_attn"}.get(asked)
    if package:
        from importlib.util import find_spec  # noqa: PLC0415  # rarely asked, slow to load

        if find_spec(package) is None:
            raise BadRequest(f"attention is {asked}, but {package} is not installed; {_OTHERS}")
    return str(asked), row.vae_attention, (f"attention {asked}, as you asked",)


_OTHERS = f"allowed without it are {', '.join(list(Attention)[:4])}"


def _refuse(asked: Attention, allowed: set[Attention], where: str) -> None:
    if asked not in allowed:
        names = ", ".join(kind for kind in Attention if kind in allowed)
        raise BadRequest(f"attention is {asked}; allowed {where} {names}")


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
        most = max(1, min(BATCH_MAX_SMALL, BATCH_PIXELS_SMALL // (job.width * job.height)))
    elif tuned is not None:
        most = tuned.batch
    batches = [min(count, settings.batch_size or most)]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    return batches


def _stages(way: Plan, job: Job, checkpoint: Checkpoint) -> Stages:
    size = {
        "width": job.width, "height": job.height, "batch": way.batch,
        "block_bytes": way.block_bytes,
    }  # fmt: skip
    denoise = vram.denoise_bytes(checkpoint, way.dtype, attention=way.attention, **size)
    decode = vram.decode_bytes(
        way.vae_dtype, tile=way.vae_tile, attention=way.vae_attention, **size
    )
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
    return _dtypes_of(gpu, engine, checkpoint, settings)


def _dtypes_of(
    gpu: Gpu, engine: Engine, checkpoint: Checkpoint, settings: Settings
) -> tuple[str, str, tuple[str, ...]]:
    known = gpu.architecture
    has_bfloat16 = known is not None and known.bf16 and engine is not Engine.DIRECTML
    if settings.dtype is Dtype.BFLOAT16 and not has_bfloat16:
        where = "DirectML" if engine is Engine.DIRECTML else gpu.arch
        raise BadRequest(f"dtype is bfloat16; allowed on {where} are float16 and float32")
    # DirectML has no bfloat16, and its own float16 on every card.
    row = tuning_of(gpu.arch if engine is Engine.ROCM else "")
    vae = row.vae_dtype
    dtype = row.dtype if settings.dtype is Dtype.AUTO else str(settings.dtype)
    if dtype == "float32":
        asked = settings.dtype is Dtype.FLOAT32
        return dtype, dtype, ("float32 was asked for" if asked else f"float32: {row.because}",)
    if "bfloat16" in {dtype, vae}:
        return dtype, "bfloat16", (f"{dtype}; the VAE in bfloat16, whose range it cannot leave",)
    if vae == "float32":
        return dtype, vae, (f"{dtype} was asked for; the VAE stays in float32",)
    if checkpoint.family.vae_needs_float32:
        why = f"{dtype}; the VAE in float32, since {checkpoint.family.title}'s overflows float16"
        return dtype, "float32", (why,)
    return dtype, dtype, (f"{dtype}, which {gpu.arch or 'this card'} computes at full rate",)


def _limits_of(gpu: Gpu, engine: Engine) -> Iterator[str]:
    if not gpu.usable_bytes:
        yield "the size of the memory is unknown, so nothing is spared; a budget says it"
    known = gpu.architecture
    if engine is not Engine.ROCM:
        return
    if known is None or known.rocm:
        yield libraries_of(gpu)
    else:
        yield f"no current ROCm build has kernels for {gpu.arch}, so sdamd takes the CPU instead"


def _reasons(chosen: Plan, fastest: Plan) -> Iterator[str]:
    if chosen.batch < fastest.batch:
        yield f"{chosen.batch} at a time instead of {fastest.batch}, to fit"
    if chosen.vae_tile != fastest.vae_tile:
        yield f"VAE in tiles of {chosen.vae_tile} pixels, to fit"
    if chosen.offload != "none":
        yield "parts wait in RAM until their turn, to fit"
    if chosen.budget_bytes is not None:
        peak, budget = chosen.stages.peak / GIB, chosen.budget_bytes / GIB
        yield f"{peak:.1f} of {budget:.1f} GiB that a run may take"
