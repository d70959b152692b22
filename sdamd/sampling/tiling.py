"""The VAE on pictures that are too large for it: tiles of one shape, blended where they overlap."""

from typing import Any, Final

import torch

from sdamd import tiles

OVERLAP: Final = 8
"""A tile shares at least a quarter with its neighbour, so an eighth of it is context."""


def decode(vae: Any, latents: torch.Tensor, *, tile: int) -> torch.Tensor:
    """Latents (pictures, channels, height / 8, width / 8), scaled, to pixels in float32.

    One tile after another, each `tile` pixels square unless the picture is smaller, since a GPU
    searches its kernels anew for every shape. Tiles are evenly spread, and cross over linearly in
    all that they share: a VAE sees too far for tiles that only touch.
    """
    factor = vae_factor(vae)
    side = tile // factor
    pictures, _, height, width = latents.shape
    rows, columns = (
        tiles.cut(length, tile=side, context=side // OVERLAP) for length in (height, width)
    )
    made = torch.zeros(
        (pictures, 3, height * factor, width * factor), device=latents.device, dtype=torch.float32
    )
    down, across = (shares(spans, factor) for spans in (rows, columns))
    for picture in range(pictures):
        for y, of_y in zip(rows, down, strict=True):
            for x, of_x in zip(columns, across, strict=True):
                part = latents[picture : picture + 1, :, y.start : y.stop, x.start : x.stop]
                pixels = vae.decode(part, return_dict=False)[0][0].float()
                share = (of_y[:, None] * of_x).to(pixels.device)
                big_y, big_x = y.times(factor), x.times(factor)
                made[picture, :, big_y.start : big_y.stop, big_x.start : big_x.stop].add_(
                    pixels.mul_(share)
                )
    return made


def shares(spans: tuple[tiles.Span, ...], factor: int) -> list[torch.Tensor]:
    """How much of each pixel along one axis every tile gives; together they give one."""
    length = spans[-1].stop * factor
    ramps = []
    for number, span in enumerate(spans):
        at = torch.arange(span.start * factor, span.stop * factor, dtype=torch.float32) + 0.5
        ramp = torch.ones_like(at)
        if number:
            shared = (spans[number - 1].stop - span.start) * factor
            ramp = ramp.minimum((at - span.start * factor) / shared)
        if number + 1 < len(spans):
            shared = (span.stop - spans[number + 1].start) * factor
            ramp = ramp.minimum((span.stop * factor - at) / shared)
        ramps.append(ramp)
    total = torch.zeros(length)
    for span, ramp in zip(spans, ramps, strict=True):
        total[span.start * factor : span.stop * factor] += ramp
    return [
        ramp / total[span.start * factor : span.stop * factor]
        for span, ramp in zip(spans, ramps, strict=True)
    ]


def vae_factor(vae: Any) -> int:
    """How many pixels a latent stands for, along each side."""
    return int(2 ** (len(vae.config.block_out_channels) - 1))
