"""Super-resolution: a small network enlarges a picture four times and draws the edges sharp."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from sdamd import tiles
from sdamd.errors import BadCheckpoint, BadImage, OutOfVram
from sdamd.out_of_memory import ran_out

log = logging.getLogger(__name__)

WEIGHTS = Path(__file__).parent / "assets" / "upscaler" / "realesr-animevideov3-x4.safetensors"

SCALE = 4
"""How many times the network enlarges."""

CONTEXT = 18
"""How far an output pixel sees, in pixels of the input: one for each 3x3 convolution."""

TILE = 544
"""Two tiles span 1024 pixels, three 1536, four 2048; a float32 tile takes about 0.2 GB."""

SMALLEST_TILE = 64
"""Below this, most of a tile would be context."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called after each tile with (tile, tiles); what it raises ends the work."""


class CompactNetwork(nn.Module):
    """Plain 3x3 convolutions at the small size; their last channels become the new pixels.

    They add detail to the nearest-neighbour enlargement. The names in the state dict are those
    of Real-ESRGAN's files. Input (n, 3, height, width), RGB in [0, 1]; output the same times
    `SCALE`, which may leave [0, 1] a little.

    Source: Wang et al., Real-ESRGAN (2021), its compact generator; Shi et al. (2016), sub-pixel
    convolution.
    """

    def __init__(self, *, features: int = 64, convolutions: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, features, 3, padding=1), nn.PReLU(features)]
        for _ in range(convolutions):
            layers += [nn.Conv2d(features, features, 3, padding=1), nn.PReLU(features)]
        layers.append(nn.Conv2d(features, 3 * SCALE**2, 3, padding=1))
        self.body = nn.Sequential(*layers)

    def forward(self, pixels: Tensor) -> Tensor:
        """Enlarge `pixels`."""
        detail = functional.pixel_shuffle(self.body(pixels), SCALE)
        return detail + functional.interpolate(pixels, scale_factor=SCALE, mode="nearest")


class Upscaler:
    """A network that enlarges four times, ready on one device.

    Pictures wider or taller than `tile` pixels are worked on in tiles, which changes no pixel.
    `tile` shrinks for good when the device runs out of memory, and at the end `device` becomes the
    CPU; `dtype` becomes float32 for good when a smaller type overflows. `fell` says whether memory
    ran out.
    """

    def __init__(
        self, network: nn.Module, *, device: torch.device, dtype: torch.dtype, tile: int = TILE
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.tile = tile
        self.fell = False
        # Large pictures take two thirds of the time on the CPU with the channels last.
        self._layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        self._network = network.eval().requires_grad_(requires_grad=False)
        self._network.to(device=device, dtype=dtype)
        self._network.to(memory_format=self._layout)  # type: ignore[call-overload]  # not in stubs

    def upscale(
        self, image: Image.Image, scale: int, progress: Progress | None = None
    ) -> Image.Image:
        """Enlarge an RGB `image` `scale` (1 to 4) times; below 4, the x4 picture is reduced.

        Raises:
            BadImage: if the network gives NaN or infinity, in float32 too.
            OutOfVram: if the device cannot hold even the smallest tile.
            ValueError: if `image` is not RGB or `scale` is out of its range.
        """
        if image.mode != "RGB" or not 1 <= scale <= SCALE:
            raise ValueError(
                f"mode is {image.mode}, scale {scale}; allowed mode RGB and scale 1 to {SCALE}"
            )
        if scale == 1:
            return image
        large = Image.fromarray(self._enlarge(np.array(image), progress))
        return large.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS)

    def _enlarge(self, image: NDArray[np.uint8], progress: Progress | None) -> NDArray[np.uint8]:
        """Enlarge (height, width, 3) with the largest tiles that fit into memory."""
        while True:
            try:
                return self._enlarge_in_tiles(image, progress)
            except (RuntimeError, MemoryError) as error:
                # As text, since the error's traceback keeps the tensors alive.
                if not ran_out(error):
                    raise
            self.fell = True
            self._spare(min(self.tile, max(image.shape)))

    def _spare(self, failed: int) -> None:
        """Take smaller tiles than those that found no room, or in the end the CPU's memory."""
        if failed // 2 >= SMALLEST_TILE:
            self.tile = failed // 2
            log.warning("out of memory on %s; upscaling in tiles of %d", self.device, self.tile)
        elif self.device.type != "cpu":
            log.warning("out of memory on %s; upscaling on the CPU", self.device)
            self.device, self.dtype, self.tile = torch.device("cpu"), torch.float32, TILE
            self._network.to(device=self.device, dtype=self.dtype)
        else:
            raise OutOfVram(
                f"upscaling a tile of {failed} pixels ran out of memory on {self.device}",
                stage="upscale",
            )

    def _enlarge_in_tiles(
        self, image: NDArray[np.uint8], progress: Progress | None
    ) -> NDArray[np.uint8]:
        height, width, channels = image.shape
        large = np.empty((height * SCALE, width * SCALE, channels), np.uint8)
        grid = tiles.grid(width, height, tile=self.tile, context=CONTEXT)
        for number, tile in enumerate(grid, start=1):
            x, y = tile.x, tile.y
            enlarged = self._enlarge_tile(image[y.start : y.stop, x.start : x.stop])
            x, y = x.times(SCALE), y.times(SCALE)
            large[y.keep : y.keep_stop, x.keep : x.keep_stop] = enlarged[
                y.keep - y.start : y.keep_stop - y.start, x.keep - x.start : x.keep_stop - x.start
            ]
            if progress is not None:
                progress(number, len(grid))
        return large

    def _enlarge_tile(self, tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
        with torch.inference_mode():
            pixels = torch.from_numpy(tile).to(self.device).permute(2, 0, 1)[None]
            scaled = pixels.to(self.dtype).div_(255).contiguous(memory_format=self._layout)
            enlarged: Tensor = self._network(scaled).float()
            if enlarged.isfinite().all():
                rounded = enlarged.mul_(255).round_().clamp_(0, 255).to(torch.uint8)
                return rounded[0].permute(1, 2, 0).cpu().numpy()
        if self.dtype == torch.float32:
            raise BadImage(f"the upscaler gave NaN or infinity in float32 on {self.device}")
        log.warning("upscaling overflows in %s on %s; float32 instead", self.dtype, self.device)
        self.dtype = torch.float32
        self._network.float()
        return self._enlarge_tile(tile)


def load(
    device: str | torch.device = "cpu", dtype: torch.dtype | None = None, *, tile: int = TILE
) -> Upscaler:
    """Load the embedded network; `dtype` is float32 on the CPU and float16 elsewhere by default.

    Raises:
        BadCheckpoint: if the file of weights is missing or damaged.
    """
    device = torch.device(device)
    if dtype is None:
        # bfloat16 halves the time on some CPUs, but moves pixels by up to 7 of 255.
        dtype = torch.float32 if device.type == "cpu" else torch.float16
    return Upscaler(_read(WEIGHTS), device=device, dtype=dtype, tile=tile)


def _read(weights: Path) -> CompactNetwork:
    network = CompactNetwork()
    try:
        network.load_state_dict(load_file(weights))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BadCheckpoint(
            f"the upscaler's weights {weights} cannot be read ({error}); install sdamd again"
        ) from error
    return network
