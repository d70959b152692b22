"""Stand-ins for the UNet in a pipeline: the picture in tiles, and what goes in beside it.

From the outside in: the pipeline, `BesideUNet`, `composed` (AND), `TiledUNet`, and the UNet with
what guards it.
"""

from typing import Any, Final

import torch
from torch import nn

from sdamd import tiles
from sdamd.sampling.tiling import OVERLAP, shares

MULTIPLE: Final = 8
"""A tile's side in latents is one of it: UNets halve up to three times."""


class _StandIn(nn.Module):
    """Whatever else is asked of it, the UNet behind it answers."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("unet"), name)


class TiledUNet(_StandIn):
    """Sees a large picture in tiles of one shape, and blends what it says of them, at every step.

    So neighbours agree from the first step on, and no seam is left. Every tile is told the same of
    the whole picture (SDXL's sizes): told its own place, it would draw another scene.

    Source: Bar-Tal et al. 2023, "MultiDiffusion", arXiv:2302.08113, with weights that cross over
    linearly where tiles overlap.
    """

    def __init__(self, unet: nn.Module, tile: int) -> None:
        """`tile` is the side in latents, a multiple of 8."""
        super().__init__(unet)
        self._tile = tile

    def forward(
        self, sample: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        """Predict as the UNet does; `sample` is (rows, channels, height, width) in latents."""
        height, width = sample.shape[2:]
        if max(height, width) <= self._tile:
            made: tuple[torch.Tensor, ...] = self.unet(sample, *arguments, **options)
            return made
        context = self._tile // OVERLAP
        rows, columns = (
            tiles.cut(length, tile=self._tile, context=context) for length in (height, width)
        )
        down, across = shares(rows, 1), shares(columns, 1)
        blended: torch.Tensor | None = None
        for y, of_y in zip(rows, down, strict=True):
            for x, of_x in zip(columns, across, strict=True):
                part = sample[:, :, y.start : y.stop, x.start : x.stop]
                said = self.unet(part, *arguments, **options)[0]
                if blended is None:
                    blended = said.new_zeros(
                        (len(said), said.shape[1], height, width), dtype=torch.float32
                    )
                share = (of_y[:, None] * of_x).to(said.device)
                blended[:, :, y.start : y.stop, x.start : x.stop].add_(said.float() * share)
        assert blended is not None
        return (blended.to(sample.dtype),)


class BesideUNet(_StandIn):
    """Of an inpainting model: hands over mask and masked picture beside the latents."""

    def __init__(self, unet: nn.Module, beside: torch.Tensor) -> None:
        """`beside` is (pictures, 5, height, width): the mask, then the masked picture's latents."""
        super().__init__(unet)
        self._beside = beside

    def forward(
        self, sample: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        """Predict for (rows, 4, height, width), where guidance doubles the rows."""
        times = len(sample) // len(self._beside)
        beside = self._beside.to(sample.device, sample.dtype).repeat(times, 1, 1, 1)
        made: tuple[torch.Tensor, ...] = self.unet(
            torch.cat([sample, beside], dim=1), *arguments, **options
        )
        return made
