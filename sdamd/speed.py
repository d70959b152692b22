"""How long a stage takes: floating-point operations over what the device computes in a second.

Estimates until the device itself has been measured: whoever asks multiplies by what it took here
before over what was said then. They put ways to run in order, where only ratios count.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from sdamd import tiles
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.products import Speed, speed_of
from sdamd.hardware.runtime import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second, as far as pictures see it.

    `flops` are of matrix products and convolutions in half precision, `flops_float32` in float32.
    `bandwidth` is bytes from its memory, `bus` bytes from RAM to it, 0 where it needs none.
    `call` is the seconds that a call of a network costs beyond its arithmetic.
    """

    flops: float
    flops_float32: float
    bandwidth: float
    bus: float
    call: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Operations of one sample: per pixel, and per pair of pixels for what attends.

    `width` is the width of a head in the widest layer.
    """

    linear: float
    pairs: float
    width: int = 64
    text: float = 0.0

    def of(self, pixels: float) -> float:
        """All of them."""
        return self.linear * pixels + self.pairs * pixels**2


UNETS: Final[Mapping[str, Flops]] = {
    "tiny": Flops(linear=30_885, pairs=0.0195, text=2 * 526_336 * 77),
    "sd15": Flops(linear=2_589_077, pairs=1.782, width=40, text=2 * 85e6 * 77),
    "sd21-base": Flops(linear=2_590_250, pairs=1.782, text=2 * 290e6 * 77),
    "sd21": Flops(linear=2_590_250, pairs=1.782, text=2 * 290e6 * 77),
    "sdxl": Flops(linear=5_743_742, pairs=0.672, text=2 * 715e6 * 77),
    # 2.24 G weights on tokens of 16 x 16 pixels, and 37 attentions that are 1536 wide.
    "sd35-medium": Flops(linear=17.5e6, pairs=3.47, text=2 * 5.3e9 * 256),
}
DECODE: Final[Mapping[str, Flops]] = {"tiny": Flops(linear=371_885, pairs=0.0)}
ENCODE: Final[Mapping[str, Flops]] = {"tiny": Flops(linear=112_890, pairs=0.0)}
DECODE_SD: Final = Flops(linear=9_461_057, pairs=0.5, width=512)
ENCODE_SD: Final = Flops(linear=4_128_642, pairs=0.5, width=512)
"""Source: torch's FlopCounterMode on the modules as diffusers builds them, at 512, 1024 and 2048
pixels; two operations for a multiplication with its addition."""
UPSCALE_FLOPS: Final = 2 * 9 * (3 * 64 + 16 * 64 * 64 + 64 * 48)
"""Per pixel of the picture before it is enlarged."""

_PER_CLOCK: Final[Mapping[str, int]] = {
    # Half precision, per compute unit: two for each lane, doubled by packing, then the matrix
    # units. Source: AMD's architecture guides.
    "GCN4": 128, "GCN5": 256, "RDNA1": 256, "RDNA2": 256, "RDNA3": 512, "RDNA3.5": 512,
    "RDNA4": 1024, "CDNA1": 1024, "CDNA2": 1024, "CDNA3": 2048, "CDNA4": 4096,
}  # fmt: skip
_PER_CLOCK_FLOAT32: Final = 128
_USED: Final[Mapping[str, float]] = {
    # What of it Stable Diffusion sees: users' steps per second of SDXL at 1024 pixels and of
    # SD 1.5 at 512 (SD.Next's benchmark database, ROCm's and ComfyUI's threads, 2023 to 2025).
    "GCN4": 0.25, "GCN5": 0.18, "RDNA1": 0.45, "RDNA2": 0.45, "RDNA3": 0.40, "RDNA3.5": 0.25,
    "RDNA4": 0.28, "CDNA1": 0.12, "CDNA2": 0.12, "CDNA3": 0.06, "CDNA4": 0.05,
}  # fmt: skip
_USED_FLOAT32: Final = 0.5
_USUAL: Final[Mapping[str, Speed]] = {
    # For a card that is not in the table of products but tells its compute units.
    "GCN4": Speed(cus=0, ghz=1.2, bandwidth_gbs=200, pcie_gbs=12),
    "GCN5": Speed(cus=0, ghz=1.5, bandwidth_gbs=480, pcie_gbs=12),
    "RDNA1": Speed(cus=0, ghz=1.7, bandwidth_gbs=300, pcie_gbs=12),
    "RDNA2": Speed(cus=0, ghz=2.2, bandwidth_gbs=250, pcie_gbs=12),
    "RDNA3": Speed(cus=0, ghz=2.3, bandwidth_gbs=300, pcie_gbs=12),
    "RDNA3.5": Speed(cus=0, ghz=2.7, bandwidth_gbs=110, pcie_gbs=0),
    "RDNA4": Speed(cus=0, ghz=2.7, bandwidth_gbs=320, pcie_gbs=25),
    "CDNA1": Speed(cus=0, ghz=1.5, bandwidth_gbs=1200, pcie_gbs=25),
    "CDNA2": Speed(cus=0, ghz=1.7, bandwidth_gbs=1600, pcie_gbs=25),
    "CDNA3": Speed(cus=0, ghz=2.1, bandwidth_gbs=5000, pcie_gbs=45),
    "CDNA4": Speed(cus=0, ghz=2.3, bandwidth_gbs=8000, pcie_gbs=45),
}
NOBODY_KNOWS: Final = Rates(
    flops=10e12, flops_float32=5e12, bandwidth=250e9, bus=12e9, call=0.025
)  # fmt: skip
"""Of a card that says nothing about itself: only for putting ways in order."""
CALL_SECONDS: Final = 0.020
"""A UNet is a thousand kernels and more, each of which Python and the driver start."""
CALL_SECONDS_CPU: Final = 0.004
CORE_FLOPS: Final = 35e9
"""Of one core in float32, as measured on convolutions of SD 1.5 on a small AVX2 machine."""
CORE_BANDWIDTH: Final = 8e9
DIRECTML: Final = 0.5
"""Users' figures with DirectML are about half of those with ROCm on the same card."""
SCORE_TRAFFIC: Final = 12
"""Bytes that one score is written and read with where it lies in memory for a while."""
BANDED: Final = 1.10
"""Bands make two rows of their neighbours again, and more and smaller calls."""
CHUNKED: Final = 1.01
STREAMED: Final = 1.05
"""Waiting for a layer that is not there yet, where the bus is the faster one."""


@cache
def rates_of(gpu: Gpu | None, engine: Engine, cores: int = os.cpu_count() or 1) -> Rates | None:
    """What this device does in a second; None where nothing is known about it."""
    if gpu is None:
        return Rates(
            flops=0.5 * CORE_FLOPS * cores, flops_float32=CORE_FLOPS * cores,
            bandwidth=CORE_BANDWIDTH * min(cores, 4), bus=0.0, call=CALL_SECONDS_CPU,
        )  # fmt: skip
    known = gpu.architecture
    if known is None or known.generation not in _PER_CLOCK:
        return None
    generation = known.generation
    speed = speed_of(gpu.name)
    if speed is None or not speed.cus:
        if not gpu.compute_units:
            return None
        usual = _USUAL[generation]
        speed = Speed(
            cus=gpu.compute_units, ghz=usual.ghz, bandwidth_gbs=usual.bandwidth_gbs,
            pcie_gbs=usual.pcie_gbs,
        )  # fmt: skip
    clocks = speed.cus * speed.ghz * 1e9 * (DIRECTML if engine is Engine.DIRECTML else 1.0)
    return Rates(
        flops=clocks * _PER_CLOCK[generation] * _USED[generation],
        flops_float32=clocks * _PER_CLOCK_FLOAT32 * _USED_FLOAT32,
        bandwidth=0.8e9 * speed.bandwidth_gbs,
        bus=0.0 if gpu.is_apu else 1e9 * speed.pcie_gbs,
        call=CALL_SECONDS,
    )


def call_seconds(
    rates: Rates, work: Flops, *, half: bool, pixels: float, samples: int, attention: str,
    weights: int, streamed: int = 0,
) -> float:  # fmt: skip
    """One call of a network for `samples` rows.

    `attention` is as in `Plan`; `weights` are the bytes that are read once, `streamed` those of
    them that come over the bus.
    """
    flops = rates.flops if half else rates.flops_float32
    seconds = work.of(pixels) * samples / flops
    if attention not in {"fused", "xformers", "flash"}:
        scores = work.pairs * pixels**2 * samples / (4 * work.width)
        seconds += scores * SCORE_TRAFFIC / rates.bandwidth
    seconds = max(seconds, weights / rates.bandwidth)
    if streamed and rates.bus:
        seconds = max(seconds, streamed / rates.bus) * STREAMED
    return seconds + rates.call


def moved_seconds(rates: Rates, size: int) -> float:
    """Bringing weights from RAM, or from a file that RAM holds."""
    return size / rates.bus if rates.bus else 0.0


@cache
def cut(width: int, height: int, side: int) -> tuple[int, float]:
    """How many tiles of this side cover a picture, and the pixels of one; 0 is no tiles."""
    if not side:
        return 1, float(width * height)
    across, down = (
        len(tiles.cut(length, tile=side, context=side // 8)) for length in (width, height)
    )
    return across * down, float(min(width, side) * min(height, side))
