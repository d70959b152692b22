from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdamd import tiles
from sdamd.sampling import tiling


class Nearest:
    """A VAE that only repeats: the first three channels, eight times as large."""

    def __init__(self, *, lights: bool = False) -> None:
        self.config = SimpleNamespace(block_out_channels=(1, 1, 1, 1))
        self.shapes: list[tuple[int, ...]] = []
        self._lights = lights

    def decode(self, latents: torch.Tensor, *, return_dict: bool) -> tuple[torch.Tensor]:
        assert not return_dict
        self.shapes.append(tuple(latents.shape))
        made = latents[:, :3].repeat_interleave(8, -1).repeat_interleave(8, -2)
        # What tiles really do to each other: each has a mean of its own.
        return (made + 0.1 * len(self.shapes) if self._lights else made,)


def latents(pictures: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(pictures, 4, height, width, generator=torch.Generator().manual_seed(1))


@given(st.integers(1, 3), st.integers(1, 80), st.integers(1, 80), st.sampled_from([64, 128, 256]))
def test_tiles_together_are_the_picture(pictures: int, height: int, width: int, tile: int) -> None:
    given_latents = latents(pictures, height, width)
    whole = Nearest().decode(given_latents, return_dict=False)[0]
    made = tiling.decode(Nearest(), given_latents, tile=tile)
    torch.testing.assert_close(made, whole, rtol=0, atol=1e-5)


@pytest.mark.report("D01", "D04")
def test_all_tiles_of_all_sizes_have_one_shape() -> None:
    """D01, D04: a GPU searches its kernels anew for every shape, for minutes."""
    vae = Nearest()
    for height, width in ((64, 64), (96, 64), (104, 152), (65, 200), (128, 128)):
        tiling.decode(vae, latents(2, height, width), tile=512)
    assert set(vae.shapes) == {(1, 4, 64, 64)}


def test_a_picture_smaller_than_a_tile_is_one_tile() -> None:
    vae = Nearest()
    tiling.decode(vae, latents(1, 40, 64), tile=512)
    assert vae.shapes == [(1, 4, 40, 64)]


@pytest.mark.report("C11")
def test_there_is_no_edge_where_tiles_differ_in_brightness() -> None:
    """C11: lines at the edges of tiles; a step of 0.1 is spread over at least an eighth."""
    flat = torch.zeros(1, 4, 64, 200)
    made = tiling.decode(Nearest(lights=True), flat, tile=512)
    assert made.max() - made.min() > 0.25
    assert made.diff(dim=-1).abs().max() < 0.1 / (64 * 8 / 8)


@given(st.integers(1, 400), st.sampled_from([8, 32, 64]), st.sampled_from([1, 8]))
def test_the_shares_of_all_tiles_are_one_everywhere(length: int, side: int, factor: int) -> None:
    spans = tiles.cut(length, tile=side, context=side // tiling.OVERLAP)
    total = torch.zeros(length * factor)
    for span, share in zip(spans, tiling.shares(spans, factor), strict=True):
        assert share.min() > 0
        total[span.start * factor : span.stop * factor] += share
    torch.testing.assert_close(total, torch.ones_like(total))


def test_pixels_are_float32_whatever_the_vae_is() -> None:
    made: Any = tiling.decode(Nearest(), latents(1, 70, 70).bfloat16(), tile=256)
    assert made.dtype == torch.float32
    assert made.shape == (1, 3, 560, 560)
