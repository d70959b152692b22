"""Schedulers: the samplers that their names promise, the same in a batch as alone."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DEISMultistepScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from scipy import stats

from sdamd.errors import BadCheckpoint, BadRequest
from sdamd.sampling.noise import generators, initial_latents
from sdamd.sampling.schedulers import Scheduler, build
from sdamd.sampling.sigmas import ladder, noise_levels
from sdamd.scheduler import SAMPLERS, Sampler, Schedule, names, parse

SHAPE = (4, 4, 4)
SEEDS = (3, 2**33 + 1, 2**64 - 1)
KARRAS = Schedule.KARRAS

# For each of k-diffusion's samplers: its function, what it is passed besides, and how far the
# final latents may be off (greatest difference / greatest value). Reached on an x86 CPU over all
# schedules and 1, 2, 3 and 20 steps: 5e-6 by most, 8e-6 by Heun and DPM2, and 5e-5 by the two
# ancestral ones of two stages, where k-diffusion takes the difference of two float32 squares.
ORACLES: Mapping[str, tuple[str, dict[str, str], float]] = {
    "Euler": ("sample_euler", {}, 1e-5),
    "Euler a": ("sample_euler_ancestral", {}, 1e-5),
    "Heun": ("sample_heun", {}, 2e-5),
    "LMS": ("sample_lms", {}, 1e-5),
    "DPM2": ("sample_dpm_2", {}, 2e-5),
    "DPM2 a": ("sample_dpm_2_ancestral", {}, 1e-4),
    "DPM++ 2S a": ("sample_dpmpp_2s_ancestral", {}, 1e-4),
    "DPM++ 2M": ("sample_dpmpp_2m", {}, 1e-5),
    "DPM++ SDE": ("sample_dpmpp_sde", {}, 2e-5),
    "DPM++ 2M SDE": ("sample_dpmpp_2m_sde", {"solver_type": "midpoint"}, 1e-5),
    "DPM++ 2M SDE Heun": ("sample_dpmpp_2m_sde", {"solver_type": "heun"}, 1e-5),
    "DPM++ 3M SDE": ("sample_dpmpp_3m_sde", {}, 1e-5),
}


def _unet(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """A smooth stand-in for a UNet, which listens to the timestep."""
    return 0.9 * x + 0.2 * torch.sin(3 * x + timestep.float().reshape(-1, 1, 1, 1) / 200)


def _sample(
    scheduler: Scheduler,
    steps: int,
    seeds: Sequence[int],
    unet: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _unet,
    shape: tuple[int, int, int] = SHAPE,
    **options: float,
) -> torch.Tensor:
    """Run the loop that diffusers' pipelines run."""
    made = generators(seeds)
    scheduler.set_timesteps(steps, device="cpu")
    latents: torch.Tensor = initial_latents(made, shape) * scheduler.init_noise_sigma
    extra: dict[str, Any] = dict(options)
    if "generator" in inspect.signature(scheduler.step).parameters:
        extra["generator"] = made
    for timestep in scheduler.timesteps:
        output = unet(scheduler.scale_model_input(latents, timestep), timestep)
        latents = scheduler.step(output, timestep, latents, **extra, return_dict=False)[0]
    return latents


# ---- against k-diffusion ------------------------------------------------------------------------


class _CompVis:
    """The model as k-diffusion's wrappers want it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        ends = config["beta_start"] ** 0.5, config["beta_end"] ** 0.5
        betas = np.linspace(*ends, config["num_train_timesteps"]) ** 2
        self.alphas_cumprod = torch.tensor(np.cumprod(1 - betas), dtype=torch.float32)

    def apply_model(self, x: torch.Tensor, timestep: torch.Tensor, cond: object) -> torch.Tensor:
        return _unet(x, timestep)


def _oracle_sigmas(
    k_diffusion: SimpleNamespace, model: Any, schedule: Schedule, steps: int
) -> torch.Tensor:
    """A schedule's sigmas by k-diffusion where it has them, and written out where it has not."""
    low, high = model.sigmas[0].item(), model.sigmas[-1].item()
    if schedule is Schedule.UNIFORM:
        return model.get_sigmas(steps)  # type: ignore[no-any-return]
    if schedule is Schedule.KARRAS:
        return k_diffusion.sampling.get_sigmas_karras(steps, low, high)  # type: ignore[no-any-return]
    if schedule is Schedule.EXPONENTIAL:
        return k_diffusion.sampling.get_sigmas_exponential(steps, low, high)  # type: ignore[no-any-return]
    if schedule is Schedule.SGM_UNIFORM:
        first, last = model.sigma_to_t(torch.tensor([high, low])).tolist()
        timesteps = torch.linspace(first, last, steps + 1)[:-1]
        return torch.tensor([*model.t_to_sigma(timesteps).tolist(), 0.0])
    if schedule is Schedule.SIMPLE:
        stride = len(model.sigmas) / steps
        picked = [model.sigmas[-(1 + int(step * stride))].item() for step in range(steps)]
        return torch.tensor([*picked, 0.0])
    if schedule is Schedule.BETA:
        quantiles = [stats.beta.ppf(1 - at, 0.6, 0.6) for at in np.linspace(0, 1, steps)]
        return torch.tensor([*(low + at * (high - low) for at in quantiles), 0.0]).float()
    part = torch.arange(steps + 1) / steps
    angles = torch.tensor([high, low]).arctan()
    return torch.tan(part * angles[1] + (1 - part) * angles[0])


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 150])
def test_sigmas_are_k_diffusion_s(
    k_diffusion: SimpleNamespace, sd_config: dict[str, object], schedule: Schedule, steps: int
) -> None:
    model = k_diffusion.external.CompVisDenoiser(_CompVis(sd_config))
    theirs = _oracle_sigmas(k_diffusion, model, schedule, steps)
    ours = ladder(schedule, noise_levels(sd_config), steps)
    assert ours.dtype == torch.float32
    assert len(ours) == steps + 1
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_timesteps_keep_their_fraction_as_k_diffusion_s_do(
    k_diffusion: SimpleNamespace, sd_config: dict[str, object]
) -> None:
    model = k_diffusion.external.CompVisDenoiser(_CompVis(sd_config))
    levels = noise_levels(sd_config)
    sigmas = ladder(KARRAS, levels, 20)[:-1]
    ours = levels.timestep_at(sigmas)
    torch.testing.assert_close(ours, model.sigma_to_t(sigmas), rtol=0, atol=2e-2)
    torch.testing.assert_close(levels.sigma_at(ours), sigmas, rtol=1e-5, atol=0)
    assert (ours != ours.round()).any()


def _oracle_latents(
    k_diffusion: SimpleNamespace, config: dict[str, object], name: str, steps: int
) -> torch.Tensor:
    """The final latents by k-diffusion's own function, driven as AUTOMATIC1111 drives it."""
    sampler, schedule = parse(name)
    function, options, _ = ORACLES[sampler.name]
    external = k_diffusion.external
    is_v = config.get("prediction_type") == "v_prediction"
    wrapper = external.CompVisVDenoiser if is_v else external.CompVisDenoiser
    model = wrapper(_CompVis(config))
    sigmas = _oracle_sigmas(k_diffusion, model, schedule, steps + sampler.discards_penultimate)
    if sampler.discards_penultimate:
        sigmas = torch.cat([sigmas[:-2], sigmas[-1:]])
    made = generators(SEEDS)
    x = initial_latents(made, SHAPE) * sigmas[0]
    if "SDE" in sampler.name and len(sigmas) == 2 and sigmas[-1] == 0:
        function, options = "sample_euler", {}  # theirs fails at one step; the formula is Euler's
    extra: dict[str, Any] = dict(options)
    if "SDE" in function.upper():
        extra["noise_sampler"] = k_diffusion.sampling.BrownianTreeNoiseSampler(
            x, sigmas[sigmas > 0].min(), sigmas.max(), seed=list(SEEDS)
        )
    elif sampler.stochastic and function != "sample_euler":
        extra["noise_sampler"] = lambda *_: initial_latents(made, SHAPE)
    run = getattr(k_diffusion.sampling, function)
    return run(model, x, sigmas, {"cond": None}, disable=True, **extra)  # type: ignore[no-any-return]


def _assert_k_diffusion_s(
    k_diffusion: SimpleNamespace, config: dict[str, object], name: str, steps: int
) -> None:
    theirs = _oracle_latents(k_diffusion, config, name, steps)
    ours = _sample(build(name, config), steps, SEEDS)
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    assert off <= ORACLES[parse(name)[0].name][2], f"{name}, {steps} steps: off by {off:.1e}"


@pytest.mark.filterwarnings("ignore:Should have:UserWarning")  # the oracle asks beyond the ends
@pytest.mark.parametrize("name", [n for n in names() if parse(n)[0].name in ORACLES])
def test_final_latents_are_k_diffusion_s(
    k_diffusion: SimpleNamespace, sd_config: dict[str, object], name: str
) -> None:
    for steps in (2, 12):
        _assert_k_diffusion_s(k_diffusion, sd_config, name, steps)


@pytest.mark.filterwarnings("ignore:Should have:UserWarning")
@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("sampler", ORACLES)
def test_final_latents_of_v_prediction_are_k_diffusion_s(
    k_diffusion: SimpleNamespace, sd_config: dict[str, object], sampler: str, steps: int
) -> None:
    config = sd_config | {"prediction_type": "v_prediction"}
    _assert_k_diffusion_s(k_diffusion, config, f"{sampler} Karras", steps)


# ---- those that k-diffusion does not have -------------------------------------------------------


def test_ddim_is_its_formula(sd_config: dict[str, object]) -> None:
    """Equation 12 of arXiv:2010.02502 with eta 0, on the authors' timesteps."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    kept = [np.cumprod(1 - betas)[t] for t in (0, *range(1, 1000, 50))]
    x = initial_latents(generators(SEEDS), SHAPE).double()
    for step in range(20, 0, -1):
        now, before = kept[step], kept[step - 1]
        noise = _unet(x, torch.tensor(1 + 50 * (step - 1)))
        picture = (x - (1 - now) ** 0.5 * noise) / now**0.5
        x = before**0.5 * picture + (1 - before) ** 0.5 * noise
    ours = _sample(build("DDIM", sd_config), 20, SEEDS)
    assert float((ours - x).abs().max() / x.abs().max()) < 1e-5


def test_deis_is_diffusers_on_the_same_sigmas(sd_config: dict[str, object]) -> None:
    ours = build("DEIS KL Optimal", sd_config)
    found = _sample(ours, 20, SEEDS)
    theirs = DEISMultistepScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
    )
    strongest, weakest = float(ours.sigmas[0]), float(ours.sigmas[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its numpy calls on tensors
        theirs.set_timesteps(20)
        theirs.sigmas, theirs.timesteps = ours.sigmas, ours.timesteps
        x = initial_latents(generators(SEEDS), SHAPE) * strongest / (1 + strongest**2) ** 0.5
        for timestep in theirs.timesteps:
            x = theirs.step(_unet(x, timestep), timestep, x, return_dict=False)[0]
    x = x * (1 + weakest**2) ** 0.5  # from variance-preserving latents
    assert float((found - x).abs().max() / x.abs().max()) < 1e-5


def test_unipc_has_its_authors_settings_and_times(sd_config: dict[str, object]) -> None:
    scheduler = build("UniPC", sd_config)
    scheduler.set_timesteps(8)
    assert (scheduler.config.solver_order, scheduler.config.solver_type) == (3, "bh1")
    assert scheduler.timesteps.tolist() == pytest.approx([999 * (1 - at / 8) for at in range(8)])
    levels = noise_levels(sd_config)
    assert float(scheduler.sigmas[0]) == pytest.approx(levels.strongest)
    assert float(scheduler.sigmas[-1]) == pytest.approx(levels.weakest)


SPREAD = 0.7


def _normal_unet(config: Mapping[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The perfect UNet for pictures that are normal noise of deviation `SPREAD`."""
    levels = noise_levels(config)

    def unet(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        sigma = float(levels.sigma_at(timestep.float().reshape(1)))
        latents = x * math.sqrt(sigma**2 + 1)
        picture = latents * SPREAD**2 / (SPREAD**2 + sigma**2)
        if config.get("prediction_type") == "v_prediction":
            return (latents / (sigma**2 + 1) - picture) * math.sqrt(sigma**2 + 1) / sigma
        return (latents - picture) / sigma

    return unet


# How far off 40 steps may be, relative to the exact solution; about twice what was reached.
@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("Euler", 0.09),
        ("DDIM", 0.08),
        ("Heun Karras", 0.005),
        ("LMS Karras", 0.001),
        ("DEIS Karras", 0.005),
        ("DPM2 Karras", 0.001),
        ("DPM++ 2M Karras", 0.005),
        ("PNDM", 0.002),
        ("UniPC", 0.02),
    ],
)
def test_a_deterministic_sampler_converges_to_the_exact_solution(
    sd_config: dict[str, object], name: str, allowed: float
) -> None:
    unet = _normal_unet(sd_config)
    strongest = noise_levels(sd_config).strongest
    start = initial_latents(generators(SEEDS), SHAPE)
    exact = start * strongest * SPREAD / math.hypot(SPREAD, strongest)
    off = [
        float((_sample(build(name, sd_config), steps, SEEDS, unet) - exact).norm() / exact.norm())
        for steps in (10, 40)
    ]
    assert off[1] < allowed
    assert off[1] < off[0] / 2


@pytest.mark.parametrize(
    "sampler", [s for s in SAMPLERS if s.stochastic and s.name != "LCM"], ids=lambda s: s.name
)
def test_a_stochastic_sampler_keeps_the_pictures_spread(
    sd_config: dict[str, object], sampler: Sampler
) -> None:
    """Too much or too little fresh noise would show in the deviation of the latents."""
    scheduler = build(f"{sampler.name} {sampler.automatic}", sd_config)
    found = _sample(scheduler, 40, [1], _normal_unet(sd_config), shape=(4, 32, 32))
    assert float(found.std()) == pytest.approx(SPREAD, rel=0.09)


# ---- a picture does not depend on its batch -----------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_latents_of_a_batch_are_those_of_the_single_pictures(
    sd_config: dict[str, object], name: str
) -> None:
    """C07."""
    batch = _sample(build(name, sd_config), 3, SEEDS)
    single = torch.cat([_sample(build(name, sd_config), 3, [seed]) for seed in SEEDS])
    assert batch.isfinite().all()
    assert float((batch - single).abs().max()) < 1e-5
    assert float((batch[0] - batch[1]).abs().max()) > 0.01


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.name)
def test_latents_of_a_v_prediction_batch_are_those_of_the_single_pictures(
    sd_config: dict[str, object], sampler: Sampler, steps: int
) -> None:
    """C07."""
    config = sd_config | {"prediction_type": "v_prediction"}
    name = f"{sampler.name} {sampler.automatic}"
    batch = _sample(build(name, config), steps, SEEDS)
    single = _sample(build(name, config), steps, SEEDS[1:2])
    assert batch.isfinite().all()
    assert float((batch[1] - single[0]).abs().max()) < 1e-5


def test_ddim_with_noise_does_not_depend_on_the_batch(sd_config: dict[str, object]) -> None:
    """C07."""
    batch = _sample(build("DDIM", sd_config), 4, SEEDS, eta=1.0)
    assert torch.equal(batch[1:2], _sample(build("DDIM", sd_config), 4, SEEDS[1:2], eta=1.0))
    assert not torch.allclose(batch, _sample(build("DDIM", sd_config), 4, SEEDS), atol=0.01)


# Those of a Brownian path take it from the seed and leave the generator alone.
@pytest.mark.parametrize(
    "sampler", [s for s in SAMPLERS if "SDE" not in s.name], ids=lambda s: s.name
)
def test_only_a_stochastic_sampler_moves_the_generators_on(
    sd_config: dict[str, object], sampler: Sampler
) -> None:
    scheduler = build(sampler.name, sd_config)
    scheduler.set_timesteps(3)
    (generator,) = generators([1])
    x = initial_latents([generator], SHAPE)[:, :, :2]
    before = generator.get_state()
    takes = "generator" in inspect.signature(scheduler.step).parameters
    for timestep in scheduler.timesteps:
        scheduler.scale_model_input(x, timestep)
        scheduler.step(x, timestep, x, **({"generator": generator} if takes else {}))
    assert torch.equal(before, generator.get_state()) != sampler.stochastic


@pytest.mark.parametrize("name", ["Euler a", "DPM++ SDE", "DPM++ 2M SDE", "DPM2 a"])
@pytest.mark.parametrize("given", [None, 1])
def test_a_stochastic_sampler_refuses_to_share_a_generator(
    sd_config: dict[str, object], name: str, given: int | None
) -> None:
    """C07: diffusers would draw one noise for the whole batch."""
    scheduler = build(name, sd_config)
    scheduler.set_timesteps(3)
    x = torch.ones((2, *SHAPE))
    with pytest.raises(ValueError, match="generators for 2 pictures"):  # noqa: PT012
        for timestep in scheduler.timesteps:
            scheduler.scale_model_input(x, timestep)
            generator = generators([given])[0] if given else None
            scheduler.step(x, timestep, x, generator=generator)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_float32_latents_and_no_more(
    sd_config: dict[str, object], sampler: Sampler, dtype: torch.dtype
) -> None:
    """C10: the noise is that of float32 too."""
    found = []
    for wanted in (dtype, torch.float32):
        scheduler = build(sampler.name, sd_config)
        scheduler.set_timesteps(4)
        made = generators(SEEDS)
        x = initial_latents(made, SHAPE).to(dtype).to(wanted)
        timestep = scheduler.timesteps[0]
        takes = "generator" in inspect.signature(scheduler.step).parameters
        scheduler.scale_model_input(x, timestep)
        extra = {"generator": made} if takes else {}
        found.append(scheduler.step(x, timestep, x, **extra, return_dict=False)[0])
    assert found[0].dtype == dtype
    assert torch.equal(found[0], found[1].to(dtype))


# ---- what a checkpoint's config says ------------------------------------------------------------


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s.name != "PNDM"], ids=lambda s: s.name)
def test_zero_terminal_snr_is_sampled_from_pure_noise(
    sd_config: dict[str, object], sampler: Sampler
) -> None:
    config = sd_config | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    scheduler = build(f"{sampler.name} {sampler.automatic}", config)
    found = _sample(scheduler, 20, [1], _normal_unet(config), shape=(4, 16, 16))
    assert float(scheduler.timesteps[0]) == 999
    assert 0.4 < float(found.std()) < 1.0  # SPREAD is 0.7, and 20 steps are few for some


def test_the_beta_schedule_is_refused_for_zero_terminal_snr(sd_config: dict[str, object]) -> None:
    config = sd_config | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    with pytest.raises(BadRequest, match=r"'Euler Beta'.*allowed is any other schedule"):
        build("Euler Beta", config)


def test_zero_terminal_snr_has_the_sigmas_of_the_paper(sd_config: dict[str, object]) -> None:
    """The strongest level is that of AUTOMATIC1111 and ComfyUI, the weakest is untouched."""
    levels = noise_levels(sd_config | {"rescale_betas_zero_snr": True})
    assert levels.strongest == pytest.approx(4518.7, abs=1)
    assert levels.weakest == pytest.approx(noise_levels(sd_config).weakest, rel=1e-4)


def test_pndm_is_refused_for_zero_terminal_snr(sd_config: dict[str, object]) -> None:
    config = sd_config | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    with pytest.raises(BadRequest, match=r"'PNDM'.*zero terminal SNR.*allowed is any but PNDM"):
        build("PNDM", config)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr with prediction_type 'epsilon'"),
        ({"prediction_type": "flow_prediction"}, "prediction_type .* 'flow_prediction'; allowed"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule .* 'sigmoid'; allowed linear"),
        ({"beta_start": -1}, "beta_start .* -1; allowed a number over 0"),
        ({"beta_end": "0.012"}, "beta_end .* '0.012'; allowed a number over 0"),
        ({"num_train_timesteps": 0}, "num_train_timesteps .* 0; allowed a number over 0"),
        ({"beta_end": float("nan")}, "beta_end .* nan; allowed a number over 0"),
        ({"beta_end": 1e6}, "betas .* 0.00085 to 1e.06; allowed is between 0 and 1"),
        ({"trained_betas": [0.0, 0.1]}, "betas .* 0 to 0.1; allowed is between 0 and 1"),
    ],
)
def test_a_config_that_cannot_be_sampled_is_refused(
    sd_config: dict[str, object], wrong: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadCheckpoint, match=sentence):
        build("Euler", sd_config | wrong)


@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_noise_levels_are_diffusers_for_every_beta_schedule(beta_schedule: str) -> None:
    config = {"beta_schedule": beta_schedule, "beta_start": 0.001, "beta_end": 0.02}
    theirs = DEISMultistepScheduler(**config).alphas_cumprod
    ours = 1 / (1 + noise_levels(config).sigmas.double() ** 2)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-3, atol=1e-6)


def test_trained_betas_come_before_the_beta_schedule(sd_config: dict[str, object]) -> None:
    levels = noise_levels(sd_config | {"trained_betas": [0.5, 0.5]})
    assert levels.sigmas.tolist() == pytest.approx([1.0, 3**0.5])


def test_more_steps_than_lcm_was_distilled_to_are_refused(sd_config: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="steps is 51; LCM allows 1 to 50"):
        build("LCM", sd_config).set_timesteps(51)


def test_an_unknown_name_is_refused_with_the_nearest(sd_config: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"the nearest: .*Euler"):
        build("Eular", sd_config)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.name)
def test_a_scheduler_runs_again_as_the_first_time(
    sd_config: dict[str, object], sampler: Sampler
) -> None:
    scheduler = build(sampler.name, sd_config)
    first = _sample(scheduler, 4, SEEDS)
    assert torch.equal(first, _sample(scheduler, 4, SEEDS))


# ---- unchanged pipelines ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def components() -> dict[str, Any]:
    """The parts of a Stable Diffusion of about a million random weights, without text encoder."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=[16, 16, 16, 16],
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=1,
        norm_num_groups=8,
    )
    rest = ("text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    return {"unet": unet.eval(), "vae": vae.eval()} | dict.fromkeys(rest)


@pytest.fixture(scope="module")
def embeds() -> torch.Tensor:
    return torch.randn((2, 1, 77, 32), generator=generators([0])[0])


def _pixels(pipe: Any, embeds: torch.Tensor, seeds: Sequence[int], **options: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        prompt_embeds=embeds[0].expand(len(seeds), -1, -1),
        negative_prompt_embeds=embeds[1].expand(len(seeds), -1, -1),
        generator=generators(seeds),
        num_inference_steps=3,
        guidance_scale=4.0,
        output_type="pt",
        **options,
    ).images
    return torch.as_tensor(images)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.name)
def test_an_unchanged_pipeline_makes_the_same_picture_in_a_batch_and_alone(
    components: dict[str, Any],
    embeds: torch.Tensor,
    sd_config: dict[str, object],
    sampler: Sampler,
) -> None:
    """C07: within 1/255 in every channel."""
    scheduler = build(f"{sampler.name} {sampler.automatic}", sd_config)
    pipe = StableDiffusionPipeline(**components, scheduler=scheduler, requires_safety_checker=False)
    seeds = SEEDS[:2]
    options = {"latents": initial_latents(generators(seeds), (4, 8, 8))}
    batch = _pixels(pipe, embeds, seeds, **options)
    single = _pixels(pipe, embeds, seeds[1:], latents=options["latents"][1:])
    assert batch.shape == (2, 3, 64, 64)
    assert float((batch[1] - single[0]).abs().max()) < 1 / 255
    assert float((batch[0] - batch[1]).abs().max()) > 1 / 255
    assert float(batch.std()) > 1 / 255


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.name)
def test_an_unchanged_image_to_image_pipeline_starts_in_the_middle(
    components: dict[str, Any],
    embeds: torch.Tensor,
    sd_config: dict[str, object],
    sampler: Sampler,
) -> None:
    """C07: within 1/255 in every channel."""
    scheduler = build(sampler.name, sd_config)
    pipe = StableDiffusionImg2ImgPipeline(
        **components, scheduler=scheduler, requires_safety_checker=False
    )
    start = torch.linspace(0, 1, 64).expand(1, 3, 64, 64)
    batch = _pixels(pipe, embeds, SEEDS[:2], image=start, strength=0.7)
    single = _pixels(pipe, embeds, SEEDS[1:2], image=start, strength=0.7)
    assert batch.isfinite().all()
    assert float((batch[1] - single[0]).abs().max()) < 1 / 255
