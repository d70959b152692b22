"""The architectures that sdamd runs, and the value that stands for one model on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

EPSILON: Final = "epsilon"
V_PREDICTION: Final = "v_prediction"


class Layout(StrEnum):
    """How the weights lie on disk."""

    FOLDER = "folder"
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a request gets where it says nothing."""

    steps: int
    guidance_scale: float
    scheduler: str
    upscale: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How many weights each part has; `text_encoders` in the order of the pipeline."""

    unet: int
    vae: int
    text_encoders: tuple[int, ...]

    @property
    def total(self) -> int:
        """All parts together."""
        return self.unet + self.vae + sum(self.text_encoders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: the facts that everything about it is derived from.

    `width` and `height` are the native size in pixels. `config` names the folder under
    `assets/configs` for single files (empty where there are none). `pad_tokens` has one entry
    per text encoder: OpenCLIP was trained on prompts padded with token 0, which is `!`.
    `vae_needs_float32` is set where activations of the VAE exceed what float16 can hold.
    """

    name: str
    title: str
    width: int
    height: int
    defaults: Defaults
    prediction_type: str
    config: str
    pipeline: str
    parameters: Parameters
    pad_tokens: tuple[str, ...] = ("<|endoftext|>",)
    latent_channels: int = 4
    vae_scale_factor: int = 8
    vae_needs_float32: bool = False


_VAE = 83_653_863
_CLIP_L = 123_060_480
_SD2 = Family(
    name="sd21",
    title="Stable Diffusion 2.x, v-prediction",
    width=768,
    height=768,
    defaults=Defaults(steps=25, guidance_scale=7.0, scheduler="DPM++ 2M Karras"),
    prediction_type=V_PREDICTION,
    config="sd21",
    pipeline="StableDiffusionPipeline",
    # The text encoder is used up to its last layer but one, so 23 layers are loaded of 24.
    parameters=Parameters(unet=865_910_724, vae=_VAE, text_encoders=(340_387_840,)),
    pad_tokens=("!",),
)

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        # The embedded model. Also stands for any other model of its own dimensions in the layout
        # of StableDiffusionPipeline; its size, channels and counts are then read from the folder.
        Family(
            name="tiny",
            title="small Stable Diffusion model",
            width=128,
            height=128,
            defaults=Defaults(steps=20, guidance_scale=4.0, scheduler="DPM++ 2M", upscale=4),
            prediction_type=V_PREDICTION,
            config="",
            pipeline="StableDiffusionPipeline",
            parameters=Parameters(unet=5_599_652, vae=2_285_863, text_encoders=(526_336,)),
        ),
        Family(
            name="sd15",
            title="Stable Diffusion 1.x",
            width=512,
            height=512,
            defaults=Defaults(steps=25, guidance_scale=7.0, scheduler="DPM++ 2M Karras"),
            prediction_type=EPSILON,
            config="sd15",
            pipeline="StableDiffusionPipeline",
            parameters=Parameters(unet=859_520_964, vae=_VAE, text_encoders=(_CLIP_L,)),
        ),
        replace(
            _SD2,
            name="sd21-base",
            title="Stable Diffusion 2.x base, epsilon",
            width=512,
            height=512,
            prediction_type=EPSILON,
        ),
        _SD2,
        Family(
            name="sdxl",
            title="Stable Diffusion XL",
            width=1024,
            height=1024,
            defaults=Defaults(steps=30, guidance_scale=6.0, scheduler="DPM++ 2M Karras"),
            prediction_type=EPSILON,
            config="sdxl",
            pipeline="StableDiffusionXLPipeline",
            parameters=Parameters(
                unet=2_567_463_684, vae=_VAE, text_encoders=(_CLIP_L, 694_659_840)
            ),
            pad_tokens=("<|endoftext|>", "!"),
            vae_needs_float32=True,
        ),
    )
}
"""Every architecture that sdamd runs. Counts are those of the published models; the tests build
each one from its config and count."""


ALLOWED: Final = "allowed are text-to-image models of Stable Diffusion 1.x, 2.x and XL"

UNSUPPORTED_INPUTS: Final[Mapping[int, str]] = {
    5: "a depth-guided model (5 input channels)",
    7: "a x4 upscaling diffusion model (7 input channels)",
    8: "an instruction-editing model (InstructPix2Pix, 8 input channels)",
}
"""What a UNet with so many input channels is."""

INPAINTING_CHANNELS: Final = 9
"""What the UNet of an inpainting model takes: latents, the mask, and the masked picture's latents.

Source: RunwayML's Stable Diffusion inpainting, 2022-10.
"""


def weights_of_inputs(channels: int, width: int) -> int:
    """How many more weights a UNet has for its further input channels.

    `width` is of its first convolution, which is 3 by 3.
    """
    return (channels - 4) * width * 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One model on disk, identified.

    `dtype` is that of most of the stored UNet (`float16`, ...), `bytes` the size of the weights.
    `in_channels` is what the UNet takes: 4, or 9 of an inpainting model.
    `variants` are the complete sets of weights in a folder: `""` and `"fp16"`. `reasons` say how
    what is not plainly written in the file was decided.
    """

    name: str
    path: Path
    layout: Layout
    family: Family
    bytes: int
    prediction_type: str
    zero_terminal_snr: bool = False
    dtype: str
    parameters: Parameters
    variants: tuple[str, ...] = ("",)
    reasons: tuple[str, ...] = ()
    in_channels: int = 4
