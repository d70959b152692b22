"""Builds the scheduler that a name stands for, for a checkpoint's own training schedule.

Every scheduler built here can be put into an unchanged diffusers pipeline. The stochastic ones
want the pipeline's `generator` to be a list with one CPU generator per picture.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeAlias

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    LCMScheduler,
    PNDMScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)
from diffusers.schedulers.scheduling_utils import SchedulerOutput

from sdamd.errors import BadCheckpoint, BadRequest
from sdamd.sampling.noise import per_picture
from sdamd.sampling.sigmas import noise_levels
from sdamd.sampling.solvers import SOLVERS, KDiffusionScheduler
from sdamd.scheduler import Schedule, parse, problem_with_steps

Scheduler: TypeAlias = SchedulerMixin

_PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
_TRAINING = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
)


def build(name: str, config: Mapping[str, object], *, skip: int = 0) -> Scheduler:
    """Make the scheduler of that name for a checkpoint.

    Args:
        name: any spelling that `scheduler.resolve` knows.
        skip: how many steps of each run are left out at its start, where the latents are a
            picture with the noise of the first one that is left (`noised`).
        config: the checkpoint's own scheduler config, as diffusers writes it. Only what says how
            the model was trained is read: betas, prediction type, zero terminal SNR.

    Raises:
        BadRequest: the name is not known, or does not go with this checkpoint.
        BadCheckpoint: the config is of no kind that can be sampled.
    """
    scheduler = _build(name, config)
    scheduler.skip = skip
    return scheduler


def first_step(steps: int, strength: float) -> int:
    """How many of `steps` are left out for a strength, as diffusers' pipelines reckon."""
    return max(steps - min(int(steps * strength), steps), 0)


def noised(
    scheduler: Scheduler, latents: torch.Tensor, noise: torch.Tensor, call: int
) -> torch.Tensor:
    """Latents with the noise that a call of the model expects; after the last one, without.

    Args:
        scheduler: of `build`, after `set_timesteps`.
        latents: of a picture, (pictures, channels, height, width), float32.
        noise: as `latents`, of deviation 1.
        call: counts from 0 within the run.
    """
    if call >= len(scheduler.timesteps):
        return latents
    if isinstance(scheduler, KDiffusionScheduler):
        return scheduler.noised(latents, noise, call)
    timesteps = scheduler.timesteps[call : call + 1].cpu()
    made: torch.Tensor = scheduler.add_noise(latents, noise, timesteps)
    return made


def _build(name: str, config: Mapping[str, object]) -> Scheduler:
    sampler, schedule = parse(name)
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in _PREDICTION_TYPES:
        raise BadCheckpoint(
            f"prediction_type of the scheduler config is {prediction!r}; "
            f"allowed {', '.join(_PREDICTION_TYPES)}"
        )
    zero_snr = bool(config.get("rescale_betas_zero_snr"))
    if zero_snr and prediction == "epsilon":
        raise BadCheckpoint(
            "the scheduler config has rescale_betas_zero_snr with prediction_type 'epsilon', and "
            "from pure noise the noise says nothing of the picture; allowed is 'v_prediction'"
        )
    noise_levels(config)  # refuses unusable betas before diffusers meets them
    training: dict[str, Any] = {
        key: config[key] for key in _TRAINING if config.get(key) is not None
    }
    if zero_snr and schedule is Schedule.BETA:
        raise BadRequest(
            f"scheduler is {name!r}, and the Beta schedule spreads its steps over this "
            "checkpoint's pure noise (zero terminal SNR), so that next to none are left for the "
            "picture; allowed is any other schedule"
        )
    if sampler.name in SOLVERS:
        return SOLVERS[sampler.name](**training, rescale_betas_zero_snr=zero_snr, schedule=schedule)
    kind, options = _OURS[sampler.name]
    if not zero_snr:
        return kind(**training, **options, steps_offset=1)
    if sampler.name in _WITHOUT_ZERO_SNR:
        raise BadRequest(
            f"scheduler is {sampler.name!r}, which cannot start from the pure noise that this "
            "checkpoint was trained on (zero terminal SNR); allowed is any but "
            f"{', '.join(sorted(_WITHOUT_ZERO_SNR))}"
        )
    # The leading timesteps never touch the last one, and only there is the signal zero.
    trailing = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    return kind(**{**training, **options, **trailing}, steps_offset=1)


def _in_float32(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let a diffusers scheduler's step compute in float32 whatever the model's dtype.

    Its noise is then drawn in float32 too; in half precision torch draws another sequence.
    """

    @wraps(step)  # pipelines look for `eta` and `generator` in the signature
    def stepped(
        self: Scheduler,
        model_output: torch.Tensor,
        timestep: torch.Tensor,
        sample: torch.Tensor,
        *,
        return_dict: bool = True,
        **options: Any,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        if options.get("generator") is not None:
            options["generator"] = per_picture(options["generator"], len(sample))
        after, *rest = step(
            self, model_output.float(), timestep, sample.float(), return_dict=False, **options
        )
        after = after.to(model_output.dtype)
        return SchedulerOutput(prev_sample=after) if return_dict else (after, *rest)

    return stepped


class _Skipping:
    """Leaves out the first `skip` timesteps of every run."""

    skip = 0
    timesteps: torch.Tensor

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None
    ) -> None:
        """As in diffusers, without the timesteps that are left out."""
        super().set_timesteps(num_inference_steps, device)  # type: ignore[misc]  # diffusers'
        self.timesteps = self.timesteps[self.skip :]


class Ddim(_Skipping, DDIMScheduler):  # type: ignore[misc]  # diffusers has no types
    """DDIM as its authors wrote it, with a call of the model for every step.

    AUTOMATIC1111 leaves out the last one, which changes the latents by about 0.25 %.
    """

    step = _in_float32(DDIMScheduler.step)


class Ddpm(_Skipping, DDPMScheduler):  # type: ignore[misc]  # diffusers has no types
    """The ancestral sampling of Ho et al. 2020, arXiv:2006.11239, on fewer timesteps."""

    step = _in_float32(DDPMScheduler.step)


class Pndm(PNDMScheduler):  # type: ignore[misc]  # diffusers has no types
    """Pseudo linear multistep (PLMS); calls the model once more than it has steps."""

    skip = 0
    step = _in_float32(PNDMScheduler.step)

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None
    ) -> None:
        """As in diffusers, but that the doubled call is the second one wherever a run starts.

        diffusers' pipelines cut the list, so that the call that the solver takes twice is gone and
        all after it are a step off.
        """
        super().set_timesteps(num_inference_steps, device)
        every: torch.Tensor = self.timesteps
        once = torch.cat([every[:1], every[2:]])[self.skip :]
        self.timesteps: torch.Tensor = torch.cat([once[:2], once[1:]])


class UniPc(UniPCMultistepScheduler):  # type: ignore[misc]  # diffusers has no types
    """UniPC in its authors' and AUTOMATIC1111's settings: third order, `bh1`, `time_uniform`.

    Source: Zhao et al. 2023, arXiv:2302.04867.
    """

    skip = 0
    step = _in_float32(UniPCMultistepScheduler.step)

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None
    ) -> None:
        """Lay out the run in evenly spaced times, down to the weakest trained noise level.

        diffusers would round them. `timesteps` is (steps,), float32, on `device`; `sigmas`
        (steps + 1,), float32, on the CPU; both without the steps that are left out.
        """
        levels = noise_levels(self.config)
        timesteps = torch.linspace(len(levels.sigmas) - 1, 0, num_inference_steps + 1)
        timesteps = timesteps[self.skip :]
        self.sigmas = levels.sigma_at(timesteps)
        self.timesteps = timesteps[:-1].to(device)
        self.num_inference_steps = num_inference_steps
        # The rest is what the parent's set_timesteps forgets of the run before.
        self.model_outputs = [None] * self.config.solver_order
        self.lower_order_nums = 0
        self.last_sample = None
        self._step_index = None
        self._begin_index = None


class Lcm(LCMScheduler):  # type: ignore[misc]  # diffusers has no types
    """Latent consistency. Source: Luo et al. 2023, arXiv:2310.04378."""

    skip = 0
    step = _in_float32(LCMScheduler.step)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        original_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        strength: float = 1.0,
    ) -> None:
        """As in diffusers, which see.

        Raises:
            BadRequest: more steps than the model was distilled to.
        """
        if num_inference_steps and (problem := problem_with_steps("LCM", num_inference_steps)):
            raise BadRequest(problem)
        super().set_timesteps(
            num_inference_steps, device, original_inference_steps, timesteps, strength
        )
        if self.skip:
            left: torch.Tensor = self.timesteps[self.skip :]
            self.timesteps: torch.Tensor = left
            self.num_inference_steps = len(self.timesteps)  # it adds no noise after the last one


_WITHOUT_ZERO_SNR = frozenset({"PNDM"})  # diffusers has no rescaling in it

# DDIM: the timesteps of its authors, of AUTOMATIC1111 and of diffusers' own SD checkpoints.
# DDPM: down from the last timestep; starting below it leaves noise in a picture of few steps.
_OURS: Mapping[str, tuple[type[Scheduler], Mapping[str, object]]] = {
    "DDIM": (
        Ddim,
        {"timestep_spacing": "leading", "clip_sample": False, "set_alpha_to_one": False},
    ),
    "DDPM": (Ddpm, {"timestep_spacing": "trailing", "clip_sample": False}),
    "PNDM": (Pndm, {"skip_prk_steps": True, "set_alpha_to_one": False}),
    "UniPC": (UniPc, {"solver_order": 3, "solver_type": "bh1"}),
    "LCM": (Lcm, {}),
}
