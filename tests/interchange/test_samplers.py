"""What each tool calls a sampler, and what sdamd makes of it."""

import pytest

from sdamd import scheduler
from sdamd.interchange import samplers
from sdamd.interchange.reading import Draft
from sdamd.interchange.samplers import Dialect


@pytest.mark.parametrize(
    ("sampler", "schedule_type", "ours"),
    [
        ("DPM++ 2M", "Karras", "DPM++ 2M Karras"),
        ("DPM++ SDE", "Karras", "DPM++ SDE Karras"),
        ("DPM++ 2M SDE", "Exponential", "DPM++ 2M SDE Exponential"),
        ("DPM++ 2M SDE Heun", "Automatic", "DPM++ 2M SDE Heun Exponential"),
        ("DPM++ 2S a", "Automatic", "DPM++ 2S a Karras"),
        ("DPM++ 3M SDE", "Automatic", "DPM++ 3M SDE Exponential"),
        ("Euler a", "Automatic", "Euler a"),
        ("Euler", "Normal", "Euler"),
        ("LMS", "Polyexponential", "LMS Exponential"),
        ("Heun", "KL Optimal", "Heun KL Optimal"),
        ("DPM2", "Automatic", "DPM2 Karras"),
        ("DPM2 a", "Automatic", "DPM2 a Karras"),
        ("DDIM", "Automatic", "DDIM"),
        ("PLMS", "Automatic", "PNDM"),
        ("UniPC", "Automatic", "UniPC"),
        ("LCM", "Automatic", "LCM"),
        ("DPM fast", "Automatic", None),
        ("DPM adaptive", "Automatic", None),
        ("Restart", "Automatic", None),
        ("DDIM CFG++", "Automatic", None),
        ("Euler", "Align Your Steps", None),
        ("Euler", "DDIM", None),
        ("Euler", "Turbo", None),
    ],
)
def test_the_samplers_of_a1111(sampler: str, schedule_type: str, ours: str | None) -> None:
    """All twenty of 1.10, in the schedule that each has by itself or another."""
    name, known = samplers.of_a1111(sampler, schedule_type)
    assert known is (ours is not None)
    if ours is not None:
        assert scheduler.resolve(name) == ours


COMFYUI = [
    ("euler", "normal", "Euler"),
    ("euler_ancestral", "normal", "Euler a"),
    ("euler_ancestral", "karras", "Euler a Karras"),
    ("heun", "sgm_uniform", "Heun SGM Uniform"),
    ("dpm_2", "karras", "DPM2 Karras"),
    ("dpm_2_ancestral", "normal", "DPM2 a"),
    ("lms", "simple", "LMS Simple"),
    ("dpmpp_2s_ancestral", "karras", "DPM++ 2S a Karras"),
    ("dpmpp_sde_gpu", "karras", "DPM++ SDE Karras"),
    ("dpmpp_2m", "beta", "DPM++ 2M Beta"),
    ("dpmpp_2m_sde", "kl_optimal", "DPM++ 2M SDE KL Optimal"),
    ("dpmpp_2m_sde_heun_gpu", "exponential", "DPM++ 2M SDE Heun Exponential"),
    ("ddim", "normal", "Euler"),
    ("ddim", "karras", "Euler Karras"),
    ("ddim", "ddim_uniform", "DDIM"),
    ("uni_pc", "normal", "UniPC"),
    ("lcm", "sgm_uniform", "LCM"),
    ("euler", "ddim_uniform", None),
    ("euler", "linear_quadratic", None),
    ("euler_cfg_pp", "normal", None),
    ("uni_pc_bh2", "normal", None),
    ("uni_pc", "karras", None),
    ("res_multistep", "normal", None),
    ("ipndm", "normal", None),
    ("heunpp2", "normal", None),
    ("deis", "karras", "DEIS Karras"),
    (None, "normal", None),
    ("euler", 3, None),
]


@pytest.mark.parametrize(
    ("dialect", "sampler", "schedule", "ours"),
    [
        *((samplers.COMFYUI, *row) for row in COMFYUI),
        (samplers.NOVELAI, "k_euler_ancestral", "karras", "Euler a Karras"),
        (samplers.NOVELAI, "k_dpmpp_2s_ancestral", "native", "DPM++ 2S a"),
        (samplers.NOVELAI, "k_dpmpp_2m_sde", "polyexponential", "DPM++ 2M SDE Exponential"),
        (samplers.NOVELAI, "plms", "", "PNDM"),
        (samplers.NOVELAI, "ddim_v3", "karras", None),
        (samplers.SD_CPP, "euler_a", "karras", "Euler a Karras"),
        (samplers.SD_CPP, "dpm++2s_a", "discrete", "DPM++ 2S a"),
        (samplers.SD_CPP, "dpm2", "gits", None),
        (samplers.SD_CPP, "dpm++2mv2", "karras", None),
        (samplers.INVOKEAI, "dpmpp_2m_k", "", "DPM++ 2M Karras"),
        (samplers.INVOKEAI, "kdpm_2_a_k", "", "DPM2 a Karras"),
        (samplers.INVOKEAI, "deis", "", "DEIS"),
        (samplers.INVOKEAI, "unipc", "", "UniPC"),
        (samplers.INVOKEAI, "lcm", "", "LCM"),
        (samplers.INVOKEAI, "dpmpp_2s", "", None),
        (samplers.INVOKEAI, "dpmpp_3m_k", "", None),
        (samplers.INVOKEAI, "tcd", "", None),
        (samplers.INVOKEAI_2, "k_lms", "", "LMS"),
        (samplers.INVOKEAI_2, "k_dpmpp_2", "", None),
        (samplers.SD_NEXT, "DPM++ 2M", "karras", "DPM++ 2M Karras"),
        (samplers.SD_NEXT, "Euler FlowMatch", "default", None),
        (samplers.SD_NEXT, "Default", "", None),
    ],
)
def test_the_samplers_of_other_tools(
    dialect: Dialect, sampler: object, schedule: object, ours: str | None
) -> None:
    """A name that is not known stays, so that the request is refused and no default comes."""
    draft = Draft(tool="x")
    known = samplers.put(draft, dialect, sampler, schedule)
    assert known is (ours is not None)
    if ours is not None:
        assert draft.values["scheduler"] == ours
    else:
        assert draft.unused
        assert draft.values["scheduler"] == " ".join(str(p) for p in (sampler, schedule) if p)


def test_a_sampler_that_is_near_says_how_it_differs() -> None:
    draft = Draft(tool="ComfyUI")
    samplers.put(draft, samplers.COMFYUI, "dpmpp_3m_sde_gpu", "exponential")
    (unused,) = draft.unused
    assert "ComfyUI keeps the last noise level but one" in unused.reason
