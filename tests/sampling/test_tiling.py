import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdamd import tiles
from sdamd.sampling import tiling

FACTOR = 8


class Nearest:
    """A VAE that only repeats: the first three channels, eight times as large; and back."""

    def __init__(self, *, lights: bool = False) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._lights = lights

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(latents.shape))
        made = latents[:, :3].repeat_interleave(8, -1).repeat_interleave(8, -2)
        # What tiles really do to each other: each has a mean of its own.
        return made + 0.1 * len(self.shapes) if self._lights else made

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(pixels.shape))
        return torch.nn.functional.avg_pool2d(pixels, 8).repeat(1, 2, 1, 1)


def decode(vae: Nearest, latents: torch.Tensor, *, tile: int) -> torch.Tensor:
    return tiling.decode(vae.decode, latents, tile=tile, factor=FACTOR)


def latents(pictures: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(pictures, 4, height, width, generator=torch.Generator().manual_seed(1))


@given(st.integers(1, 3), st.integers(1, 80), st.integers(1, 80), st.sampled_from([64, 128, 256]))
def test_tiles_together_are_the_picture(pictures: int, height: int, width: int, tile: int) -> None:
    given_latents = latents(pictures, height, width)
    whole = Nearest().decode(given_latents)
    made = decode(Nearest(), given_latents, tile=tile)
    torch.testing.assert_close(made, whole, rtol=0, atol=1e-5)


@given(st.integers(1, 2), st.integers(8, 500), st.integers(8, 500), st.sampled_from([128, 256]))
def test_tiles_are_encoded_to_what_the_picture_is(
    pictures: int, height: int, width: int, tile: int
) -> None:
    pixels = torch.randn(pictures, 3, height, width, generator=torch.Generator().manual_seed(1))
    vae = Nearest()
    made = tiling.encode(vae.encode, pixels, tile=tile, factor=FACTOR)
    torch.testing.assert_close(made, Nearest().encode(pixels), rtol=0, atol=1e-5)
    assert len(set(vae.shapes)) == 1


@pytest.mark.report("D01", "D04")
def test_all_tiles_of_all_sizes_have_one_shape() -> None:
    """D01, D04: a GPU searches its kernels anew for every shape, for minutes."""
    vae = Nearest()
    for height, width in ((64, 64), (96, 64), (104, 152), (65, 200), (128, 128)):
        decode(vae, latents(2, height, width), tile=512)
    assert set(vae.shapes) == {(1, 4, 64, 64)}


def test_a_picture_smaller_than_a_tile_is_one_tile() -> None:
    vae = Nearest()
    decode(vae, latents(1, 40, 64), tile=512)
    assert vae.shapes == [(1, 4, 40, 64)]


@pytest.mark.report("C11")
def test_there_is_no_edge_where_tiles_differ_in_brightness() -> None:
    """C11: lines at the edges of tiles; a step of 0.1 is spread over at least an eighth."""
    flat = torch.zeros(1, 4, 64, 200)
    made = decode(Nearest(lights=True), flat, tile=512)
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
    made = decode(Nearest(), latents(1, 70, 70).bfloat16(), tile=256)
    assert made.dtype == torch.float32
    assert made.shape == (1, 3, 560, 560)
