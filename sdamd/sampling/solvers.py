"""k-diffusion's samplers as schedulers that unchanged diffusers pipelines can drive.

diffusers has classes of most of these names, but with its own choice of sigmas, whole timesteps
and other last steps, and so with other pictures than the names promise: up to 17 % off for Euler,
64 % for Euler a, 16 % for DPM++ 2M. Here the sigmas come from `sigmas.ladder`, timesteps keep
their fraction, and a step is computed in float32 with coefficients in Python's double precision.

In all of these the latents are the picture plus sigma times noise, as in EulerDiscreteScheduler,
whose dealings with pipelines (model input, noise for image-to-image, counting) are inherited.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from diffusers import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from numpy.polynomial.polynomial import polyfromroots, polyint, polyval

from sdamd.sampling.noise import BrownianNoise, draw, per_picture
from sdamd.sampling.sigmas import ladder, noise_levels
from sdamd.scheduler import Schedule

Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the model within a run, and what it gave.

    `step` counts from 0 in the whole schedule; `stage` is 1 in the second call of a step.
    `sigma` and `sigma_next` are the step's ends. `latents` went in, and `denoised` is the picture
    that the model sees in them; both (pictures, channels, height, width), float32.
    """

    step: int
    stage: int
    sigma: float
    sigma_next: float
    latents: torch.Tensor
    denoised: torch.Tensor
    generator: Generators

    @property
    def width(self) -> float:
        """The step's width in log(sigma)."""
        return math.log(self.sigma / self.sigma_next)


class KDiffusionScheduler(EulerDiscreteScheduler):  # type: ignore[misc]  # diffusers has no types
    """What these samplers share; a subclass gives the arithmetic of a step in `_advance`."""

    order: ClassVar[int] = 1
    discards_penultimate: ClassVar[bool] = False

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: str = "scaled_linear",
        trained_betas: list[float] | None = None,
        prediction_type: str = "epsilon",
        rescale_betas_zero_snr: bool = False,  # noqa: FBT001, FBT002  # diffusers passes by name
        schedule: str = Schedule.UNIFORM,
    ) -> None:
        super().__init__(
            num_train_timesteps=num_train_timesteps,
            beta_start=beta_start,
            beta_end=beta_end,
            beta_schedule=beta_schedule,
            trained_betas=trained_betas,
            prediction_type=prediction_type,
            rescale_betas_zero_snr=rescale_betas_zero_snr,
            timestep_spacing="linspace",
            steps_offset=1,  # pipelines warn of any other, though nothing here reads it
        )
        self.register_to_config(schedule=str(schedule))
        self.levels = noise_levels(self.config)
        self.skip = 0
        self._start_over([], [])

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None
    ) -> None:
        """Lay out the run: one sigma and timestep for every call of the model.

        `timesteps` is (calls,), float32, on `device`, without those of the first `skip` steps;
        `sigmas` (all calls + 1,), float32, on the CPU.
        """
        steps = ladder(
            Schedule(self.config.schedule),
            self.levels,
            num_inference_steps,
            discards_penultimate=self.discards_penultimate,
        )
        calls = list(self._calls(steps.tolist()))
        sigmas = torch.tensor([sigma for _, _, sigma in calls], dtype=torch.float32)
        first = next(index for index, (step, _, _) in enumerate(calls) if step >= self.skip)
        self.timesteps = self.levels.timestep_at(sigmas)[first:].to(device)
        self.sigmas = torch.cat([sigmas, steps[-1:]])
        self.num_inference_steps = num_inference_steps
        self._step_index: int | None = None
        self._begin_index = first or None
        self._start_over(steps.tolist(), [(step, stage) for step, stage, _ in calls])

    @property
    def init_noise_sigma(self) -> float | torch.Tensor:
        """What a pipeline multiplies its latents by; those of a later start have their noise."""
        return 1.0 if self.skip else super().init_noise_sigma

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, call: int) -> torch.Tensor:
        """Latents with the noise that the call of this number in the run expects."""
        sigma = float(self.sigmas[(self._begin_index or 0) + call])
        return latents + sigma * noise

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float | torch.Tensor,
        sample: torch.Tensor,
        generator: Generators = None,
        return_dict: bool = True,  # noqa: FBT001, FBT002  # diffusers' signature
    ) -> SchedulerOutput | tuple[torch.Tensor, torch.Tensor]:
        """Take what the model says of `sample` and go on to the next latents.

        Args:
            model_output: (pictures, channels, height, width), as `prediction_type` says.
            timestep: the one of `timesteps` that the model was told.
            sample: the latents before `scale_model_input`.
            generator: one per picture, on the CPU; needed by the stochastic samplers alone.
            return_dict: give a `SchedulerOutput` and not (next latents, predicted picture).
        """
        if self._step_index is None:
            self._init_step_index(timestep)
        index = int(self.step_index)
        step, stage = self._stages[index]
        latents = sample.float()
        at = Call(
            step=step,
            stage=stage,
            sigma=self._ladder[step],
            sigma_next=self._ladder[step + 1],
            latents=latents,
            denoised=self._denoised(model_output.float(), latents, float(self.sigmas[index])),
            generator=generator,
        )
        after = self._advance(at).to(model_output.dtype)
        self._step_index = index + 1
        return SchedulerOutput(prev_sample=after) if return_dict else (after, at.denoised)

    def _calls(self, steps: Sequence[float]) -> Iterator[tuple[int, int, float]]:
        """Every call of the model as (step, stage, sigma)."""
        for step, (sigma, sigma_next) in enumerate(pairwise(steps)):
            yield step, 0, sigma
            if self.order == 2 and sigma_next > 0:
                yield step, 1, self._second_sigma(sigma, sigma_next)

    def _second_sigma(self, sigma: float, sigma_next: float) -> float:
        """Where a step of two stages calls the model again."""
        raise NotImplementedError

    def _advance(self, at: Call) -> torch.Tensor:
        """The next latents, float32."""
        raise NotImplementedError

    def _denoised(
        self, model_output: torch.Tensor, latents: torch.Tensor, sigma: float
    ) -> torch.Tensor:
        if self.config.prediction_type == "epsilon":
            return latents - sigma * model_output
        if self.config.prediction_type == "v_prediction":
            # Source: Salimans and Ho 2022, arXiv:2202.00512, in terms of sigma.
            return latents / (sigma**2 + 1) - model_output * (sigma / math.sqrt(sigma**2 + 1))
        return model_output

    def _start_over(self, steps: list[float], stages: list[tuple[int, int]]) -> None:
        """Forget the run before; `stages` says for each model call its step and stage."""
        self._ladder, self._stages = steps, stages
        self._history: list[torch.Tensor] = []  # of the steps before, the latest first
        self._first: Call | None = None
        self._brownian: BrownianNoise | None = None

    def _remember(self, tensor: torch.Tensor, most: int) -> None:
        self._history = [tensor, *self._history][:most]

    def _first_stage(self) -> Call:
        assert self._first is not None, "a run must begin at the first stage of a step"
        return self._first

    def _last_width(self, at: Call, back: int = 0) -> float:
        """The width in log(sigma) of the step before this one, or of one further back."""
        return math.log(self._ladder[at.step - 1 - back] / self._ladder[at.step - back])

    def _fresh_noise(self, at: Call) -> torch.Tensor:
        return draw(per_picture(at.generator, len(at.latents)), at.latents)

    def _path_noise(self, at: Call, sigma: float, sigma_next: float) -> torch.Tensor:
        if self._brownian is None:
            self._brownian = BrownianNoise(
                [g.initial_seed() for g in per_picture(at.generator, len(at.latents))],
                (at.latents.shape[1], at.latents.shape[2], at.latents.shape[3]),
                weakest=min(s for s in self._ladder if s > 0),
                strongest=max(self._ladder),
            )
        return self._brownian.between(sigma, sigma_next).to(at.latents.device)


class Euler(KDiffusionScheduler):
    """Source: Karras et al. 2022, arXiv:2206.00364, algorithm 2 without the correction."""

    def _advance(self, at: Call) -> torch.Tensor:
        return _euler(at.latents, at.denoised, at.sigma, at.sigma_next)


class EulerAncestral(KDiffusionScheduler):
    """Euler down beyond the next sigma, and up to it with fresh noise. Source: k-diffusion."""

    def _advance(self, at: Call) -> torch.Tensor:
        down, up = _ancestral(at.sigma, at.sigma_next)
        after = _euler(at.latents, at.denoised, at.sigma, down)
        return after + self._fresh_noise(at) * up if up else after


class Heun(KDiffusionScheduler):
    """Source: Karras et al. 2022, arXiv:2206.00364, algorithm 2 without churn."""

    order = 2

    def _second_sigma(self, sigma: float, sigma_next: float) -> float:  # noqa: ARG002
        return sigma_next

    def _advance(self, at: Call) -> torch.Tensor:
        if at.stage == 0:
            self._first = at
            return _euler(at.latents, at.denoised, at.sigma, at.sigma_next)
        first = self._first_stage()
        slope = (first.latents - first.denoised) / at.sigma
        slope_next = (at.latents - at.denoised) / at.sigma_next
        return first.latents + (slope + slope_next) / 2 * (at.sigma_next - at.sigma)


class Lms(KDiffusionScheduler):
    """Linear multistep (Adams-Bashforth on uneven steps) of up to fourth order."""

    def _advance(self, at: Call) -> torch.Tensor:
        self._remember((at.latents - at.denoised) / at.sigma, most=4)
        weights = _multistep_weights(self._ladder, at.step, len(self._history))
        after = at.latents
        for weight, slope in zip(weights, self._history, strict=True):
            after = after + weight * slope
        return after


class Deis(KDiffusionScheduler):
    """Linear multistep in log(sigma), of second order.

    Source: Zhang and Chen 2022, arXiv:2204.13902, in the log-rho form that diffusers has.
    """

    def _advance(self, at: Call) -> torch.Tensor:
        slope = (at.latents - at.denoised) / at.sigma
        before, self._history = self._history, [slope]
        if not before or at.sigma_next == 0:
            return at.latents + slope * (at.sigma_next - at.sigma)
        sigma_before = self._ladder[at.step - 1]
        weight = _log_line_integral(at.sigma, sigma_before, at.sigma, at.sigma_next)
        weight_before = _log_line_integral(sigma_before, at.sigma, at.sigma, at.sigma_next)
        return at.latents + weight * slope + weight_before * before[0]


class Dpm2(KDiffusionScheduler):
    """Midpoint steps, the midpoint taken in log(sigma). Source: k-diffusion."""

    order = 2
    discards_penultimate = True

    def _second_sigma(self, sigma: float, sigma_next: float) -> float:
        return _halfway(sigma, sigma_next)

    def _advance(self, at: Call) -> torch.Tensor:
        middle = _halfway(at.sigma, at.sigma_next)
        if at.stage == 0:
            self._first = at
            return _euler(at.latents, at.denoised, at.sigma, middle)
        slope = (at.latents - at.denoised) / middle
        return self._first_stage().latents + slope * (at.sigma_next - at.sigma)


class Dpm2Ancestral(KDiffusionScheduler):
    """As DPM2, down beyond the next sigma and up to it with fresh noise. Source: k-diffusion."""

    order = 2
    discards_penultimate = True

    def _second_sigma(self, sigma: float, sigma_next: float) -> float:
        return _halfway(sigma, _ancestral(sigma, sigma_next)[0])

    def _advance(self, at: Call) -> torch.Tensor:
        down, up = _ancestral(at.sigma, at.sigma_next)
        middle = _halfway(at.sigma, down)
        if at.stage == 0:
            self._first = at
            return _euler(at.latents, at.denoised, at.sigma, middle)
        slope = (at.latents - at.denoised) / middle
        after = self._first_stage().latents + slope * (down - at.sigma)
        return after + self._fresh_noise(at) * up


class Dpmpp2SAncestral(KDiffusionScheduler):
    """DPM-Solver++(2S) with ancestral noise. Source: Lu et al. 2022, arXiv:2211.01095."""

    order = 2

    def _second_sigma(self, sigma: float, sigma_next: float) -> float:
        return _halfway(sigma, _ancestral(sigma, sigma_next)[0])

    def _advance(self, at: Call) -> torch.Tensor:
        down, up = _ancestral(at.sigma, at.sigma_next)
        if at.stage == 0:
            self._first = at
            return _blend(at.latents, at.denoised, _halfway(at.sigma, down) / at.sigma)
        after = _blend(self._first_stage().latents, at.denoised, down / at.sigma)
        return after + self._fresh_noise(at) * up


class Dpmpp2M(KDiffusionScheduler):
    """DPM-Solver++(2M). Source: Lu et al. 2022, arXiv:2211.01095, algorithm 2."""

    def _advance(self, at: Call) -> torch.Tensor:
        target = at.denoised
        if self._history and at.sigma_next > 0:
            ratio = self._last_width(at) / at.width
            target = at.denoised + (at.denoised - self._history[0]) / (2 * ratio)
        self._remember(at.denoised, most=1)
        return _blend(at.latents, target, at.sigma_next / at.sigma)


class DpmppSde(KDiffusionScheduler):
    """DPM-Solver++ for the diffusion SDE, two stages. Source: k-diffusion."""

    order = 2

    def _second_sigma(self, sigma: float, sigma_next: float) -> float:
        return _halfway(sigma, sigma_next)

    def _advance(self, at: Call) -> torch.Tensor:
        if at.sigma_next == 0:
            return at.denoised
        # k-diffusion comes to these sigmas through float32 logarithms, and a Brownian path is
        # rough: at a time that is off in its last place it has another rise.
        if at.stage == 0:
            self._first = at
            target = time = _halfway(at.sigma, at.sigma_next)
        else:
            target, time = at.sigma_next, _through_log(at.sigma_next)
        down, up = _ancestral(at.sigma, target)
        after = _blend(self._first_stage().latents, at.denoised, down / at.sigma)
        return after + self._path_noise(at, _through_log(at.sigma), time) * up


class _MultistepSde(KDiffusionScheduler):
    """DPM-Solver++ for the diffusion SDE, from one model call and the pictures before."""

    remembers: ClassVar[int]

    def _advance(self, at: Call) -> torch.Tensor:
        if at.sigma_next == 0:
            return at.denoised
        after = _blend(at.latents, at.denoised, math.exp(-2 * at.width))
        if self._history:
            after = after + self._correction(at)
        self._remember(at.denoised, most=self.remembers)
        up = at.sigma_next * math.sqrt(-math.expm1(-2 * at.width))
        return after + self._path_noise(at, at.sigma, at.sigma_next) * up

    def _correction(self, at: Call) -> torch.Tensor:
        """What the differences from the pictures before add."""
        raise NotImplementedError

    def _difference(self, at: Call) -> torch.Tensor:
        """How much the picture changes in a step as wide as this one."""
        return (at.denoised - self._history[0]) / (self._last_width(at) / at.width)


class Dpmpp2MSde(_MultistepSde):
    """DPM-Solver++(2M) for the diffusion SDE, midpoint form. Source: k-diffusion."""

    remembers = 1

    def _correction(self, at: Call) -> torch.Tensor:
        return -math.expm1(-2 * at.width) / 2 * self._difference(at)


class Dpmpp2MSdeHeun(_MultistepSde):
    """DPM-Solver++(2M) for the diffusion SDE, Heun form. Source: k-diffusion."""

    remembers = 1

    def _correction(self, at: Call) -> torch.Tensor:
        return _phi_2(2 * at.width) * self._difference(at)


class Dpmpp3MSde(_MultistepSde):
    """DPM-Solver++(3M) for the diffusion SDE. Source: k-diffusion.

    diffusers' own third order (`sde-dpmsolver++` with `solver_order=3`) has the wrong sign before
    the 0.5 of the second difference's coefficient, since
    https://github.com/huggingface/diffusers/pull/9104; its pictures are 7 to 12 % off.
    """

    discards_penultimate = True
    remembers = 2

    def _correction(self, at: Call) -> torch.Tensor:
        phi_2, difference = _phi_2(2 * at.width), self._difference(at)
        if len(self._history) == 1:
            return phi_2 * difference
        ratio = self._last_width(at) / at.width
        ratio_before = self._last_width(at, back=1) / at.width
        difference_before = (self._history[0] - self._history[1]) / ratio_before
        second = (difference - difference_before) / (ratio + ratio_before)
        phi_3 = phi_2 / (2 * at.width) - 0.5
        return phi_2 * (difference + second * ratio) - phi_3 * second


SOLVERS: Mapping[str, type[KDiffusionScheduler]] = {
    "Euler": Euler,
    "Euler a": EulerAncestral,
    "Heun": Heun,
    "LMS": Lms,
    "DEIS": Deis,
    "DPM2": Dpm2,
    "DPM2 a": Dpm2Ancestral,
    "DPM++ 2S a": Dpmpp2SAncestral,
    "DPM++ 2M": Dpmpp2M,
    "DPM++ SDE": DpmppSde,
    "DPM++ 2M SDE": Dpmpp2MSde,
    "DPM++ 2M SDE Heun": Dpmpp2MSdeHeun,
    "DPM++ 3M SDE": Dpmpp3MSde,
}


def _euler(
    latents: torch.Tensor, denoised: torch.Tensor, sigma: float, sigma_next: float
) -> torch.Tensor:
    return latents + (latents - denoised) / sigma * (sigma_next - sigma)


def _blend(latents: torch.Tensor, denoised: torch.Tensor, share: float) -> torch.Tensor:
    """An exponential integrator's step: `share` of the latents, the rest the picture."""
    return share * latents + (1 - share) * denoised


def _ancestral(sigma: float, sigma_next: float) -> tuple[float, float]:
    """The sigma to go down to, and the noise that then leads up to `sigma_next`."""
    up = sigma_next * math.sqrt(1 - (sigma_next / sigma) ** 2)
    return math.sqrt(sigma_next**2 - up**2), up


def _halfway(sigma: float, sigma_next: float) -> float:
    """The middle in log(sigma), which is 0 on the way to 0.

    In k-diffusion's float32 steps; `DpmppSde` says why.
    """
    start, end = -torch.tensor([sigma, sigma_next]).log()
    return float((-(start + (end - start) * 0.5)).exp())


def _through_log(sigma: float) -> float:
    return float(torch.tensor(sigma).log().exp())


def _phi_2(width: float) -> float:
    return math.expm1(-width) / width + 1


def _multistep_weights(sigmas: Sequence[float], step: int, order: int) -> list[float]:
    """The integrals over the step of the Lagrange polynomials through the last `order` sigmas."""
    nodes = [sigmas[step - back] for back in range(order)]
    return [_lagrange_integral(nodes, at, sigmas[step], sigmas[step + 1]) for at in range(order)]


def _lagrange_integral(nodes: Sequence[float], at: int, start: float, end: float) -> float:
    # Measured from the node itself: about 0 the terms would cancel.
    roots = [node - nodes[at] for index, node in enumerate(nodes) if index != at]
    integral = polyint(polyfromroots(roots))
    rise = polyval(end - nodes[at], integral) - polyval(start - nodes[at], integral)
    return float(rise) / math.prod(-root for root in roots)


def _log_line_integral(one: float, zero: float, start: float, end: float) -> float:
    """The integral from `start` to `end` of the line in log(sigma) that is 1 and 0 there."""

    def antiderivative(sigma: float) -> float:
        return sigma * (math.log(sigma / zero) - 1) / math.log(one / zero)

    return antiderivative(end) - antiderivative(start)
