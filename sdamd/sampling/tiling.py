"""The VAE in tiles of one shape, for pictures that are too large for it; blended where they share.

One tile after another, each square unless the picture is smaller, since a GPU searches its kernels
anew for every shape. Tiles are evenly spread, and cross over linearly in all that they share: a
VAE sees too far for tiles that only touch.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from sdamd import tiles

OVERLAP: Final = 8
"""A tile shares at least a quarter with its neighbour, so an eighth of it is context."""


def decode(
    compute: Callable[[torch.Tensor], torch.Tensor],
    latents: torch.Tensor,
    *,
    tile: int,
    factor: int,
) -> torch.Tensor:
    """Latents (pictures, channels, height / factor, width / factor), scaled, to pixels in float32.

    Args:
        compute: decodes one tile, (1, channels, ...) to (1, 3, ...).
        latents: in the dtype of the VAE.
        tile: the side of a tile in pixels.
        factor: how many pixels a latent stands for along each side.
    """
    return _blended(compute, latents, tile // factor, read=1, write=factor)


def encode(
    compute: Callable[[torch.Tensor], torch.Tensor],
    pixels: torch.Tensor,
    *,
    tile: int,
    factor: int,
) -> torch.Tensor:
    """Pixels (pictures, 3, height, width) to what `compute` makes of them at a `factor`-th.

    In float32. The means and the logarithms of variances are blended alike.

    Args:
        compute: encodes one tile, (1, 3, ...) to (1, channels, ...).
        pixels: in the dtype of the VAE.
        tile: the side of a tile in pixels.
        factor: how many pixels a latent stands for along each side.
    """
    return _blended(compute, pixels, tile // factor, read=factor, write=1)


def _blended(
    compute: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    side: int,
    *,
    read: int,
    write: int,
) -> torch.Tensor:
    """Tiles of `side` latents, which are `read` wide in what is given and `write` in what comes."""
    pictures, _, height, width = given.shape
    rows, columns = (
        tiles.cut(length // read, tile=side, context=side // OVERLAP) for length in (height, width)
    )
    down, across = (shares(spans, write) for spans in (rows, columns))
    made: torch.Tensor | None = None
    for picture, (y, of_y), (x, of_x) in _every(
        pictures, list(zip(rows, down, strict=True)), list(zip(columns, across, strict=True))
    ):
        from_y, from_x = y.times(read), x.times(read)
        part = given.narrow(0, picture, 1).narrow(2, from_y.start, from_y.stop - from_y.start)
        part = compute(part.narrow(3, from_x.start, from_x.stop - from_x.start)).float()
        if made is None:
            shape = (pictures, part.shape[1], height // read * write, width // read * write)
            made = torch.zeros(shape, device=part.device, dtype=torch.float32)
        to_y, to_x = y.times(write), x.times(write)
        share = (of_y[:, None] * of_x).to(part.device)
        target = made.narrow(0, picture, 1).narrow(2, to_y.start, to_y.stop - to_y.start)
        target.narrow(3, to_x.start, to_x.stop - to_x.start).add_(part.mul_(share))
    assert made is not None
    return made


Axis = list[tuple[tiles.Span, torch.Tensor]]


def _every(
    pictures: int, rows: Axis, columns: Axis
) -> Iterator[tuple[int, tuple[tiles.Span, torch.Tensor], tuple[tiles.Span, torch.Tensor]]]:
    for picture in range(pictures):
        for row in rows:
            for column in columns:
                yield picture, row, column


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
