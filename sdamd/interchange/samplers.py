"""How other tools call samplers and noise schedules, and what sdamd calls the same.

A name is mapped only where the tool means the same mathematics; where it differs in a way that
was measured or is written in the tool's code, the difference is told with it. A name that has no
counterpart stays what it is, and the request is refused until somebody names another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sdamd import scheduler
from sdamd.errors import BadRequest
from sdamd.interchange.reading import Draft
from sdamd.scheduler import Schedule

UNKNOWN: Final = "sdamd has no such sampler or schedule; name another one (--scheduler)"

SPACED_BY_DIFFUSERS: Final = (
    "{tool} spaces the steps as diffusers does, sdamd as k-diffusion; the picture comes near"
)
"""Source: measured on a toy model, 20 steps; up to 17 % of the latents' range for Euler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The names of one tool.

    `samplers` and `schedules` give another spelling for a name, or None for one that would be
    taken for something that it is not. `apart` says how a sampler differs from sdamd's.
    """

    samplers: Mapping[str, str | None] = field(default_factory=dict)
    schedules: Mapping[str, str | None] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)


_KEEPS_PENULTIMATE = "ComfyUI keeps the last noise level but one, sdamd leaves it out"

# Sources: ComfyUI comfy/samplers.py: `ddim` is Euler there; `uni_pc_bh2` is another variant;
# the list of samplers that leave out the last level but one has no 3M SDE.
COMFYUI: Final = Dialect(
    samplers={"ddim": "Euler", "sample_ddim": "Euler", "uni_pc_bh2": None,
                               "ddpm": None},
    schedules={"normal": "", "ddim_uniform": None, "linear_quadratic": None},
    apart={
        "lcm": "sdamd's LCM has the steps of its authors",
        "dpmpp_3m_sde": _KEEPS_PENULTIMATE,
        "dpmpp_3m_sde_gpu": _KEEPS_PENULTIMATE,
    },
)  # fmt: skip

NOVELAI: Final = Dialect(
    samplers={"ddim_v3": None},
    schedules={"native": "", "": ""},
)

# Source: stable-diffusion.cpp, sample_method_to_str and scheduler_to_str.
SD_CPP: Final = Dialect(
    samplers={"dpm++2mv2": None, "ddim_trailing": None, "dpm++2m_sde_bt": None},
    schedules={"discrete": "", "default": ""},
)

# Source: InvokeAI's scheduler map: `dpmpp_2s` is a singlestep solver without noise and
# `dpmpp_3m` one of third order without noise, neither of which k-diffusion has.
INVOKEAI: Final = Dialect(
    samplers=dict(dict.fromkeys(("dpmpp_2s", "dpmpp_2s_k", "dpmpp_3m", "dpmpp_3m_k", "tcd")))
)

# Source: InvokeAI 2: its command line's `-A`.
INVOKEAI_2: Final = Dialect(samplers={"k_dpmpp_2": None, "k_dpmpp_2_a": None})

SD_NEXT: Final = Dialect(
    samplers={"default": None},
    schedules={"default": "", "linear": None, "flowmatch": None},
)


def put(draft: Draft, dialect: Dialect, sampler: object, schedule: object = "") -> bool:
    """Set the scheduler that a tool's sampler and schedule mean; False if nothing here does."""
    said = " ".join(str(part) for part in (sampler, schedule) if part)
    name = _mapped(dialect, sampler, schedule)
    if name is None:
        draft.values["scheduler"] = said
        draft.miss("sampler", said, UNKNOWN)
        return False
    draft.values["scheduler"] = name
    if apart := dialect.apart.get(str(sampler)):
        draft.miss("sampler", said, f"read as {name}, which is near: {apart}")
    return True


def _mapped(dialect: Dialect, sampler: object, schedule: object) -> str | None:
    if not isinstance(sampler, str) or not isinstance(schedule, str):
        return None
    if sampler.casefold() in {"ddim", "sample_ddim"} and schedule == "ddim_uniform":
        return scheduler.resolve("DDIM")  # Euler over the timesteps of DDIM is DDIM
    if sampler.casefold() == "lcm":
        return "LCM"
    stem = dialect.samplers.get(sampler.casefold(), sampler)
    ending = dialect.schedules.get(schedule.casefold(), schedule)
    if stem is None or ending is None:
        return None
    try:
        return scheduler.resolve(f"{stem} {ending}".strip())
    except BadRequest:
        return None


def of_a1111(sampler: str, schedule_type: str) -> tuple[str, bool]:
    """The scheduler's name for A1111's sampler and schedule type, and whether it is known.

    Before A1111 1.9 there was no type and a schedule stood at the end of the sampler's name,
    where it still counts.
    """
    name = sampler if schedule_type == "Automatic" else f"{sampler} {schedule_type}".rstrip()
    try:
        if scheduler.parse(sampler)[1] is not Schedule.UNIFORM:
            return scheduler.resolve(sampler), True
        if schedule_type == "Automatic":
            return scheduler.automatic(sampler), True
        return scheduler.resolve(name), True
    except BadRequest:
        return name, False
