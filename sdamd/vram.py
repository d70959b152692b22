"""Device memory of one run, in bytes per stage: closed forms, microseconds, no torch.

Every constant is a multiple of bytes-per-element x pictures x pixels, found by running the real
diffusers modules on fake tensors and counting each allocation; against the real CPU allocator the
counts were exact. The convolution workspace of MIOpen is the one term that no such count sees: it
is modelled as the im2col buffer of the largest convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sdamd.checkpoint import Checkpoint

BYTES_OF: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}

CONTEXT_BYTES: Final = 800 * 2**20
"""What HIP itself takes in every process: code objects and queues, 0.3 to 0.8 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnetForm:
    """Activations of one denoising step with guidance, per element, picture and pixel.

    `fused` is with an attention kernel that never holds the scores, and is what the layers
    between take in any case. The others hold something beside the scores of the widest layer:
    `sliced` those of one head, `2 * (pixels / pixels_per_token) ** 2` elements, or of one block;
    `math` those of all `heads`, with torch's own attention where it has no kernel.
    Some models compute scores in float32 whatever their dtype (`upcast_attention`).
    """

    fused: float
    sliced: float
    math: float
    heads: int
    pixels_per_token: int
    upcast_attention: bool = False


_SD21: Final = UnetForm(
    fused=260.0, sliced=130.0, math=190.0, heads=5, pixels_per_token=64, upcast_attention=True
)

UNETS: Final[Mapping[str, UnetForm]] = {
    "sd15": UnetForm(fused=260.0, sliced=120.0, math=190.0, heads=8, pixels_per_token=64),
    "sd21-base": _SD21,
    "sd21": _SD21,
    "sdxl": UnetForm(fused=157.5, sliced=88.8, math=122.5, heads=10, pixels_per_token=256),
    # An upper bound: every layer of the small models is narrower than SD 1.5's.
    "tiny": UnetForm(fused=260.0, sliced=120.0, math=190.0, heads=8, pixels_per_token=64),
}

DECODE_TENSORS: Final = 768.0
DECODE_LIVE: Final = 704.0
DECODE_WORKSPACE: Final = 2304.0
"""Of one picture, whatever the batch: Cin * kh * kw of the widest full-size convolution."""
DECODE_ATTENTION: Final = 113.0
"""Live while the VAE attends at an eighth of the size, where no kernel fuses that: its heads are
512 wide. What the scores take comes on top."""
MATH_SCORE: Final = 9
"""Bytes of one score in torch's own attention: float32, its softmax, and a mask of one byte."""
WORKSPACE_MARGIN: Final = 1.2
"""The one published Radeon figure, a W7900, lies 14 to 17 % above the im2col bound."""


TEXT_ACTIVATIONS: Final = 32 * 2**20
"""Of one picture's prompts in the largest text encoder, that of SDXL, in float32."""


def text_bytes(checkpoint: Checkpoint, dtype: str, *, batch: int) -> int:
    """Weights and activations of the text encoders."""
    weights = sum(checkpoint.parameters.text_encoders) * BYTES_OF[dtype]
    return weights + TEXT_ACTIVATIONS * batch


def weights_bytes(checkpoint: Checkpoint, dtype: str, vae_dtype: str) -> int:
    """Weights of everything, as they lie on the device together."""
    parts = checkpoint.parameters
    others = (parts.unet + sum(parts.text_encoders)) * BYTES_OF[dtype]
    return others + parts.vae * BYTES_OF[vae_dtype]


def denoise_bytes(
    checkpoint: Checkpoint, dtype: str, *, width: int, height: int, batch: int, attention: str,
    block_bytes: int = 0,
) -> int:  # fmt: skip
    """Activations of a denoising step with guidance, with the convolutions' workspace.

    `attention` is one of `Plan.attention`; `block_bytes` is what the scores may take with
    `chunked`.
    """
    form = UNETS[checkpoint.family.name]
    size, pixels = BYTES_OF[dtype], _rounded(width) * _rounded(height)
    tensors = form.fused * size * batch * pixels
    pairs = (pixels / form.pixels_per_token) ** 2
    if attention == "sliced":
        scores = 2 * (4 if form.upcast_attention else size) * pairs
        tensors = max(tensors, form.sliced * size * batch * pixels + scores)
    elif attention == "chunked":
        tensors = max(tensors, form.sliced * size * batch * pixels + block_bytes)
    elif attention == "math":
        scores = 2 * MATH_SCORE * batch * form.heads * pairs
        tensors = max(tensors, form.math * size * batch * pixels + scores)
    with_workspace = 120.0 * size * batch * pixels + 135.0 * size * pixels
    return round(max(tensors, with_workspace) * WORKSPACE_MARGIN)


def decode_bytes(
    dtype: str, *, width: int, height: int, batch: int, tile: int, attention: str,
    block_bytes: int = 0,
) -> int:  # fmt: skip
    """Activations of decoding, with workspace.

    Either all pictures at once (`tile` 0), or one after another in square tiles. `attention` is
    `fused`, `chunked` with its `block_bytes`, or `math`.
    """
    size, pixels = BYTES_OF[dtype], _rounded(width) * _rounded(height)
    single = min(pixels, tile * tile) if tile else pixels
    pictures = 1 if tile else batch
    tensors = DECODE_TENSORS * size * single * pictures
    with_workspace = (DECODE_LIVE * pictures + DECODE_WORKSPACE) * size * single
    attending = DECODE_ATTENTION * size * single * pictures
    if attention == "math":
        attending += MATH_SCORE * (single / 64) ** 2 * pictures
    elif attention == "chunked":
        # The keys are made wider once: 512 channels in float32 at an eighth of the size.
        attending += block_bytes + 512 * 4 * single / 64
    # The finished pictures, three channels in float32, while the last ones are decoded.
    joined = max((5.0 + 6.0 * (batch - 1)) * size, 12.0 * batch) * pixels if tile else 0.0
    return round(max(tensors, attending, with_workspace * WORKSPACE_MARGIN) + joined)


def _rounded(side: int) -> int:
    """Up to a multiple of 64, as the UNet's down-sampling does; then the forms are never under."""
    return -(-side // 64) * 64
