"""The plan itself: the choices of one run, what they need, and why they were made."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from sdamd.hardware.tuning import FUSED

GIB: Final = 2**30
TILES: Final = (512, 256, 128)
"""Sides of the VAE's tiles in pixels, in order of preference."""
BANDS: Final = 16
"""Rows that a banded convolution makes at a time of a picture 1024 pixels wide."""
CHUNKS: Final = 8
"""Pieces of a feed-forward layer; more gain nothing, since something else is the widest then."""
BLOCK_BYTES: Final = 64 * 2**20
"""What the scores of attention may take on a GPU: fits the large caches of RDNA 2 and later."""
BLOCK_BYTES_CPU: Final = 8 * 2**20
"""On a CPU larger blocks leave its caches and gain nothing: `scripts/bench.py attention`."""


class Verdict(StrEnum):
    """Whether a job fits a card."""

    FITS = "fits"
    SLOWER = "slower"
    DOES_NOT_FIT = "does not fit"


class Stage(StrEnum):
    """A part of a run in which memory can run out; `LOAD` is moving weights, `RUN` all of it."""

    TEXT = "text"
    ENCODE = "encode"
    DENOISE = "denoise"
    HIRES = "hires"
    DECODE = "decode"
    LOAD = "load"
    RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Peak bytes on the device while each stage runs; 0 for one that is not.

    `encode` is of an init image by the VAE, `hires` of the second denoising pass.
    """

    text: int
    denoise: int
    decode: int
    encode: int = 0
    hires: int = 0
    upscale: int = 0

    @property
    def peak(self) -> int:
        """The highest of them."""
        sizes: dict[str, int] = asdict(self)
        return max(sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Predicted seconds of each stage, for all pictures that share the pass and all steps.

    `moving` is bringing weights to the device and taking them off again.
    """

    text: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0
    encode: float = 0.0
    hires: float = 0.0
    upscale: float = 0.0
    moving: float = 0.0

    @property
    def total(self) -> float:
        """All of them together."""
        seconds: dict[str, float] = asdict(self)
        return sum(seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choices for one run. `dtype` is `float32`, `float16` or `bfloat16`.

    `vae_dtype` may be wider than `dtype`, since some VAEs overflow in float16. `vae_tile` is the
    side of the tiles in which the VAE works, in pixels, on one picture after another; 0 is all
    pictures whole and at once. `batch` is how many pictures share one denoising pass.
    `attention` is how the UNet attends: `fused`, `chunked` (blocks of scores of `block_bytes`),
    `sliced`, `xformers`, `flash`, or `math` for all scores at once; `vae_attention` is `fused` or
    `chunked`. `miopen` is whether the VAE's convolutions go through it, `channels_last` the layout
    of all convolutions.
    `offload` is `none`, `model` (parts wait in RAM until their turn) or `stream` (layers do, but
    for `resident_bytes` of the UNet's). `passes` is in how many calls the UNet does one step, whose
    samples are two for each picture with guidance; `feed_forward_chunks` in how many pieces its
    feed-forward layers take the tokens. `vae_bands` is how many rows of pixels the VAE's
    convolutions make at a time; 0 is all. `storage` is the type in which the UNet's weights are
    kept; empty is `dtype`. `denoise_tile` is the side in pixels of the tiles in which the UNet
    sees a picture, 0 the whole: the one choice that changes what is in the picture.

    `stages` are what the device must have: weights, activations, workspace and what the allocator
    loses between them. `activations` are what torch allocates beyond the weights that lie there
    when the stage's network is called, without that margin; `host_bytes` what waits in RAM.
    `times` is None where nobody knows how fast the device is.
    `budget_bytes` is None on the CPU, and where nobody knows the size of the memory.
    """

    device: str
    dtype: str
    vae_dtype: str
    batch: int
    vae_tile: int
    attention: str
    offload: str
    stages: Stages
    budget_bytes: int | None
    reasons: tuple[str, ...]
    vae_attention: str = FUSED
    block_bytes: int = BLOCK_BYTES
    miopen: bool = True
    channels_last: bool = False
    passes: int = 1
    feed_forward_chunks: int = 1
    vae_bands: int = 0
    resident_bytes: int = 0
    storage: str = ""
    denoise_tile: int = 0
    activations: Stages = Stages(text=0, denoise=0, decode=0)
    times: Times | None = None
    host_bytes: int = 0

    @property
    def verdict(self) -> Verdict:
        """`slower` when the card forced tiles or offloading."""
        if self.budget_bytes is not None and self.stages.peak > self.budget_bytes:
            return Verdict.DOES_NOT_FIT
        spared = self.vae_tile or self.denoise_tile or self.offload != "none"
        return Verdict.SLOWER if spared else Verdict.FITS

    @property
    def seconds(self) -> float | None:
        """Predicted time of one picture once the weights are loaded, or None for unknown."""
        return None if self.times is None else self.times.total / self.batch

    @property
    def means(self) -> str:
        """What is on to spare memory, in words; empty for nothing."""
        resident = f" with {self.resident_bytes / GIB:.1f} GiB on the device"
        said = {
            f"passes {self.passes}": self.passes > 1,
            f"feed-forward in {self.feed_forward_chunks}": self.feed_forward_chunks > 1,
            f"VAE in bands of {self.vae_bands}": self.vae_bands,
            f"VAE in tiles of {self.vae_tile}": self.vae_tile,
            f"denoised in tiles of {self.denoise_tile}": self.denoise_tile,
            f"offload {self.offload}{resident if self.resident_bytes else ''}":
                self.offload != "none",
            f"weights in {self.storage}": self.storage,
        }  # fmt: skip
        return ", ".join(words for words, on in said.items() if on)

    def to_dict(self) -> dict[str, object]:
        """The shape of `plan --json`, but for what the caller knows better."""
        choices: Mapping[str, object] = {
            name: getattr(self, name)
            for name in (
                "device", "dtype", "vae_dtype", "attention", "vae_attention", "miopen",
                "channels_last", "offload", "resident_bytes", "passes", "feed_forward_chunks",
                "vae_bands", "vae_tile", "denoise_tile", "storage", "batch",
            )
        }  # fmt: skip
        seconds, times = self.seconds, self.times
        return {
            "verdict": str(self.verdict),
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.stages.peak,
            "host_bytes": self.host_bytes,
            "stages": asdict(self.stages),
            "choices": dict(choices),
            "means": self.means,
            "reasons": list(self.reasons),
            "seconds": None if seconds is None else round(seconds, 3),
            "stage_seconds": None if times is None else
            {name: round(value, 3) for name, value in asdict(times).items()},
        }  # fmt: skip
