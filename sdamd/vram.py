"""Device memory of one run, in bytes per stage: closed forms, microseconds, no torch.

Every constant is a multiple of bytes-per-element x samples x pixels, found by running the real
diffusers modules, under our own means, on fake tensors and counting each allocation
(`scripts/measure_vram.py`); against the real CPU allocator those counts are exact. The workspace
of MIOpen's convolutions is the one term that no such count sees: it is modelled as the largest
that MIOpen's solvers ask for, the im2col buffer of its matrix product.

A `sample` is one row of what the UNet is called with: a picture is one, with guidance two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sdamd.checkpoint import Checkpoint

BYTES_OF: Final[Mapping[str, int]] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
}  # fmt: skip
MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes beyond the weights: of the tensors, and of tensors and workspace together."""

    tensors: int
    with_workspace: int = 0

    @property
    def bytes(self) -> int:
        """The peak of what torch allocates."""
        return max(self.tensors, self.with_workspace)

    def times(self, factor: float) -> "Need":
        """Give the same, `factor` times as large."""
        return Need(
            tensors=round(self.tensors * factor),
            with_workspace=round(self.with_workspace * factor),
        )

    def and_beside(self, size: int) -> "Need":
        """Give the same while `size` bytes more lie there."""
        return Need(tensors=self.tensors + size, with_workspace=self.with_workspace + size)


# -- the UNet -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnetForm:
    """Activations of one call, in elements per sample and pixel.

    `whole` is with an attention kernel that never holds the scores; its peak is in the
    feed-forward layers. With these in pieces their own part, `feeding`, is divided, beside
    `between`, and the peak is never below `pieces`, that of the convolutions, of which `deeper`
    are below the first level. `skips` of all that lie at the full size, and the rest at that of
    the widest attention, whose sides are rounded up. `attending` is live beside the scores of
    that when they are held: those of one head (`sliced`) or of a block (`chunked`); `math` beside
    the scores of all `heads`, with torch's own attention, and `math_float32` the same where
    nothing is widened. `beside` is a constant number of elements per sample, of text tokens that
    lie among the others, `math_beside` more of them with `math`. Some models compute scores in
    float32 whatever their dtype (`upcast_attention`). `convolving` is live at the convolution
    with the largest workspace, which takes `workspace` for one sample whatever the batch.
    `largest_layer` is how many weights the largest piece of a streamed model has. `lora` is what
    LoRAs on all layers add to `feeding`. `controlled` and `controlled_pieces` are what a
    ControlNet's residuals add to the peaks, which hold `residuals` themselves; `controlnet` is
    how many weights that has, `control` and `control_convolving` are of its own call.
    """

    whole: float
    pieces: float
    between: float
    feeding: float
    skips: float
    attending: float
    math: float
    math_float32: float
    heads: int
    side_of_token: int
    largest_layer: int
    convolving: float = 60.0
    workspace: float = 135.0
    deeper: float = 8.0
    extra_tokens: int = 0
    beside: int = 0
    math_beside: int = 0
    upcast_attention: bool = False
    lora: float = 40.0
    controlled: float = 9.4
    controlled_pieces: float = 9.4
    residuals: float = 25.7
    control: float = 120.1
    control_convolving: float = 41.6
    controlnet: int = 361_279_120


_SD15: Final = UnetForm(
    whole=130.0, pieces=65.2, between=55.0, feeding=80.0, skips=130.0, attending=60.4, math=95.0,
    math_float32=60.0, heads=8, side_of_token=8, largest_layer=29_492_480, controlled=10.4,
)  # fmt: skip
_SD21: Final = UnetForm(
    whole=130.0, pieces=65.2, between=55.0, feeding=80.0, skips=130.0, attending=65.0, math=95.0,
    math_float32=60.0, heads=5, side_of_token=8, largest_layer=29_492_480, upcast_attention=True,
)  # fmt: skip
UNETS: Final[Mapping[str, UnetForm]] = {
    "sd15": _SD15,
    "sd21-base": _SD21,
    "sd21": _SD21,
    "sdxl": UnetForm(
        whole=78.75, pieces=60.0, between=43.75, feeding=35.0, skips=14.75, attending=44.4,
        math=61.25, math_float32=43.75, heads=10, side_of_token=16, largest_layer=29_492_480,
        lora=20.0, controlled=3.2, control=76.3, controlnet=1_251_014_160, math_beside=620_000,
        deeper=4.0,
    ),
    # A transformer: no convolution has a workspace, and 333 tokens of text lie among the others.
    "sd35-medium": UnetForm(
        whole=84.0, pieces=84.0, between=84.0, feeding=0.0, skips=0.0, attending=84.0, math=84.1,
        math_float32=84.1, heads=24, side_of_token=16, largest_layer=9_437_184, convolving=0.0,
        workspace=0.0, extra_tokens=333, beside=1_560_000, math_beside=6_700_000,
    ),
    # An upper bound: every layer of the small models is narrower than SD 1.5's.
    "tiny": _SD15,
}  # fmt: skip
"""Source: `tests/data/memory/grid.csv`, `tests/data/vram/peaks.csv`."""

CONSTANT: Final = 2**16
"""Beside all that grows with the picture, per sample: embeddings of the step and of the text."""
RESULT: Final = 0.25
"""Elements per pixel that a call gives: 16 channels at an eighth of the size, and fewer in most."""
MATH_SCORE: Final = 9
"""Bytes of one score in torch's own attention: float32, its softmax, and a mask of one byte."""
STREAM_SLOTS: Final = 2
"""A streamed model has the layer that computes and the one that comes next."""
STREAM_REST: Final = 4 * MIB
"""Layers below 64 KiB of a streamed model, which stay."""
MIOPEN_MAX: Final = 7_287_183_769
"""Above this a matrix product is no solver for a convolution, and twice this in float32.
Source: MIOpen, src/solver/conv/gemm_common.cpp."""
MIOPEN_SHARE: Final = 0.85
"""Nor above this share of the card's memory. Source: the same."""


def miopen_limit(dtype: str, vram_bytes: int) -> int:
    """The largest workspace that MIOpen asks for, in bytes; `vram_bytes` 0 is unknown."""
    most = MIOPEN_MAX * (2 if dtype == "float32" else 1)
    return min(most, round(MIOPEN_SHARE * vram_bytes)) if vram_bytes else most


def denoise_need(
    family: str, dtype: str, *, width: int, height: int, samples: int, attention: str,
    block_bytes: int = 0, feed_forward_chunks: int = 1, workspace_limit: int | None = None,
    loras: str = "", controlnets: int = 0, waiting: int = 0,
) -> Need:  # fmt: skip
    """One call of the UNet.

    `attention` is one of `Plan.attention`; `block_bytes` is what the scores may take with
    `chunked`. A workspace above `workspace_limit` is never asked for; None is no limit. `loras` are
    LoRAs that are not merged into the weights: on `lora-attention` alone, or on `lora-all` layers.
    `controlnets` is how many add what they found. `waiting` samples of the same step are done.
    """
    form, size = UNETS[family], BYTES_OF[dtype]
    each = size * samples * width * height
    tokens = -(-width // form.side_of_token) * -(-height // form.side_of_token)
    # What the sides of the widest attention are rounded up by.
    larger = tokens * form.side_of_token**2 / (width * height) - 1

    def at(part: float) -> float:
        return (part + max(0.0, part - form.skips) * larger) * each

    pieces, feeding = form.pieces + controlnets * form.controlled_pieces, form.feeding
    if loras == "lora-all":
        feeding += form.lora
    if feed_forward_chunks > 1:
        part = form.between + feeding / feed_forward_chunks
    else:
        part = form.whole + feeding - form.feeding
    # Deeper levels round their sides up, too; it counts in small pictures alone.
    rounded = -(-width // 16) * -(-height // 16) * 256 / (width * height) - 1
    tensors = max((pieces + form.deeper * rounded) * each, at(part + controlnets * form.controlled))
    tokens += form.extra_tokens
    if attention == "sliced":
        scores = 2.0 * (4 if form.upcast_attention else size) * tokens**2
        tensors = max(tensors, at(form.attending) + scores)
    elif attention == "chunked":
        scores = _in_blocks(
            samples, form.heads, tokens, block_bytes, _score(dtype, wide=form.upcast_attention)
        )
        tensors = max(tensors, at(form.attending) + scores)
    elif attention == "math":
        beside = form.math_float32 if dtype == "float32" else form.math
        scores = MATH_SCORE * samples * form.heads * tokens**2 + form.math_beside * size * samples
        tensors = max(tensors, at(beside) + scores)
    convolving = (form.convolving + controlnets * form.controlled_pieces) * each
    need = _with_workspace(
        form, tensors, convolving, size, width * height, samples, workspace_limit
    )
    return need.and_beside(round(RESULT * size * waiting * width * height))


def control_need(
    family: str, dtype: str, *, width: int, height: int, samples: int,
    workspace_limit: int | None = None,
) -> Need:  # fmt: skip
    """One call of a ControlNet, what it gives to the UNet included."""
    form, size = UNETS[family], BYTES_OF[dtype]
    pixels = _rounded(width) * _rounded(height)
    each = size * samples * pixels
    return _with_workspace(
        form, form.control * each, form.control_convolving * each, size, pixels, samples,
        workspace_limit,
    )  # fmt: skip


def _with_workspace(
    form: UnetForm, tensors: float, convolving: float, size: int, pixels: int, samples: int,
    limit: int | None,
) -> Need:  # fmt: skip
    constant = samples * (CONSTANT + form.beside * size)
    workspace = form.workspace * size * pixels
    if not workspace or (limit is not None and workspace > limit):
        return Need(tensors=round(tensors + constant))
    return Need(
        tensors=round(tensors + constant),
        with_workspace=round(convolving + workspace + constant),
    )


def _in_blocks(samples: int, heads: int, tokens: int, block_bytes: int, each: int) -> int:
    """Bytes of the scores that attention in blocks holds, as `backends.attention` divides them."""
    most = block_bytes // each
    if samples * heads * tokens**2 <= most:
        return samples * heads * tokens**2 * each
    if tokens**2 <= most:
        return -(-heads // -(-heads // (most // tokens**2))) * tokens**2 * each
    return block_bytes


def _score(dtype: str, *, wide: bool) -> int:
    """Bytes that attention in blocks takes for a score, as `backends.attention` has it."""
    each = 4 if wide or dtype == "bfloat16" else BYTES_OF[dtype]
    return 2 * each + (0 if each == BYTES_OF[dtype] else BYTES_OF[dtype])


def in_flight(layer: int, dtype: str) -> int:
    """What a streamed model has on the device: some layers of `layer` weights, and the small."""
    return STREAM_SLOTS * layer * BYTES_OF[dtype] + STREAM_REST


# -- text encoders --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """A text encoder: activations of one prompt of 77 tokens.

    `elements` is with a fused kernel; `math` bytes with torch's own attention, `math_alone` the
    same for a single prompt; `once` are elements, and `math_once` bytes in half precision, whatever
    the number of prompts. `largest_layer` as in `UnetForm`.
    """

    elements: int
    math: int
    math_alone: int
    largest_layer: int
    once: int = 0
    math_once: int = 0


_CLIP_L: Final = TextForm(
    elements=1_537_536, math=3_844_864, math_alone=3_644_416, largest_layer=2_362_368
)
_CLIP_H: Final = TextForm(
    elements=2_601_984, math=6_857_216, math_alone=6_586_368, largest_layer=4_198_400
)
_CLIP_G: Final = TextForm(
    elements=4_139_520, math=10_342_400, math_alone=10_000_896, largest_layer=6_558_720
)
_T5_XXL: Final = TextForm(
    # Of 256 tokens.
    elements=14_680_064, math=67_108_864, math_alone=67_108_864, largest_layer=41_943_040,
    once=4_194_560, math_once=16_777_216,
)  # fmt: skip
TEXTS: Final[Mapping[str, tuple[TextForm, ...]]] = {
    "tiny": (_CLIP_L,),
    "sd15": (_CLIP_L,),
    "sd21-base": (_CLIP_H,),
    "sd21": (_CLIP_H,),
    "sdxl": (_CLIP_L, _CLIP_G),
    "sd35-medium": (_CLIP_L, _CLIP_G, _T5_XXL),
}
"""In the order of the pipeline, the largest one last. Source: as for `UNETS`."""


def text_bytes(
    family: str, dtype: str, *, samples: int, fused: bool = True, encoder: int = -1
) -> int:
    """Activations of a text encoder, the largest one, for `samples` prompts, negative ones too."""
    form, size = TEXTS[family][encoder], BYTES_OF[dtype]
    needed = (form.once + form.elements * samples) * size
    if fused:
        return needed
    scored = form.math_alone if samples == 1 else form.math * samples
    return max(needed, form.math_once * size // 2 + scored)


# -- the VAE --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A convolution that makes its rows in bands, when its workspace is there.

    `live` are elements per pixel of the picture, the others per pixel of one row: of the rows that
    are read (two more than are made), of those that are made, and of their workspace.
    """

    live: float
    read: float
    made: float
    workspace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeForm:
    """One direction of the VAE, in elements per picture and pixel.

    `tensors` is the peak of the plain module. `convolutions` are those with the largest
    workspaces: what is live then, and the workspace, which is of one picture whatever the batch.
    `banded` is live with bands, beside the rows that are worked on, and `bands` those
    convolutions. `finished` are the values that come out, pixels or latents.
    """

    tensors: float
    convolutions: tuple[tuple[float, float], ...]
    banded: float
    bands: tuple[Band, ...]
    finished: float


DECODE: Final = VaeForm(
    tensors=768.0,
    convolutions=((704.0, 2304.0), (640.0, 1152.0), (320.0, 576.0)),
    banded=512.0,
    bands=(
        Band(live=448.0, read=512.0, made=0.0, workspace=2304.0),
        Band(live=512.0, read=128.0, made=128.0, workspace=1152.0),
    ),
    finished=3.0,
)
ENCODE: Final = VaeForm(
    tensors=640.0,
    convolutions=((512.0, 1152.0), (224.0, 576.0)),
    banded=256.0,
    bands=(Band(live=256.0, read=128.0, made=128.0, workspace=1152.0),),
    finished=0.125,
)
"""Source: as for `UNETS`. A workspace is Cin x kh x kw elements per pixel of the output."""

VAE_ATTENDING: Final = 113.0
"""Live while the VAE attends at an eighth of the size, where no kernel fuses that: its heads are
512 wide. What the scores take comes on top."""
VAE_ATTENDING_FLOAT32: Final = 65.0
"""The same with all scores at once, where nothing is made wider for it."""
VAE_LAYER: Final = 2_359_808
"""Weights of the largest convolution of the VAE."""
STATISTICS_ROWS: Final = 64
"""Rows that a banded norm sums at a time, as `backends.bands` has it."""
FLOAT32_ROW: Final = 1024
"""Bytes per pixel of a row that is normed: 256 channels in float32."""


def vae_need(
    form: VaeForm, dtype: str, *, width: int, height: int, batch: int, attention: str,
    tile: int = 0, bands: int = 0, block_bytes: int = 0, workspace_limit: int | None = None,
) -> Need:  # fmt: skip
    """Decoding or encoding: all pictures at once, or one after another in bands or square tiles.

    `attention` is `fused`, `chunked` with its `block_bytes`, or `math`. Without MIOpen torch itself
    takes the same workspace, without a limit (`workspace_limit` None).
    """
    size = BYTES_OF[dtype]
    joined = 0.0
    if tile or bands:
        # What is finished while the last picture is made; tiles are joined in float32.
        each = 4 * batch if tile else size * (batch - 1)
        joined = form.finished * each * width * height + 4.0 * tile * tile
        batch = 1
    if tile:
        width, height = min(width, tile), min(height, tile)
    pixels = width * height
    attending = VAE_ATTENDING * size * pixels * batch
    if attention == "math":
        if dtype == "float32":
            attending = VAE_ATTENDING_FLOAT32 * size * pixels * batch
        attending += MATH_SCORE * (pixels / 64) ** 2 * batch
    elif attention == "chunked":
        # The keys are made wider once: 512 channels in float32 at an eighth of the size.
        scores = batch * (pixels / 64) ** 2 * _score(dtype, wide=True)
        attending += min(block_bytes, scores) + 512 * 4 * pixels / 64
    if bands:
        tensors, convolving = _banded(form, size, width, height, min(bands, height))
    else:
        tensors = form.tensors * size * pixels * batch
        convolving = max(
            (
                live * size * pixels * batch + workspace * size * pixels
                for live, workspace in form.convolutions
                if workspace_limit is None or workspace * size * pixels <= workspace_limit
            ),
            default=0.0,
        )
    # The latents, and what they are scaled to.
    constant = joined + CONSTANT * batch + 0.15 * size * pixels * batch
    return Need(
        tensors=round(max(tensors, attending) + constant),
        with_workspace=round(max(convolving, attending) + constant),
    )


def _banded(form: VaeForm, size: int, width: int, height: int, rows: int) -> tuple[float, float]:
    """The peak of the tensors in bytes, and that at the workspaces."""
    normed = FLOAT32_ROW * min(STATISTICS_ROWS, height)
    convolved = FLOAT32_ROW * (rows + 2) + 128 * size * rows
    tensors = form.banded * size * width * height + width * max(normed, convolved)
    convolving = max(
        size * width * (band.live * height + band.read * (rows + 2))
        + size * width * rows * (band.made + band.workspace)
        for band in form.bands
    )
    return tensors, convolving


# -- weights --------------------------------------------------------------------------------------

UPSCALE_BYTES: Final = 220 * MIB
"""The upscaler's network and one of its tiles in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of each part; `unet` with what works beside it (ControlNets, LoRAs)."""

    unet: int
    vae: int
    text: int

    @property
    def total(self) -> int:
        """Of everything."""
        return self.unet + self.vae + self.text

    @property
    def largest(self) -> int:
        """Of the largest part."""
        return max(self.unet, self.vae, self.text)


def weights_of(
    checkpoint: Checkpoint, dtype: str, vae_dtype: str,
    *, storage: str = "", lora_bytes: int = 0, controlnets: int = 0,
) -> Weights:  # fmt: skip
    """The weights as they lie in memory; `storage` is the type of the UNet's where it has its own.

    With it one layer after another is widened.
    """
    parts, form = checkpoint.parameters, UNETS[checkpoint.family.name]
    unet = parts.unet * BYTES_OF[storage or dtype] + lora_bytes
    if storage:
        unet += form.largest_layer * BYTES_OF[dtype]
    unet += controlnets * form.controlnet * BYTES_OF[dtype]
    return Weights(
        unet=unet, vae=parts.vae * BYTES_OF[vae_dtype],
        text=sum(parts.text_encoders) * BYTES_OF[dtype],
    )  # fmt: skip


def _rounded(side: int) -> int:
    """Up to a multiple of 64, as the UNet's down-sampling does; then the forms are never under."""
    return -(-side // 64) * 64
