"""The noise that torch draws on an NVIDIA card, made on the CPU.

Pictures of other tools were mostly made with it. Each element of a tensor is the first normal
number of its own Philox sequence, so it can be had on any machine.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox 4x32, 10 rounds);
the Box-Muller form of cuRAND; `aten/src/ATen/native/cuda/DistributionTemplates.h`. It holds as long
as the card has a thread for every element, which a picture's latents never exceed.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS: Final = 10
_TO_UNIT: Final = np.float32(2.3283064e-10)  # 2**-32
_TO_ANGLE: Final = np.float32(2.3283064e-10 * 2 * np.pi)


class PhiloxGenerator:
    """Stands where a `torch.Generator` of an NVIDIA card would; each draw moves it on by one."""

    def __init__(self, seed: int) -> None:
        self._key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        self._draws = 0

    def randn(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal numbers in float32 on the CPU."""
        count = int(np.prod(shape))
        counter = np.zeros((4, count), dtype=np.uint32)
        counter[0] = self._draws
        counter[2] = np.arange(count, dtype=np.uint32)
        self._draws += 1
        first, second, _, _ = philox(counter, self._key)
        radius = np.sqrt(-2 * np.log(first.astype(np.float32) * _TO_UNIT + _TO_UNIT / 2))
        angle = second.astype(np.float32) * _TO_ANGLE + _TO_ANGLE / 2
        return torch.from_numpy((radius * np.sin(angle)).astype(np.float32)).reshape(shape)


def philox(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox 4x32 with 10 rounds.

    Args:
        counter: (4, n) words, low one first; n independent blocks.
        key: low word and high word.

    Returns:
        (4, n) random words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    with np.errstate(over="ignore"):  # the key is meant to wrap around
        for _ in range(_ROUNDS):
            low = c0.astype(np.uint64) * _MULTIPLIERS[0]
            high = c2.astype(np.uint64) * _MULTIPLIERS[1]
            c0, c1, c2, c3 = (
                _upper(high) ^ c1 ^ k0, high.astype(np.uint32),
                _upper(low) ^ c3 ^ k1, low.astype(np.uint32),
            )  # fmt: skip
            k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return np.stack([c0, c1, c2, c3])


def _upper(product: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return (product >> np.uint64(32)).astype(np.uint32)
