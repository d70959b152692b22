"""Noise: on the CPU, one generator per picture."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sdamd.sampling.noise import BrownianNoise, draw, generators, initial_latents, per_picture

SHAPE = (4, 6, 5)
# C16: seeds that other programs round, clip or refuse.
BIG = (2**31, 2**32 - 1, 2**32, 2**53 + 1, 6687881544318117707, 2**63, 2**64 - 1)


@pytest.mark.parametrize("seed", [0, 5, 2**31, 2**32 - 1])
def test_a_small_seed_gives_torch_s_own_sequence(seed: int) -> None:
    theirs = torch.randn(SHAPE, generator=torch.Generator("cpu").manual_seed(seed))
    assert torch.equal(initial_latents(generators([seed]), SHAPE)[0], theirs)


def test_all_64_bits_of_a_seed_count() -> None:
    """C16."""
    seeds = (0, 1, 5, 2**32 + 5, 2**33 + 5, 2**63 + 5, 2**53, *BIG)
    drawn = [tuple(one.flatten().tolist()) for one in initial_latents(generators(seeds), SHAPE)]
    assert len(set(drawn)) == len(seeds)


@pytest.mark.parametrize("seed", BIG)
def test_a_big_seed_is_kept_and_repeats(seed: int) -> None:
    """C16."""
    once, again = generators([seed]), generators([seed])
    assert once[0].initial_seed() == seed
    assert torch.equal(initial_latents(once, SHAPE), initial_latents(again, SHAPE))
    assert torch.equal(initial_latents(once, SHAPE), initial_latents(again, SHAPE))


def test_the_state_of_a_generator_is_laid_out_as_the_seeding_of_big_seeds_assumes() -> None:
    words = np.random.RandomState(5).get_state(legacy=False)["state"]["key"]
    state = torch.Generator("cpu").manual_seed(5).get_state().view(torch.int64)
    assert state[3 : 3 + 624].tolist() == words.tolist()


def test_noise_of_a_big_seed_is_normal() -> None:
    drawn = initial_latents(generators([2**63]), (4, 128, 128))
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused_and_never_clipped(seed: int) -> None:
    """C16."""
    with pytest.raises(ValueError, match=r"allowed 0 to 2\*\*64-1"):
        generators([seed])


def test_generators_are_on_the_cpu() -> None:
    """C10."""
    assert {g.device.type for g in generators([1, 2])} == {"cpu"}


def test_the_first_noise_of_a_picture_does_not_depend_on_the_batch() -> None:
    """C07."""
    batch = initial_latents(generators([1, 2, 3]), SHAPE)
    assert batch.shape == (3, *SHAPE)
    assert batch.dtype == torch.float32
    assert torch.equal(batch[1:2], initial_latents(generators([2]), SHAPE))


def test_noise_in_half_precision_is_the_rounded_float32_noise() -> None:
    like = torch.zeros((2, *SHAPE), dtype=torch.float16)
    drawn = draw(generators([1, 2]), like)
    assert drawn.dtype == torch.float16
    assert torch.equal(drawn, initial_latents(generators([1, 2]), SHAPE).half())


@pytest.mark.parametrize(("given", "pictures"), [(0, 1), (1, 2), (3, 2)])
def test_generators_that_are_not_one_for_each_picture_are_refused(
    given: int, pictures: int
) -> None:
    """C07: one generator for a batch makes pictures depend on their neighbours."""
    made = generators(range(given)) or None
    with pytest.raises(ValueError, match=f"{given} generators for {pictures} pictures"):
        per_picture(made, pictures)


def test_a_lone_generator_does_for_one_picture() -> None:
    (generator,) = generators([7])
    assert per_picture(generator, 1) == [generator]


def _path(*seeds: int) -> BrownianNoise:
    return BrownianNoise(seeds, SHAPE, weakest=0.03, strongest=14.6)


def test_brownian_noise_of_a_picture_does_not_depend_on_the_batch() -> None:
    """C07."""
    assert torch.equal(_path(1, 2).between(9.0, 4.0)[1:], _path(2).between(9.0, 4.0))


def test_brownian_noise_does_not_depend_on_what_was_asked_before() -> None:
    asked = _path(2)
    asked.between(14.6, 3.0)
    asked.between(3.0, 0.5)
    assert torch.equal(asked.between(9.0, 4.0), _path(2).between(9.0, 4.0))


def test_finer_steps_follow_the_same_brownian_path() -> None:
    path = _path(3, 2**64 - 1)
    rises = path.between(9.0, 4.0) * 2 + path.between(4.0, 3.0)  # times the roots of 5 - 1 and 1
    wide = path.between(9.0, 3.0) * 6**0.5
    fine = path.between(9.0, 4.0) * 5**0.5 + path.between(4.0, 3.0)
    assert torch.allclose(fine, wide, atol=1e-5)
    assert not torch.allclose(rises, wide, atol=1e-2)


def test_brownian_noise_has_a_deviation_of_one() -> None:
    noise = BrownianNoise([4], (4, 64, 64), weakest=0.03, strongest=14.6).between(2.0, 1.5)
    assert abs(float(noise.std()) - 1) < 0.03


def test_the_ends_of_the_path_raise_no_warning() -> None:
    """Sigmas that passed through float32 logarithms lie beyond the ends by a last place."""
    path = BrownianNoise([4], SHAPE, weakest=0.0291675, strongest=14.614643)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert path.between(14.61464405, 0.02916745).isfinite().all()


@pytest.mark.filterwarnings("ignore:Should have:UserWarning")  # the oracle asks beyond the ends
@pytest.mark.parametrize(("high", "low"), [(14.6, 9.0), (3.25, 0.5), (0.5, 0.03)])
def test_brownian_noise_is_k_diffusion_s(
    k_diffusion: SimpleNamespace, high: float, low: float
) -> None:
    seeds = [3, 2**40 + 1]
    like = torch.zeros((2, *SHAPE))
    oracle = k_diffusion.sampling.BrownianTreeNoiseSampler(like, 0.03, 14.6, seed=seeds)
    theirs = oracle(torch.tensor(high), torch.tensor(low))
    assert torch.allclose(_path(*seeds).between(high, low), theirs, atol=1e-6)
