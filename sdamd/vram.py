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

    `fused` is with an attention kernel that never holds the scores; `sliced` is with one head at
    a time, which adds the scores of one head, `2 * (pixels / pixels_per_token) ** 2` elements.
    Some models compute those in float32 whatever their dtype (`upcast_attention`).
    """

    fused: float
    sliced: float
    pixels_per_token: int
    upcast_attention: bool = False


UNETS: Final[Mapping[str, UnetForm]] = {
    "sd15": UnetForm(fused=260.0, sliced=120.0, pixels_per_token=64),
    "sd21-base": UnetForm(fused=260.0, sliced=130.0, pixels_per_token=64, upcast_attention=True),
    "sd21": UnetForm(fused=260.0, sliced=130.0, pixels_per_token=64, upcast_attention=True),
    "sdxl": UnetForm(fused=157.5, sliced=88.8, pixels_per_token=256),
    # An upper bound: every layer of the small models is narrower than SD 1.5's.
    "tiny": UnetForm(fused=260.0, sliced=120.0, pixels_per_token=64),
}

DECODE_TENSORS: Final = 768.0
DECODE_LIVE: Final = 704.0
DECODE_WORKSPACE: Final = 2304.0
"""Of one picture, whatever the batch: Cin * kh * kw of the widest full-size convolution."""
DECODE_ATTENTION: Final = 113.0
"""Live while the VAE attends at an eighth of the size, where no kernel fuses that: its heads are
512 wide. The scores come on top, with 9 bytes for each pair of latent pixels."""
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
    checkpoint: Checkpoint, dtype: str, *, width: int, height: int, batch: int, attention: str
) -> int:
    """Activations of a denoising step with guidance, with the convolutions' workspace."""
    form = UNETS[checkpoint.family.name]
    size, pixels = BYTES_OF[dtype], _rounded(width) * _rounded(height)
    if attention == "sliced":
        of_score = 4 if form.upcast_attention else size
        scores = 2 * of_score * (pixels / form.pixels_per_token) ** 2
        tensors = form.sliced * size * batch * pixels + scores
    else:
        tensors = form.fused * size * batch * pixels
    with_workspace = 120.0 * size * batch * pixels + 135.0 * size * pixels
    return round(max(tensors, with_workspace) * WORKSPACE_MARGIN)


def decode_bytes(
    dtype: str, *, width: int, height: int, batch: int, tile: int, fused: bool
) -> int:  # fmt: skip
    """Activations of decoding, with workspace.

    Either all pictures at once (`tile` 0), or one after another in square tiles. `fused` is
    whether a kernel attends over heads as wide as the VAE's without holding the scores.
    """
    size, pixels = BYTES_OF[dtype], _rounded(width) * _rounded(height)
    single = min(pixels, tile * tile) if tile else pixels
    pictures = 1 if tile else batch
    tensors = DECODE_TENSORS * size * single * pictures
    with_workspace = (DECODE_LIVE * pictures + DECODE_WORKSPACE) * size * single
    scores = 0.0 if fused else 9.0 * (single / 64) ** 2
    attention = (DECODE_ATTENTION * size * single + scores) * pictures
    joined = (5.0 + 6.0 * (batch - 1)) * size * pixels if tile else 0.0
    return round(max(tensors, attention, with_workspace * WORKSPACE_MARGIN) + joined)


def _rounded(side: int) -> int:
    """Up to a multiple of 64, as the UNet's down-sampling does; then the forms are never under."""
    return -(-side // 64) * 64
