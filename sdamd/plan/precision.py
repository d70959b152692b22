"""In which types a device computes and how it attends, with the reasons."""

from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadRequest
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import Engine
from sdamd.hardware.tuning import CHUNKED, FUSED, attention_of, tuning_of
from sdamd.settings import Attention, Dtype, Settings


def dtypes(
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


def attention(
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
