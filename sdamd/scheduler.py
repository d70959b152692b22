"""The names of schedulers: what is offered, and what each of the field's spellings means.

A scheduler's name is a sampler and, after a blank, a schedule of noise levels: `DPM++ 2M Karras`.
No schedule means Uniform. `sampling.schedulers` builds what is named here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from sdamd.errors import BadRequest, unknown


class Schedule(StrEnum):
    """How the noise levels are spread between the model's strongest and weakest."""

    UNIFORM = "Uniform"
    KARRAS = "Karras"
    EXPONENTIAL = "Exponential"
    SGM_UNIFORM = "SGM Uniform"
    SIMPLE = "Simple"
    BETA = "Beta"
    KL_OPTIMAL = "KL Optimal"


# How other programs end a name. `Normal` spreads timesteps as Uniform does, and `Polyexponential`
# has an exponent that is 1 wherever it cannot be set, which makes it Exponential.
_ENDINGS: dict[Schedule, tuple[str, ...]] = {
    Schedule.UNIFORM: ("", "uniform", "normal"),
    Schedule.KARRAS: ("karras", "ka", "k"),
    Schedule.EXPONENTIAL: ("exponential", "exp", "polyexponential"),
    Schedule.SGM_UNIFORM: ("sgmuniform",),
    Schedule.SIMPLE: ("simple",),
    Schedule.BETA: ("beta",),
    Schedule.KL_OPTIMAL: ("kloptimal",),
}

_EVERY = tuple(Schedule)
_UNIFORM_ONLY = (Schedule.UNIFORM,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """One way from noise to picture.

    `schedules` are those it can follow. `evaluations` is model calls per step (one fewer in the
    last). `stochastic`: it adds fresh noise as it goes, so more steps give another picture.
    `discards_penultimate`: the weakest noise level but zero is left out.
    `automatic` is the schedule that AUTOMATIC1111's `Schedule type: Automatic` stands for.
    `max_steps` is the sampler's own limit, if it has one.
    """

    name: str
    aliases: tuple[str, ...]
    schedules: tuple[Schedule, ...] = _EVERY
    automatic: Schedule = Schedule.UNIFORM
    evaluations: int = 1
    stochastic: bool = False
    discards_penultimate: bool = False
    max_steps: int | None = None


# Source of automatic and discards_penultimate: AUTOMATIC1111 1.10.1, sd_samplers_kdiffusion.py.
SAMPLERS: tuple[Sampler, ...] = (
    Sampler(name="Euler", aliases=("EulerDiscreteScheduler",)),
    Sampler(
        name="Euler a",
        aliases=("EulerAncestralDiscreteScheduler", "euler_ancestral"),
        stochastic=True,
    ),
    Sampler(
        name="DPM++ 2M",
        aliases=("DPMSolverMultistepScheduler",),
        automatic=Schedule.KARRAS,
    ),
    Sampler(
        name="DPM++ 2M SDE",
        aliases=("dpmpp_2m_sde_gpu",),
        automatic=Schedule.EXPONENTIAL,
        stochastic=True,
    ),
    Sampler(
        name="DPM++ 2M SDE Heun",
        aliases=("dpmpp_2m_sde_heun_gpu",),
        automatic=Schedule.EXPONENTIAL,
        stochastic=True,
    ),
    Sampler(
        name="DPM++ 3M SDE",
        aliases=("dpmpp_3m_sde_gpu",),
        automatic=Schedule.EXPONENTIAL,
        stochastic=True,
        discards_penultimate=True,
    ),
    Sampler(
        name="DPM++ SDE",
        aliases=("DPMSolverSDEScheduler", "dpmpp_sde_gpu"),
        automatic=Schedule.KARRAS,
        evaluations=2,
        stochastic=True,
    ),
    Sampler(
        name="DPM++ 2S a",
        aliases=("dpmpp_2s_ancestral",),
        automatic=Schedule.KARRAS,
        evaluations=2,
        stochastic=True,
    ),
    Sampler(name="Heun", aliases=("HeunDiscreteScheduler",), evaluations=2),
    Sampler(name="LMS", aliases=("LMSDiscreteScheduler",)),
    Sampler(name="DEIS", aliases=("DEISMultistepScheduler",)),
    Sampler(
        name="DPM2",
        aliases=("KDPM2DiscreteScheduler", "kdpm_2"),
        automatic=Schedule.KARRAS,
        evaluations=2,
        discards_penultimate=True,
    ),
    Sampler(
        name="DPM2 a",
        aliases=("KDPM2AncestralDiscreteScheduler", "dpm_2_ancestral", "kdpm_2_a"),
        automatic=Schedule.KARRAS,
        evaluations=2,
        stochastic=True,
        discards_penultimate=True,
    ),
    Sampler(name="DDIM", aliases=("DDIMScheduler",), schedules=_UNIFORM_ONLY),
    Sampler(name="DDPM", aliases=("DDPMScheduler",), schedules=_UNIFORM_ONLY, stochastic=True),
    Sampler(name="PNDM", aliases=("PNDMScheduler", "PLMS"), schedules=_UNIFORM_ONLY),
    Sampler(name="UniPC", aliases=("UniPCMultistepScheduler",), schedules=_UNIFORM_ONLY),
    Sampler(
        name="LCM",
        aliases=("LCMScheduler",),
        schedules=_UNIFORM_ONLY,
        stochastic=True,
        max_steps=50,  # the teacher's steps in distillation; there is nothing between them
    ),
)


def names() -> list[str]:
    """Every scheduler that is offered, in the order in which to offer them."""
    return [_join(sampler, schedule) for sampler in SAMPLERS for schedule in sampler.schedules]


def resolve(name: str) -> str:
    """Give any spelling of a scheduler its one name here.

    Case, blanks, `_` and `-` do not matter. Known are the names of AUTOMATIC1111 (with the
    schedule as a suffix, or `Automatic`), k-diffusion and ComfyUI (`sample_dpmpp_2m`), InvokeAI
    (`dpmpp_2m_k`) and diffusers' classes, which say nothing of a schedule and so mean Uniform.

    Raises:
        BadRequest: with the nearest names, or the schedules that the sampler can follow.
    """
    return _join(*parse(name))


def parse(name: str) -> tuple[Sampler, Schedule]:
    """Take a name apart.

    Raises:
        BadRequest: as `resolve` does.
    """
    found = _spellings().get(_key(name))
    if found is None:
        shown = name if len(name) <= 60 else f"{name[:57]}..."
        raise BadRequest(unknown(shown, names(), "scheduler"))
    sampler, schedule = found
    if schedule not in sampler.schedules:
        allowed = ", ".join(sampler.schedules)
        raise BadRequest(
            f"scheduler is {name!r}; {sampler.name} has no {schedule} schedule, allowed: {allowed}"
        )
    return sampler, schedule


def problem_with_steps(name: str, steps: int) -> str | None:
    """Say why the scheduler cannot take so many steps, or nothing.

    Raises:
        BadRequest: the name is not known.
    """
    sampler, _ = parse(name)
    if sampler.max_steps is not None and steps > sampler.max_steps:
        return f"steps is {steps}; {sampler.name} allows 1 to {sampler.max_steps}"
    return None


def automatic(sampler: str) -> str:
    """The scheduler that AUTOMATIC1111 means by this sampler with `Schedule type: Automatic`.

    For readers of its records. Before 1.9 records had no schedule type; there the name's suffix
    says all, and `resolve` is right.

    Raises:
        BadRequest: the name is not known.
    """
    found, _ = parse(sampler)
    return _join(found, found.automatic)


def _join(sampler: Sampler, schedule: Schedule) -> str:
    return sampler.name if schedule is Schedule.UNIFORM else f"{sampler.name} {schedule}"


def _key(name: str) -> str:
    """What two spellings of one name have in common."""
    key = re.sub(r"[^a-z0-9]", "", name.casefold().replace("++", "pp"))
    return key.removeprefix("sample")


@cache
def _spellings() -> dict[str, tuple[Sampler, Schedule]]:
    """Every spelling's key, with what it means."""
    return dict(_all_spellings())


def _all_spellings() -> Iterator[tuple[str, tuple[Sampler, Schedule]]]:
    for sampler in SAMPLERS:
        stems = {_key(spelling) for spelling in (sampler.name, *sampler.aliases)}
        stems |= {stem.removesuffix("scheduler") for stem in stems}
        stems |= {f"k{stem}" for stem in stems}
        for stem in sorted(stems):
            yield f"{stem}automatic", (sampler, sampler.automatic)
            for schedule, endings in _ENDINGS.items():
                for ending in endings:
                    yield stem + ending, (sampler, schedule)
