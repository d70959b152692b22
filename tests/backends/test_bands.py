import copy
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from scripts.bench import peak_bytes
from sdamd.backends import forwards
from sdamd.backends.bands import band, convolve, normed
from tests.backends import pipes

EXACT = 1e-5
"""Of the largest number: plain and banded are each this far from the truth of float64."""


def apart(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return pipes.vae().eval().requires_grad_(requires_grad=False)


def both(vae: Any, latents: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        return vae.decode(latents).sample, vae.encode(pixels).latent_dist.parameters


@pytest.mark.parametrize(
    ("height", "width", "rows"),
    [(8, 8, 1), (8, 8, 7), (8, 8, 64), (8, 8, 1000), (9, 5, 8), (3, 16, 5), (1, 1, 2)],
)
def test_a_vae_in_bands_gives_what_it_gives_whole(
    vae: AutoencoderKL, height: int, width: int, rows: int
) -> None:
    latents = torch.randn(2, 4, height, width)
    pixels = torch.randn(2, 3, 8 * height, 8 * width)
    kept = latents.clone(), pixels.clone()
    expected = both(vae, latents, pixels)
    band(vae, rows)
    try:
        made = both(vae, latents, pixels)
    finally:
        forwards.restore(vae)
    for one, other in zip(made, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert apart(one, other) < EXACT
    assert torch.equal(latents, kept[0])
    assert torch.equal(pixels, kept[1])
    assert all(torch.equal(a, b) for a, b in zip(both(vae, latents, pixels), expected, strict=True))


def test_bands_are_no_further_from_the_truth_than_the_whole(vae: AutoencoderKL) -> None:
    latents, pixels = torch.randn(1, 4, 12, 12), torch.randn(1, 3, 96, 96)
    truth = both(copy.deepcopy(vae).double(), latents.double(), pixels.double())
    plain = both(vae, latents, pixels)
    band(vae, 10)
    try:
        made = both(vae, latents, pixels)
    finally:
        forwards.restore(vae)
    for one, other, true in zip(made, plain, truth, strict=True):
        assert apart(one.double(), true) <= 2 * apart(other.double(), true)


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(1, 20),
    width=st.integers(1, 9),
    rows=st.integers(1, 24),
    way=st.sampled_from(["plain", "onto", "enlarged", "halved", "prepared", "channels last"]),
)
def test_a_convolution_in_bands_is_the_convolution(
    height: int, width: int, rows: int, way: str
) -> None:
    torch.manual_seed(height * 1000 + width * 100 + rows)
    stride, padding = (2, 0) if way == "halved" else (1, 1)
    conv = torch.nn.Conv2d(3, 5, 3, stride=stride, padding=padding).requires_grad_(
        requires_grad=False
    )
    entered = torch.randn(2, 3, height + (way == "halved"), width + (way == "halved"))
    options: dict[str, Any] = {}
    expected = entered
    if way == "enlarged":
        options["scale"], expected = 2, functional.interpolate(entered, scale_factor=2.0)
    elif way == "halved":
        options["below"], expected = 1, functional.pad(entered, (0, 1, 0, 1))
    elif way == "prepared":
        options["prepare"], expected = torch.tanh, entered.tanh()
    elif way == "channels last":
        entered = entered.contiguous(memory_format=torch.channels_last)
    expected = conv(expected)
    if way == "onto":
        options["onto"] = torch.randn_like(expected)
        expected = expected + options["onto"]
    made = convolve(conv, rows, entered, **options)
    assert made.shape == expected.shape
    assert torch.allclose(made, expected, atol=1e-5)


def test_all_bands_are_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU looks for its kernels anew at each shape."""
    shapes = set()
    real = functional.conv2d

    def noting(part: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.add(part.shape)
        return real(part, *rest)

    monkeypatch.setattr(functional, "conv2d", noting)
    convolve(torch.nn.Conv2d(3, 5, 3, padding=1), 7, torch.randn(1, 3, 31, 6))
    assert shapes == {(1, 3, 9, 6)}


@settings(deadline=None, max_examples=30)
@given(
    height=st.integers(1, 200),
    mean=st.sampled_from([0.0, 3.0, -100.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_norm_from_blocks_of_rows_is_that_of_the_whole_map(
    height: int, mean: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(height)
    norm = torch.nn.GroupNorm(2, 6, eps=1e-6)
    norm.weight.data.normal_()
    norm.bias.data.normal_()
    entered = (torch.randn(2, 6, height, 5) + mean).to(dtype)
    expected = functional.silu(norm.double()(entered.double()))
    made = normed(norm.float(), entered)(entered)
    assert made.dtype == dtype
    # Beyond its own rounding, the number before the norm has lost as much as the mean is large.
    lost = 2e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(made.double(), expected, atol=lost * max(1, abs(mean)), rtol=lost)


def test_bands_hold_less_than_the_whole(vae: AutoencoderKL) -> None:
    latents = torch.randn(1, 4, 24, 24)
    with torch.inference_mode():
        whole = peak_bytes(partial(vae.decode, latents))
        band(vae, 8)
        try:
            banded = peak_bytes(partial(vae.decode, latents))
        finally:
            forwards.restore(vae)
    assert banded < 0.7 * whole


@pytest.mark.slow
def test_the_real_vae_in_bands_gives_what_it_gives_whole() -> None:
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
    ).eval()
    latents, pixels = torch.randn(1, 4, 6, 8), torch.randn(1, 3, 48, 64)
    # Float32 itself leaves 9e-6 in a network of this depth, so the truth is that of float64.
    expected = both(deepcopy(vae).double(), latents.double(), pixels.double())
    band(vae, 9)
    for one, other in zip(both(vae, latents, pixels), expected, strict=True):
        assert apart(one.double(), other) < EXACT
