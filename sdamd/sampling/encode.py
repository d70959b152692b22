"""Pictures and masks to what the UNet works on."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from sdamd.errors import BadImage

log = logging.getLogger(__name__)


def encode(vae: Any, images: Sequence[Image.Image]) -> torch.Tensor:
    """RGB pictures of one size to latents (pictures, channels, height / 8, width / 8), float32.

    The most likely latents, and not a draw from around them: so the first number of a picture's
    generator is its first noise, here as in a picture from text. Each picture is encoded alone, so
    that its neighbours take no memory, and equal ones once.

    Raises:
        BadImage: the VAE gives NaN or infinity, in float32 too.
    """
    made: dict[int, torch.Tensor] = {}
    for image in images:
        if id(image) not in made:
            made[id(image)] = _encode_one(vae, to_pixels(image))
    return torch.cat([made[id(image)] for image in images])


def to_pixels(image: Image.Image) -> torch.Tensor:
    """An RGB picture as (1, 3, height, width), float32, in -1 to 1, on the CPU."""
    levels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
    return levels.float() / 255 * 2 - 1


def drawn_in(masks: Sequence[Image.Image | None], size: tuple[int, int]) -> torch.Tensor:
    """Where latents are drawn anew: (pictures, 1, height, width) of 1 and 0, on the CPU.

    A latent is, as soon as one of its pixels is; without a mask all are.

    Args:
        masks: 255 where it is drawn anew, 0 elsewhere.
        size: height and width of the latents.
    """
    return torch.cat([_drawn_in(mask, size) for mask in masks])


def without_drawn(image: Image.Image, mask: Image.Image | None) -> Image.Image:
    """The picture with middle grey where it is drawn anew, as inpainting models see it."""
    grey = Image.new("RGB", image.size, (128, 128, 128))
    return grey if mask is None else Image.composite(grey, image, mask)


def _drawn_in(mask: Image.Image | None, size: tuple[int, int]) -> torch.Tensor:
    if mask is None:
        return torch.ones(1, 1, *size)
    levels = torch.from_numpy(np.array(mask))[None, None].float() / 255
    return functional.adaptive_max_pool2d(levels, size)


def _encode_one(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    latents = _latents(vae, pixels)
    if not latents.isfinite().all() and vae.dtype != torch.float32:
        log.warning("the VAE gave NaN or infinity for a picture; encoding again in float32")
        narrow = vae.dtype
        try:
            latents = _latents(vae.float(), pixels)
        finally:
            vae.to(narrow)
    if not latents.isfinite().all():
        raise BadImage("the VAE gives NaN or infinity for the picture to start from")
    return latents


def _latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    around = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    latents: torch.Tensor = around.mode().float() * vae.config.scaling_factor
    return latents
