"""The picture in tiles, and what goes in beside it; the UNet is one that is understood."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdamd.sampling.unet import BesideUNet, TiledUNet


class Doubling(torch.nn.Module):
    """Gives twice its first four channels, and remembers what shapes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(in_channels=4)
        self.seen: list[tuple[int, ...]] = []
        self.last: torch.Tensor | None = None

    def forward(self, sample: torch.Tensor, timestep: Any, **options: Any) -> tuple[torch.Tensor]:
        assert options == {"text": "the same for all"}
        self.seen.append(tuple(sample.shape))
        self.last = sample
        return (2 * sample[:, :4],)


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from([8, 16, 24, 64]))
def test_every_latent_is_covered_exactly_and_all_tiles_are_of_one_shape(
    height: int, width: int, tile: int
) -> None:
    unet = Doubling()
    sample = torch.randn(2, 4, height, width)
    (made,) = TiledUNet(unet, tile)(sample, 5, text="the same for all")
    torch.testing.assert_close(made, 2 * sample, rtol=1e-5, atol=1e-5)
    assert set(unet.seen) == {(2, 4, min(tile, height), min(tile, width))}


def test_a_picture_that_fits_a_tile_goes_through_untouched() -> None:
    unet = Doubling()
    sample = torch.randn(1, 4, 16, 16).half()
    (made,) = TiledUNet(unet, 16)(sample, 5, text="the same for all")
    assert unet.last is sample
    assert torch.equal(made, 2 * sample)


def test_the_dtype_of_the_latents_is_that_of_the_answer() -> None:
    (made,) = TiledUNet(Doubling(), 8)(
        torch.ones(1, 4, 16, 8).bfloat16(), 5, text="the same for all"
    )
    assert made.dtype == torch.bfloat16


def test_what_else_is_asked_of_a_stand_in_the_unet_answers() -> None:
    unet = Doubling()
    stand_in = BesideUNet(TiledUNet(unet, 8), torch.zeros(1, 5, 8, 8))
    assert stand_in.config.in_channels == 4
    with pytest.raises(AttributeError, match="nonsense"):
        _ = stand_in.nonsense


def test_mask_and_masked_picture_go_in_beside_each_row_of_guidance() -> None:
    unet = Doubling()
    beside = torch.stack([torch.full((5, 8, 8), 1.0), torch.full((5, 8, 8), 2.0)])
    BesideUNet(unet, beside)(torch.zeros(4, 4, 8, 8), 5, text="the same for all")
    assert unet.last is not None
    assert unet.last.shape == (4, 9, 8, 8)
    assert unet.last[:, 4, 0, 0].tolist() == [1, 2, 1, 2]
