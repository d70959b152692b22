import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from sdamd import upscale
from sdamd.errors import BadCheckpoint, BadImage, OutOfVram
from sdamd.upscale import CONTEXT, SCALE, WEIGHTS, CompactNetwork, Upscaler, load

DATA = Path(__file__).parent / "data" / "upscale"
NCNN_BIN_SHA256 = "548a36f9c3f4ab8da56cd3b13badf23968bee207b396dad14d04b830e5f2ab2d"
NCNN_FLOAT16_TAG = 0x01306B47
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def upscaler() -> Upscaler:
    return load("cpu")


class Nearest(nn.Module):
    """Enlarges without any sharpening; notes the sizes that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def forward(self, pixels: Tensor) -> Tensor:
        self.sizes.append((pixels.shape[-1], pixels.shape[-2]))
        return functional.interpolate(pixels, scale_factor=SCALE, mode="nearest")


class Forgetful(Nearest):
    """Has memory for pictures of at most `limit` pixels."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, pixels: Tensor) -> Tensor:
        result = super().forward(pixels)
        if pixels.shape[-1] * pixels.shape[-2] > self.limit:
            raise torch.OutOfMemoryError("HIP out of memory")
        return result


class Overflowing(Nearest):
    """Gives infinity in the types that it is told."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.dtypes = dtypes

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels) * (torch.inf if pixels.dtype in self.dtypes else 1)


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def drawing() -> Image.Image:
    """256x256 pixels with edges in many directions, smoothed by drawing four times as large."""
    canvas = Image.linear_gradient("L").resize((1024, 1024)).convert("RGB")
    draw = ImageDraw.Draw(canvas)
    draw.ellipse((600, 120, 860, 380), fill=(255, 220, 120))
    draw.polygon([(0, 800), (300, 300), (620, 800)], fill=(90, 60, 120))
    draw.polygon([(450, 820), (760, 420), (1024, 820)], fill=(40, 110, 70))
    draw.rectangle((0, 800, 1024, 1024), fill=(40, 80, 160))
    for x in range(60, 1000, 160):
        draw.line([(x, 860), (x + 90, 900)], fill=(230, 240, 250), width=14)
    return canvas.resize((256, 256), Image.Resampling.BOX)


def difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of any channel, in 1/255."""
    return int(np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max())


def psnr(image: Image.Image, truth: Image.Image) -> float:
    error = np.asarray(image, np.float64) - np.asarray(truth, np.float64)
    return float(10 * np.log10(255**2 / np.mean(error**2)))


def steepest(image: Image.Image) -> float:
    """The mean of the steepest hundredth of the steps between neighbours in a row."""
    steps: NDArray[np.float64] = np.abs(np.diff(np.asarray(image, np.float64), axis=1)).ravel()
    return float(np.sort(steps)[-steps.size // 100 :].mean())


# The weights


def test_the_weights_are_those_of_the_published_file_bit_for_bit() -> None:
    state = load_file(WEIGHTS)
    written = b""
    for index in range(35):
        weight = state.pop(f"body.{index}.weight")
        if weight.ndim == 1:
            written += weight.numpy().astype("<f4").tobytes()
            continue
        written += struct.pack("<I", NCNN_FLOAT16_TAG) + weight.numpy().astype("<f2").tobytes()
        written += bytes(-len(written) % 4)
        written += state.pop(f"body.{index}.bias").numpy().astype("<f4").tobytes()
    assert not state
    assert hashlib.sha256(written).hexdigest() == NCNN_BIN_SHA256


def test_the_weights_are_small_and_their_licence_lies_beside_them() -> None:
    assert WEIGHTS.stat().st_size < 1_300_000
    assert "Copyright (c) 2021, Xintao Wang" in WEIGHTS.with_name("LICENSE").read_text()
    readme = WEIGHTS.with_name("README.md").read_text()
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() in readme
    assert NCNN_BIN_SHA256 in readme


def test_the_picture_is_that_of_ncnn(upscaler: Upscaler) -> None:
    with Image.open(DATA / "small.png") as small, Image.open(DATA / "ncnn-x4.png") as expected:
        large = upscaler.upscale(small, 4)
        assert difference(large, expected) <= 1
        assert np.mean(np.asarray(large) != np.asarray(expected)) < 0.01, "it rounds as ncnn does"


def test_the_context_is_exactly_what_the_network_sees() -> None:
    torch.manual_seed(0)
    network = CompactNetwork(features=8).double()
    pixels = torch.rand(1, 3, 2 * CONTEXT + 9, 2 * CONTEXT + 9, dtype=torch.float64)
    touched = pixels.clone()
    touched[..., CONTEXT + 4, CONTEXT + 4] += 1
    with torch.inference_mode():
        changed = (network(touched) - network(pixels)).abs().amax(dim=(0, 1)) > 0
    rows = changed.any(dim=1).nonzero().flatten() // SCALE
    columns = changed.any(dim=0).nonzero().flatten() // SCALE
    for axis in (rows, columns):
        assert (int(axis.min()), int(axis.max())) == (4, 2 * CONTEXT + 4)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(None, id="missing"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", id="A Git LFS pointer"),
        pytest.param(WEIGHTS.read_bytes()[:600_000], id="truncated"),
    ],
)
def test_damaged_weights_are_named(
    damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.safetensors"
    if damage is not None:
        path.write_bytes(damage)
    monkeypatch.setattr(upscale, "WEIGHTS", path)
    with pytest.raises(BadCheckpoint, match=r"weights\.safetensors cannot be read .*install"):
        load()


# Sizes


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (31, 18), (24, 65)])
def test_the_size_is_exact(upscaler: Upscaler, size: tuple[int, int], scale: int) -> None:
    large = upscaler.upscale(noise(*size), scale)
    assert large.size == (size[0] * scale, size[1] * scale)
    assert large.mode == "RGB"


def test_scale_1_gives_the_picture_itself(upscaler: Upscaler) -> None:
    image = noise(20, 10)
    assert upscaler.upscale(image, 1) is image


@pytest.mark.parametrize("scale", [0, 5, -1])
def test_a_scale_out_of_range_is_refused(upscaler: Upscaler, scale: int) -> None:
    with pytest.raises(ValueError, match=f"scale {scale}; allowed mode RGB and scale 1 to 4"):
        upscaler.upscale(noise(8, 8), scale)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK"])
def test_a_picture_that_is_not_rgb_is_refused(upscaler: Upscaler, mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode is {mode}"):
        upscaler.upscale(noise(8, 8).convert(mode), 2)


def test_the_picture_that_was_given_is_left_alone(upscaler: Upscaler) -> None:
    image = noise(12, 12)
    before = image.tobytes()
    upscaler.upscale(image, 4)
    assert image.tobytes() == before


# Tiles


@pytest.mark.parametrize("size", [(150, 101), (64, 90), (97, 40)])
def test_tiles_leave_no_trace(upscaler: Upscaler, size: tuple[int, int]) -> None:
    image = noise(*size)
    whole = upscaler.upscale(image, 4)
    tiled = load(tile=64).upscale(image, 4)
    assert difference(whole, tiled) <= 1


def test_all_tiles_of_a_large_picture_have_one_shape() -> None:
    network = Nearest()
    image = noise(301, 205)
    large = Upscaler(network, device=CPU, dtype=torch.float32, tile=100).upscale(image, 4)
    assert len(network.sizes) > 4
    assert set(network.sizes) == {(100, 100)}
    assert difference(large, image.resize(large.size, Image.Resampling.NEAREST)) == 0


def test_progress_counts_the_tiles() -> None:
    seen: list[tuple[int, int]] = []
    upscaler = Upscaler(Nearest(), device=CPU, dtype=torch.float32, tile=64)
    upscaler.upscale(noise(80, 64), 2, lambda tile, tiles: seen.append((tile, tiles)))
    assert seen == [(1, 2), (2, 2)]


def test_progress_can_end_the_work() -> None:
    def stop(tile: int, tiles: int) -> None:
        raise KeyboardInterrupt

    network = Nearest()
    upscaler = Upscaler(network, device=CPU, dtype=torch.float32, tile=64)
    with pytest.raises(KeyboardInterrupt):
        upscaler.upscale(noise(200, 200), 4, stop)
    assert len(network.sizes) == 1


# Faults of devices


def test_out_of_memory_shrinks_the_tiles_and_changes_no_pixel() -> None:
    network = Forgetful(limit=130 * 130)
    upscaler = Upscaler(network, device=CPU, dtype=torch.float32)
    image = noise(256, 300)
    large = upscaler.upscale(image, 4)
    assert difference(large, image.resize(large.size, Image.Resampling.NEAREST)) == 0
    assert upscaler.tile == 75
    tries = len(network.sizes)
    upscaler.upscale(image, 4)
    assert set(network.sizes[tries:]) == {(75, 75)}, "it must not run into the limit again"


def test_out_of_memory_at_the_smallest_tile_is_an_error() -> None:
    upscaler = Upscaler(Forgetful(limit=0), device=CPU, dtype=torch.float32)
    with pytest.raises(OutOfVram, match="a tile of 100 pixels ran out of memory on cpu"):
        upscaler.upscale(noise(200, 150), 4)


@pytest.mark.parametrize(
    "said",
    [
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.25 GiB."),
        torch.AcceleratorError("HIP error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_spelling_makes_the_tiles_smaller(said: Exception) -> None:
    class Once(Nearest):
        def forward(self, pixels: Tensor) -> Tensor:
            result = super().forward(pixels)
            if len(self.sizes) == 1:
                raise said
            return result

    upscaler = Upscaler(Once(), device=CPU, dtype=torch.float32)
    image = noise(200, 150)
    large = upscaler.upscale(image, 4)
    assert difference(large, image.resize(large.size, Image.Resampling.NEAREST)) == 0
    assert (upscaler.tile, upscaler.fell) == (100, True)


def test_other_errors_are_not_taken_for_it() -> None:
    class Broken(Nearest):
        def forward(self, pixels: Tensor) -> Tensor:
            raise RuntimeError("HIP error: invalid device function")

    upscaler = Upscaler(Broken(), device=CPU, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="invalid device function"):
        upscaler.upscale(noise(200, 150), 4)
    assert not upscaler.fell


def test_at_the_end_the_cpu_finishes_the_picture() -> None:
    class OnTheCard(Nearest):
        def forward(self, pixels: Tensor) -> Tensor:
            if pixels.device.type != "cpu":
                self.sizes.append((pixels.shape[-1], pixels.shape[-2]))
                raise torch.OutOfMemoryError("HIP out of memory")
            return super().forward(pixels)

    network = OnTheCard()
    upscaler = Upscaler(network, device=torch.device("meta"), dtype=torch.float16)
    image = noise(300, 150)
    large = upscaler.upscale(image, 4)
    assert difference(large, image.resize(large.size, Image.Resampling.NEAREST)) == 0
    assert network.sizes == [(300, 150), (150, 150), (75, 75), (300, 150)]
    assert (upscaler.device, upscaler.dtype) == (CPU, torch.float32)


def test_an_overflow_in_float16_is_done_again_in_float32() -> None:
    upscaler = Upscaler(Overflowing(torch.float16), device=CPU, dtype=torch.float16)
    image = noise(30, 20)
    large = upscaler.upscale(image, 4)
    assert difference(large, image.resize(large.size, Image.Resampling.NEAREST)) == 0
    assert upscaler.dtype == torch.float32


def test_an_overflow_in_float32_is_a_bad_image() -> None:
    network = Overflowing(torch.float16, torch.float32)
    upscaler = Upscaler(network, device=CPU, dtype=torch.float16)
    with pytest.raises(BadImage, match="NaN or infinity in float32 on cpu"):
        upscaler.upscale(noise(8, 8), 4)


def test_float16_gives_nearly_the_picture_of_float32(upscaler: Upscaler) -> None:
    image = drawing().resize((48, 48))
    half = load(dtype=torch.float16).upscale(image, 4)
    assert difference(half, upscaler.upscale(image, 4)) <= 2


# What it is for


def soft(image: Image.Image) -> Image.Image:
    """A quarter of the size and a little out of focus, as the decoders of small models are."""
    quarter = image.resize((image.width // SCALE, image.height // SCALE), Image.Resampling.BOX)
    return quarter.filter(ImageFilter.GaussianBlur(0.8))


def test_it_restores_a_soft_picture_better_than_bicubic(upscaler: Upscaler) -> None:
    truth = drawing()
    small = soft(truth)
    bicubic = small.resize(truth.size, Image.Resampling.BICUBIC)
    large = upscaler.upscale(small, 4)
    assert psnr(large, truth) > psnr(bicubic, truth) + 0.5
    assert steepest(large) > 1.5 * steepest(bicubic)


@pytest.mark.parametrize("scale", [2, 3])
def test_it_restores_better_than_bicubic_at_lower_scales(upscaler: Upscaler, scale: int) -> None:
    original = drawing()
    small = soft(original)
    size = (small.width * scale, small.height * scale)
    truth = original.resize(size, Image.Resampling.BOX)
    bicubic = small.resize(size, Image.Resampling.BICUBIC)
    aliased = upscaler.upscale(small, 4).resize(size, Image.Resampling.NEAREST)
    large = upscaler.upscale(small, scale)
    assert psnr(large, truth) > psnr(bicubic, truth) + 0.5
    assert psnr(large, truth) > psnr(aliased, truth) + 0.1
