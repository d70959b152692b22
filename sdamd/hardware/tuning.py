"""How torch computes well on each architecture: dtypes, attention, convolutions, environment.

One row per gfx target, found by its exact name. A variable that the user has set is left alone,
and said; what was measured on the card itself (`sdamd.tuned`) goes before the row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sdamd.hardware.gpu import ARCHITECTURES, FusedAttention, Gpu

FUSED: Final = "fused"
CHUNKED: Final = "chunked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable that must be set before torch is imported, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What to start from on one architecture.

    `dtype` is of the UNet and the text encoders. `vae_dtype` is what the VAE is decoded in; a row
    with float16 gives way to float32 for checkpoints whose VAE overflows. `attention` and
    `vae_attention` are `fused` or `chunked`. `find_mode` is MIOpen's way of choosing kernels,
    `hipblaslt` whether the library exists for the architecture, `miopen` whether the VAE's
    convolutions go through MIOpen, and `channels_last` the layout of convolutions. `because` says
    what is out of the ordinary.
    """

    dtype: str
    vae_dtype: str
    attention: str
    vae_attention: str = CHUNKED
    find_mode: str = "2"
    hipblaslt: bool = True
    miopen: bool = True
    channels_last: bool = False
    because: str = ""


_PACKED: Final = Tuning(
    # No bfloat16, and no fused attention in AOTriton.
    dtype="float16", vae_dtype="float16", attention=CHUNKED, hipblaslt=False,
)  # fmt: skip
_RDNA1: Final = Tuning(
    # https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/4634: grey pictures. Can go
    # when somebody shows that the native builds of ROCm 7 compute float16 right.
    dtype="float32", vae_dtype="float32", attention=CHUNKED, hipblaslt=False,
    because="float16 gave grey pictures on RDNA 1",
)  # fmt: skip
_RDNA3: Final = Tuning(
    # AOTriton's kernels stop at heads of 256 on gfx11, and the VAE's is 512 wide; a fused float32
    # one drew a grid over pictures (gfx1103, torch 2.11+rocm10.0).
    dtype="float16", vae_dtype="bfloat16", attention=FUSED,
)  # fmt: skip
_RDNA4: Final = Tuning(
    # There are kernels of 512, but the VAE is where cards hang when memory runs out.
    dtype="float16", vae_dtype="bfloat16", attention=FUSED,
)  # fmt: skip
_CDNA: Final = Tuning(
    dtype="float16", vae_dtype="bfloat16", attention=FUSED, vae_attention=FUSED,
)  # fmt: skip

TUNINGS: Final[Mapping[str, Tuning]] = {
    # Source: AOTriton's targets, TheRock's list of what it leaves out by target, and reports of
    # users (2026-08); `tune` replaces it by what the card itself shows.
    "gfx803": _PACKED,
    "gfx900": _PACKED,
    "gfx902": _PACKED,
    "gfx906": _PACKED,
    # bfloat16 at half the rate, and dropped from AOTriton's targets.
    "gfx908": _PACKED,
    "gfx90a": _CDNA,
    "gfx90c": _PACKED,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
    "gfx1010": _RDNA1,
    "gfx1011": _RDNA1,
    "gfx1012": _RDNA1,
    "gfx1013": _RDNA1,
    "gfx1030": _PACKED,
    "gfx1031": _PACKED,
    "gfx1032": _PACKED,
    "gfx1033": _PACKED,
    "gfx1034": _PACKED,
    "gfx1035": _PACKED,
    "gfx1036": _PACKED,
    "gfx1100": _RDNA3,
    "gfx1101": _RDNA3,
    "gfx1102": _RDNA3,
    "gfx1103": _RDNA3,
    "gfx1150": _RDNA3,
    "gfx1151": _RDNA3,
    "gfx1152": _RDNA3,
    "gfx1153": _RDNA3,
    "gfx1200": _RDNA4,
    "gfx1201": _RDNA4,
}

CAREFUL: Final = _PACKED
"""For an architecture that nobody has a row for: what works everywhere."""


def tuning_of(gfx: str) -> Tuning:
    """The row of exactly this architecture; `gfx110` is none, and neither is `gfx11000`."""
    return TUNINGS.get(gfx, CAREFUL)


def attention_of(gpu: Gpu) -> Iterator[str]:
    """How the row of this card lets it attend, in sentences for a plan."""
    row = tuning_of(gpu.arch)
    name = gpu.arch or gpu.name
    if gpu.arch not in TUNINGS:
        yield f"nothing is known about {name}, so it gets what works everywhere"
    known = ARCHITECTURES.get(gpu.arch)
    if row.attention == CHUNKED:
        yield f"attention in blocks: {name} has no fused kernel"
    elif row.vae_attention == CHUNKED:
        flag = known is not None and known.fused_attention is FusedAttention.EXPERIMENTAL
        behind = ", behind AOTriton's experimental flag" if flag else ""
        yield f"attention fused{behind}; in blocks in the VAE, whose head is 512 wide"


def libraries_of(gpu: Gpu) -> str:
    """What the row says about AMD's libraries, in a sentence for a plan."""
    row = tuning_of(gpu.arch)
    vae = "" if row.miopen else ", not for the VAE"
    layout = "channels last" if row.channels_last else "channels first"
    blas = "with" if row.hipblaslt else "without"
    return f"MIOpen in find mode {row.find_mode}{vae}; {layout}; {blas} hipBLASLt"


# -- environment ----------------------------------------------------------------------------------

ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""All names under which torch reads its allocator's options; the first one is of torch 2.9."""

MIOPEN_FOLDERS: Final = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")
"""Where MIOpen keeps what it found out, and the kernels that it compiled."""


def variables_of(gfx: str, override: str | None = None) -> tuple[Variable, ...]:
    """What to set before torch is imported for this architecture.

    `expandable_segments` is never among it: with `max_split_size_mb` it corrupts tensors
    (https://github.com/ROCm/ROCm/issues/6603), and alone it hangs some drivers.
    """
    row = tuning_of(gfx)
    made = [
        Variable(
            name="TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
            value="1",
            reason="fused attention; without it RDNA 3 falls to a path that is 9 times slower and "
            "needs memory with the square of the picture",
        ),
        Variable(
            name="MIOPEN_FIND_MODE",
            value=row.find_mode,
            reason="pick convolution kernels from the database; the default searches for minutes "
            "at every new picture size",
        ),
        *(
            Variable(
                name=name,
                value="garbage_collection_threshold:0.8,max_split_size_mb:512",
                reason="pictures of different sizes would fragment the GPU's memory",
            )
            # ROCm builds read the second one too.
            for name in ALLOCATOR[:2]
        ),
    ]
    if not row.hipblaslt:
        made.append(
            Variable(
                name="TORCH_BLAS_PREFER_HIPBLASLT",
                value="0",
                reason=f"hipBLASLt is not built for {gfx}, and torch would warn of it",
            )
        )
    if override is not None:
        made.append(
            Variable(
                name="HSA_OVERRIDE_GFX_VERSION",
                value=override,
                reason=f"this torch has no kernels for {gfx}, but its sibling's run on it",
            )
        )
    return tuple(made)


def to_set(
    wanted: tuple[Variable, ...], environ: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """What of `wanted` to set beside what the user has set, and what to say about the rest.

    The allocator's options are one thing under three names: where the user has set any of them,
    none is added, since torch would mix the two.
    """
    own_allocator = [name for name in ALLOCATOR if name in environ]
    made: dict[str, str] = {}
    said = []
    for variable in wanted:
        if variable.name in ALLOCATOR and own_allocator:
            continue
        if variable.name not in environ:
            made[variable.name] = variable.value
        elif environ[variable.name] != variable.value:
            said.append(
                f"{variable.name} is {environ[variable.name]!r}, as you set it; "
                f"sdamd would set {variable.value!r}: {variable.reason}"
            )
    given = {name: environ[name] for name in own_allocator}
    ours = {variable.name: variable.value for variable in wanted}
    said += [
        f"{name} is {value!r}, as you set it, and nothing is added to it"
        for name, value in given.items()
        if ours.get(name) != value
    ]
    return made, tuple(said)


def kernel_cache(cache: Path, torch: str, gfx: str) -> Path:
    """The folder of MIOpen's findings for one torch and one architecture, below sdamd's cache.

    MIOpen's own default is one folder for all versions in the home folder, which containers lose
    and network disks corrupt.
    """
    return cache / "miopen" / f"{torch}-{gfx}"
