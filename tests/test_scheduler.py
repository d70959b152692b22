"""The names of schedulers."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd import scheduler
from sdamd.errors import BadRequest
from sdamd.scheduler import SAMPLERS, Schedule


@pytest.mark.parametrize("name", scheduler.names())
def test_an_offered_name_resolves_to_itself(name: str) -> None:
    assert scheduler.resolve(name) == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        # AUTOMATIC1111
        ("euler a", "Euler a"),
        ("Euler A Karras", "Euler a Karras"),
        ("DPM++ 2M Karras", "DPM++ 2M Karras"),
        ("dpm++ 2m sde exponential", "DPM++ 2M SDE Exponential"),
        ("DPM++ 2M SDE Heun Karras", "DPM++ 2M SDE Heun Karras"),
        ("DPM++ 3M SDE Polyexponential", "DPM++ 3M SDE Exponential"),
        ("DPM++ 2S a Karras", "DPM++ 2S a Karras"),
        ("DPM2 a Karras", "DPM2 a Karras"),
        ("Heun Normal", "Heun"),
        ("Euler Uniform", "Euler"),
        ("Euler SGM Uniform", "Euler SGM Uniform"),
        ("Euler SGMUniform", "Euler SGM Uniform"),
        ("DPM++ 2M Automatic", "DPM++ 2M Karras"),
        ("Euler Automatic", "Euler"),
        ("PLMS", "PNDM"),
        ("k_euler_a", "Euler a"),
        ("k_dpm_2_ka", "DPM2 Karras"),
        ("k_dpm_2_a_ka", "DPM2 a Karras"),
        ("k_dpmpp_2s_a_ka", "DPM++ 2S a Karras"),
        ("k_lms_ka", "LMS Karras"),
        # k-diffusion and ComfyUI
        ("sample_dpmpp_2m", "DPM++ 2M"),
        ("sample_euler_ancestral", "Euler a"),
        ("dpmpp_2m_karras", "DPM++ 2M Karras"),
        ("dpmpp_3m_sde_gpu exponential", "DPM++ 3M SDE Exponential"),
        ("dpmpp_2s_ancestral", "DPM++ 2S a"),
        ("dpm_2_ancestral", "DPM2 a"),
        ("uni_pc", "UniPC"),
        ("euler sgm_uniform", "Euler SGM Uniform"),
        ("euler kl_optimal", "Euler KL Optimal"),
        # InvokeAI
        ("euler_k", "Euler Karras"),
        ("kdpm_2_a_k", "DPM2 a Karras"),
        ("dpmpp_2m_sde_k", "DPM++ 2M SDE Karras"),
        ("deis_k", "DEIS Karras"),
        # diffusers
        ("EulerAncestralDiscreteScheduler", "Euler a"),
        ("EulerDiscreteScheduler", "Euler"),
        ("EulerDiscrete", "Euler"),
        ("DPMSolverMultistepScheduler", "DPM++ 2M"),
        ("DPMSolverSDEScheduler", "DPM++ SDE"),
        ("KDPM2AncestralDiscreteScheduler", "DPM2 a"),
        ("UniPCMultistepScheduler", "UniPC"),
        ("PNDMScheduler", "PNDM"),
        ("LCMScheduler", "LCM"),
        ("  Euler  ", "Euler"),
    ],
)
def test_the_field_s_spellings_resolve(spelling: str, name: str) -> None:
    assert scheduler.resolve(spelling) == name


def test_no_spelling_means_two_things() -> None:
    meanings: dict[str, set[tuple[str, Schedule]]] = {}
    for key, (sampler, schedule) in scheduler._all_spellings():
        meanings.setdefault(key, set()).add((sampler.name, schedule))
    assert {key: found for key, found in meanings.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("Eular", "Euler"),
        ("DPM++ 2M Karas", "DPM++ 2M Karras"),
        ("DPMSolverSinglestepScheduler", "known:"),
        ("", "known:"),
        ("Euler b", "Euler a"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, offered: str) -> None:
    with pytest.raises(BadRequest, match="is not known") as refused:
        scheduler.resolve(name)
    assert offered in str(refused.value)


def test_a_schedule_that_the_sampler_cannot_follow_is_refused_with_those_it_can() -> None:
    with pytest.raises(BadRequest) as refused:
        scheduler.resolve("DDIM Karras")
    assert str(refused.value) == (
        "scheduler is 'DDIM Karras'; DDIM has no Karras schedule, allowed: Uniform"
    )


def test_a_very_long_name_is_refused_in_a_short_message() -> None:
    with pytest.raises(BadRequest) as refused:
        scheduler.resolve("x" * 100_000)
    assert len(str(refused.value)) < 3000


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        ("Euler a", "Euler a"),
        ("LMS", "LMS"),
        ("DPM++ 2M", "DPM++ 2M Karras"),
        ("DPM++ SDE", "DPM++ SDE Karras"),
        ("DPM++ 2S a", "DPM++ 2S a Karras"),
        ("DPM2", "DPM2 Karras"),
        ("DPM2 a", "DPM2 a Karras"),
        ("DPM++ 2M SDE", "DPM++ 2M SDE Exponential"),
        ("DPM++ 2M SDE Heun", "DPM++ 2M SDE Heun Exponential"),
        ("DPM++ 3M SDE", "DPM++ 3M SDE Exponential"),
        ("UniPC", "UniPC"),
    ],
)
def test_automatic_is_the_schedule_that_a1111_takes(sampler: str, name: str) -> None:
    assert scheduler.automatic(sampler) == name


def test_too_many_steps_for_lcm_are_said() -> None:
    assert scheduler.problem_with_steps("LCM", 51) == "steps is 51; LCM allows 1 to 50"
    assert scheduler.problem_with_steps("LCM", 50) is None
    assert scheduler.problem_with_steps("Euler", 150) is None


def test_automatic_schedules_are_offered() -> None:
    assert all(sampler.automatic in sampler.schedules for sampler in SAMPLERS)


@given(st.text())
def test_any_text_is_a_name_or_a_bad_request(text: str) -> None:
    try:
        name = scheduler.resolve(text)
    except BadRequest:
        return
    assert name in scheduler.names()


@given(st.sampled_from(scheduler.names()), st.randoms())
def test_case_and_separators_do_not_matter(name: str, random: object) -> None:
    mangled = "".join(
        random.choice((letter.upper(), letter.lower()))  # type: ignore[attr-defined]
        if letter != " "
        else random.choice(("_", "-", "  ", ""))  # type: ignore[attr-defined]
        for letter in name
    )
    assert scheduler.resolve(mangled) == name


def test_names_need_no_torch() -> None:
    probe = "import sys, sdamd.scheduler as s; s.resolve('Euler'); print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "False"
