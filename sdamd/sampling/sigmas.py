"""The noise levels (sigmas) of a checkpoint, and the schedules that pick some of them.

A sigma is the noise's standard deviation where the picture's latents have one of about 1. All is
float32 and in the order of k-diffusion's arithmetic: a stochastic solver asks its Brownian path
at these very numbers, and the path is rough, so the last bit of a sigma changes the picture.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.special import betaincinv

from sdamd.errors import BadCheckpoint
from sdamd.scheduler import Schedule

# With a signal of exactly zero, sigma would be infinite. Source: the value that AUTOMATIC1111 and
# ComfyUI put in its place; sigma is then 4519.
_LEAST_SIGNAL = 4.8973451890853435e-08

_BETA_SHAPE = 0.6  # Source: Lee et al. 2024, "Beta Sampling is All You Need", arXiv:2407.12173
_KARRAS_RHO = 7.0  # Source: Karras et al. 2022, arXiv:2206.00364, equation 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLevels:
    """The noise levels that a checkpoint was trained at.

    `sigmas`: (timesteps,), float32, rising; the index is the timestep that the UNet is told.
    """

    sigmas: torch.Tensor

    @property
    def weakest(self) -> float:
        """The sigma of timestep 0."""
        return float(self.sigmas[0])

    @property
    def strongest(self) -> float:
        """The sigma of the last timestep."""
        return float(self.sigmas[-1])

    def sigma_at(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Interpolate between the trained levels, linearly in log(sigma).

        Args:
            timesteps: (n,), float32, in [0, number of timesteps - 1].
        """
        below, above = timesteps.floor().long(), timesteps.ceil().long()
        part = timesteps.frac()
        logs = self.sigmas.log()
        return ((1 - part) * logs[below] + part * logs[above]).exp()

    def timestep_at(self, sigmas: torch.Tensor) -> torch.Tensor:
        """The inverse of `sigma_at`: (n,), float32, with a fraction; beyond the ends, the ends."""
        logs = self.sigmas.double().log().numpy()
        timesteps = np.interp(sigmas.double().log().numpy(), logs, np.arange(len(logs)))
        return torch.from_numpy(timesteps).float()


def noise_levels(config: Mapping[str, object]) -> NoiseLevels:
    """Work out the noise levels from a checkpoint's scheduler config.

    Raises:
        BadCheckpoint: the config has no usable betas.
    """
    betas = _betas(config)
    if not np.all((betas > 0) & (betas < 1)):
        raise BadCheckpoint(
            f"the betas of the scheduler config are {betas.min():g} to {betas.max():g}; "
            "allowed is between 0 and 1"
        )
    alphas_cumprod = np.cumprod(1.0 - betas)
    if config.get("rescale_betas_zero_snr"):
        alphas_cumprod = _rescale_zero_terminal_snr(alphas_cumprod)
    kept = torch.from_numpy(alphas_cumprod).float()
    return NoiseLevels(sigmas=((1 - kept) / kept) ** 0.5)


def ladder(
    schedule: Schedule, levels: NoiseLevels, steps: int, *, discards_penultimate: bool = False
) -> torch.Tensor:
    """The sigmas to go down: (steps + 1,), float32, falling, on the CPU.

    The last is 0, but for `KL_OPTIMAL`, which stops at the weakest trained level.
    `discards_penultimate` takes one more step and leaves out the weakest sigma before the last.
    """
    if not discards_penultimate:
        return _LADDERS[schedule](levels, steps)
    sigmas = _LADDERS[schedule](levels, steps + 1)
    return torch.cat([sigmas[:-2], sigmas[-1:]])


def _uniform(levels: NoiseLevels, steps: int) -> torch.Tensor:
    """Evenly spaced timesteps, from the last to the first."""
    return _append_zero(levels.sigma_at(torch.linspace(len(levels.sigmas) - 1, 0, steps)))


def _sgm_uniform(levels: NoiseLevels, steps: int) -> torch.Tensor:
    """As uniform with one more, without the first timestep."""
    timesteps = torch.linspace(len(levels.sigmas) - 1, 0, steps + 1)[:-1]
    return _append_zero(levels.sigma_at(timesteps))


def _karras(levels: NoiseLevels, steps: int) -> torch.Tensor:
    """Source: Karras et al. 2022, equation 5."""
    ramp = torch.linspace(0, 1, steps)
    low, high = levels.weakest ** (1 / _KARRAS_RHO), levels.strongest ** (1 / _KARRAS_RHO)
    return _append_zero((high + ramp * (low - high)) ** _KARRAS_RHO)


def _exponential(levels: NoiseLevels, steps: int) -> torch.Tensor:
    """Evenly spaced in log(sigma)."""
    low, high = math.log(levels.weakest), math.log(levels.strongest)
    return _append_zero(torch.linspace(high, low, steps).exp())


def _simple(levels: NoiseLevels, steps: int) -> torch.Tensor:
    """Trained levels alone, evenly picked from the strongest downwards."""
    stride = len(levels.sigmas) / steps
    picked = [-(1 + int(step * stride)) for step in range(steps)]
    return _append_zero(levels.sigmas[picked])


def _beta(levels: NoiseLevels, steps: int) -> torch.Tensor:
    """Quantiles of a beta distribution, dense at both ends."""
    quantiles = betaincinv(_BETA_SHAPE, _BETA_SHAPE, 1 - np.linspace(0, 1, steps))
    sigmas = levels.weakest + quantiles * (levels.strongest - levels.weakest)
    return _append_zero(torch.from_numpy(sigmas).float())


def _kl_optimal(levels: NoiseLevels, steps: int) -> torch.Tensor:
    """Source: Sabour et al. 2024, "Align Your Steps", arXiv:2404.14507, appendix."""
    low, high = torch.arctan(torch.tensor([levels.weakest, levels.strongest]))
    part = torch.arange(steps + 1) / steps
    return torch.tan(part * low + (1.0 - part) * high)


_LADDERS: Mapping[Schedule, Callable[[NoiseLevels, int], torch.Tensor]] = {
    Schedule.UNIFORM: _uniform,
    Schedule.KARRAS: _karras,
    Schedule.EXPONENTIAL: _exponential,
    Schedule.SGM_UNIFORM: _sgm_uniform,
    Schedule.SIMPLE: _simple,
    Schedule.BETA: _beta,
    Schedule.KL_OPTIMAL: _kl_optimal,
}


def _append_zero(sigmas: torch.Tensor) -> torch.Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def _betas(config: Mapping[str, object]) -> np.ndarray:
    """The noise added per timestep: (timesteps,), float64; diffusers' names and formulas."""
    trained = config.get("trained_betas")
    if trained is not None:
        return np.asarray(trained, dtype=np.float64)
    kind = config.get("beta_schedule", "linear")
    count = _number(config, "num_train_timesteps", 1000)
    start, end = _number(config, "beta_start", 1e-4), _number(config, "beta_end", 0.02)
    if kind == "linear":
        return np.linspace(start, end, int(count))
    if kind == "scaled_linear":
        return np.linspace(start**0.5, end**0.5, int(count)) ** 2
    if kind == "squaredcos_cap_v2":
        ends = np.linspace(0, 1, int(count) + 1)
        left = [math.cos((end + 0.008) / 1.008 * math.pi / 2) ** 2 for end in ends]
        return np.array([min(1 - after / before, 0.999) for before, after in pairwise(left)])
    raise BadCheckpoint(
        f"beta_schedule of the scheduler config is {kind!r}; "
        "allowed linear, scaled_linear, squaredcos_cap_v2"
    )


def _number(config: Mapping[str, object], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadCheckpoint(f"{name} of the scheduler config is {value!r}; allowed a number over 0")
    return value


def _rescale_zero_terminal_snr(alphas_cumprod: np.ndarray) -> np.ndarray:
    """Shift and stretch so that the last timestep is all noise.

    Source: Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are Flawed",
    arXiv:2305.08891, algorithm 1.
    """
    roots = np.sqrt(alphas_cumprod)
    rescaled = (roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])
    squares: np.ndarray = rescaled**2
    squares[-1] = _LEAST_SIGNAL
    return squares
