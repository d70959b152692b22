"""All randomness of sampling: one CPU generator per picture, whatever the device and the batch.

GPU generators differ by vendor, so noise is drawn on the CPU and moved; and a generator shared by
a batch would make a picture depend on its neighbours.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torchsde

from sdamd.request import SEED_MAX

# Where the Mersenne Twister's 624 words lie in the state that torch.Generator.get_state gives, as
# 64-bit numbers: after the seed, a pair of counters and the position.
_WORDS = slice(3, 3 + 624)


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator per picture.

    A seed below 2**32 gives torch's own sequence, the one that diffusers, ComfyUI and
    AUTOMATIC1111 with `RNG: CPU` draw. torch ignores the higher bits: to it 2**32 + 5 is 5. Here
    every seed has a sequence of its own, so a reader of another program's record that wants that
    program's noise must reduce its seed modulo 2**32.

    Raises:
        ValueError: a seed is not in 0 to 2**64-1 (torch takes -1 for 2**64-1 without a word).
    """
    return [_generator(seed) for seed in seeds]


def initial_latents(
    generators: Sequence[torch.Generator], shape: tuple[int, int, int]
) -> torch.Tensor:
    """The first noise: (pictures, channels, height, width), float32, on the CPU, deviation 1.

    Args:
        generators: one per picture; each moves on by one draw.
        shape: (channels, height, width) of the latents, an eighth of the picture's size.
    """
    return torch.stack([torch.randn(shape, generator=g, dtype=torch.float32) for g in generators])


def draw(generators: Sequence[torch.Generator], like: torch.Tensor) -> torch.Tensor:
    """Fresh noise in the shape, dtype and place of `like`; each generator moves on by one draw.

    It is drawn in float32 and rounded then: torch draws another sequence in half precision.
    """
    shape = (like.shape[1], like.shape[2], like.shape[3])
    return initial_latents(generators, shape).to(like.device, like.dtype)


def per_picture(
    generator: torch.Generator | Sequence[torch.Generator] | None, pictures: int
) -> list[torch.Generator]:
    """The generators of a batch, from what a diffusers pipeline passes on.

    Raises:
        ValueError: there is not one for each picture, or one is not on the CPU.
    """
    if generator is None:
        given: list[torch.Generator] = []
    elif isinstance(generator, torch.Generator):
        given = [generator]
    else:
        given = list(generator)
    if len(given) != pictures:
        raise ValueError(f"{len(given)} generators for {pictures} pictures; allowed one for each")
    if elsewhere := {g.device.type for g in given} - {"cpu"}:
        raise ValueError(f"a generator is on {', '.join(elsewhere)}; allowed is the CPU")
    return given


class BrownianNoise:
    """A Brownian path over sigma for each picture; the noise of a step is its rise in that step.

    The path depends on the picture's seed and the range alone, so however finely steps divide the
    range, they follow one path, and more steps refine the picture instead of changing it.

    Source: the method and arithmetic of k-diffusion's BrownianTreeNoiseSampler with a list of
    seeds, which AUTOMATIC1111 uses.
    """

    def __init__(
        self, seeds: Sequence[int], shape: tuple[int, int, int], *, weakest: float, strongest: float
    ) -> None:
        """Span the paths between two sigmas; `shape` is (channels, height, width)."""
        self._weakest, self._strongest = weakest, strongest
        start = torch.zeros(shape)
        self._paths = [
            torchsde.BrownianTree(weakest, start, strongest, entropy=seed) for seed in seeds
        ]

    def between(self, sigma: float, sigma_next: float) -> torch.Tensor:
        """Noise of deviation 1 for the step from `sigma` down to `sigma_next`.

        Returns:
            (pictures, channels, height, width), float32, on the CPU.
        """
        high, low = self._in_range(sigma), self._in_range(sigma_next)
        rise = torch.stack([path(low, high) for path in self._paths])
        return -rise / math.sqrt(abs(sigma_next - sigma))

    def _in_range(self, sigma: float) -> float:
        # torchsde rounds its times to 6 places, warns of a time beyond the ends, and compares the
        # unrounded time with the rounded ends.
        inside = min(max(sigma, self._weakest), self._strongest)
        return round(inside, 6)


def _generator(seed: int) -> torch.Generator:
    if not 0 <= seed <= SEED_MAX:
        raise ValueError(f"seed is {seed}; allowed 0 to 2**64-1")
    generator = torch.Generator("cpu").manual_seed(seed)
    high, low = divmod(seed, 2**32)
    if high:
        # numpy seeds the same Mersenne Twister from a list of words in its authors' way
        # (init_by_array), which uses all of them.
        words = np.random.RandomState([low, high]).get_state(legacy=False)["state"]["key"]
        state = generator.get_state()
        state.view(torch.int64)[_WORDS] = torch.from_numpy(words.astype(np.int64))
        generator.set_state(state)
    return generator
