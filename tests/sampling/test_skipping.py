"""Starting in the middle of a schedule, as image to image does."""

from typing import Any

import pytest
import torch

from sdamd import scheduler as names
from sdamd.sampling import schedulers

STEPS = 10
PICTURE = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8)


def laid_out(name: str, config: dict[str, object], skip: int) -> Any:
    made = schedulers.build(name, config, skip=skip)
    made.set_timesteps(STEPS)
    return made


@pytest.mark.parametrize("skip", [0, 1, 2, 3, 7, 9])
@pytest.mark.parametrize("name", names.names())
def test_with_a_model_that_knows_the_picture_every_start_leads_to_it(
    sd_config: dict[str, object], name: str, skip: int
) -> None:
    """Noise of the wrong level, or a step from the wrong place, would leave some of it."""
    scheduler = laid_out(name, sd_config, skip)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    fresh = torch.randn(PICTURE.shape, generator=torch.Generator().manual_seed(0))
    latents = schedulers.noised(scheduler, PICTURE, fresh, 0)
    for call, timestep in enumerate(scheduler.timesteps):
        scheduler.scale_model_input(latents, timestep)
        picture = schedulers.noised(scheduler, torch.ones(1, 1, 1, 1), torch.zeros(1), call)
        level = schedulers.noised(scheduler, torch.zeros(1, 1, 1, 1), torch.ones(1), call)
        told = (latents - picture * PICTURE) / level
        options = {}
        if "generator" in scheduler.step.__code__.co_varnames or hasattr(
            scheduler.step, "__wrapped__"
        ):
            wanted = getattr(scheduler.step, "__wrapped__", scheduler.step)
            if "generator" in wanted.__code__.co_varnames:
                options["generator"] = generators
        latents = scheduler.step(told, timestep, latents, return_dict=False, **options)[0]
    assert (latents - PICTURE).abs().max() < 0.15


@pytest.mark.parametrize("name", names.names())
def test_what_is_left_is_the_end_of_the_whole_schedule(
    sd_config: dict[str, object], name: str
) -> None:
    whole, part = (laid_out(name, sd_config, skip) for skip in (0, 4))
    if name == "PNDM":  # its second call is one more at the same timestep, wherever it starts
        assert part.timesteps[1] == part.timesteps[2]
        assert whole.timesteps[6:].tolist() == part.timesteps[2:].tolist()
    else:
        assert whole.timesteps[-len(part.timesteps) :].tolist() == part.timesteps.tolist()
        assert len(part.timesteps) in {6, 11, 12}


@pytest.mark.parametrize(
    ("steps", "strength", "first"),
    [(20, 1.0, 0), (20, 0.75, 5), (20, 0.0, 20), (20, 0.04, 20), (20, 0.05, 19), (1, 0.5, 1)],
)
def test_a_strength_leaves_out_the_steps_that_diffusers_leaves_out(
    steps: int, strength: float, first: int
) -> None:
    assert schedulers.first_step(steps, strength) == first
