"""Philox against its published vectors, and the normal numbers against torch's on NVIDIA cards."""

import numpy as np
import pytest
import torch

from sdamd.sampling.philox import PhiloxGenerator, philox


# Source: kat_vectors of Random123 1.14 (philox4x32, 10 rounds).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_words_are_those_of_the_paper(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    made = philox(np.array(counter, dtype=np.uint32)[:, None], key)
    assert tuple(int(word) for word in made[:, 0]) == expected


def test_the_numbers_are_those_of_a_card() -> None:
    # What torch.randn gives on an NVIDIA card after torch.manual_seed(0), as it is published in
    # many places, rounded as torch prints it.
    expected = [-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797, -0.6229, -0.3284, -1.0745,
                -0.3631, -1.6711, 2.2655]  # fmt: skip
    made = PhiloxGenerator(0).randn((4, 64, 64)).flatten()
    assert torch.allclose(made[: len(expected)], torch.tensor(expected), atol=6e-5)


def test_each_draw_is_new_and_a_seed_repeats_them() -> None:
    one, other = PhiloxGenerator(2**64 - 1), PhiloxGenerator(2**64 - 1)
    first, second = one.randn((2, 3)), one.randn((2, 3))
    assert not torch.equal(first, second)
    assert torch.equal(first, other.randn((2, 3)))
    assert torch.equal(second, other.randn((2, 3)))


def test_a_larger_tensor_begins_with_the_numbers_of_a_smaller_one() -> None:
    small, large = PhiloxGenerator(5).randn((10,)), PhiloxGenerator(5).randn((1000,))
    assert torch.equal(small, large[:10])


def test_the_numbers_are_normal() -> None:
    made = PhiloxGenerator(3).randn((4, 128, 128))
    assert abs(float(made.mean())) < 0.02
    assert abs(float(made.std()) - 1) < 0.02
    assert made.isfinite().all()
