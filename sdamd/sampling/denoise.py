"""One run down a schedule: noisy latents in, latents of a picture out."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdamd.errors import Stopped
from sdamd.request import Job
from sdamd.sampling import conditioning, schedulers
from sdamd.sampling.composition import composed
from sdamd.sampling.schedulers import Scheduler
from sdamd.sampling.tiling import vae_factor
from sdamd.sampling.unet import BesideUNet, TiledUNet
from sdamd.scheduler import parse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """What is to stay while the rest is drawn, as latents of one shape.

    `latents` are the picture's and `noise` what they are shown with at each step; `drawn` is 1
    where they are drawn anew and 0 elsewhere. All float32.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    drawn: torch.Tensor

    def put_back(self, scheduler: Scheduler, latents: torch.Tensor, call: int) -> torch.Tensor:
        """The latents before the call of this number, with what is to stay in its place."""
        device = latents.device
        own = schedulers.noised(scheduler, self.latents.to(device), self.noise.to(device), call)
        drawn = self.drawn.to(device)
        put_back: torch.Tensor = own * (1 - drawn) + latents.float() * drawn
        return put_back.to(latents.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """How latents are denoised.

    `told` is called after each call of the model; True stops. `tile` is the side of the tiles in
    latents, 0 for the whole. `beside` goes to inpainting models. `ended` means that prompts that
    change have done so: a second pass follows the first.
    """

    pipe: Any
    jobs: Sequence[Job]
    scheduler: Scheduler
    generators: Sequence[torch.Generator]
    told: Callable[[], bool]
    tile: int = 0
    kept: Kept | None = None
    beside: torch.Tensor | None = None
    ended: bool = False

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Denoise (pictures, channels, height, width), which the scheduler's first call expects.

        Raises:
            Stopped: `told` returned True.
        """
        job = self.jobs[0]
        pipe = copy.copy(self.pipe)
        pipe.scheduler = self.scheduler
        pipe.set_progress_bar_config(disable=True)
        factor = vae_factor(pipe.vae)
        conditions = conditioning.encode(pipe, self.jobs)
        calls_per_step = parse(job.scheduler)[0].evaluations
        stopped = False
        step = job.steps if self.ended else 1

        def after_call(pipe: Any, call: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal stopped, step
            stopped = stopped or self.told()
            pipe._interrupt = stopped
            made = dict(tensors)
            if self.kept is not None:
                made["latents"] = self.kept.put_back(self.scheduler, made["latents"], call + 1)
            if not self.ended:
                before, step = step, min((call + 1) // calls_per_step + 1, job.steps)
                if step > before and conditions.changes_at(step):
                    made |= conditions.loop_tensors(step)
            return made

        unet = pipe.unet
        if 0 < self.tile < max(latents.shape[2:]):
            unet = TiledUNet(unet, self.tile)
        # Past the pipeline's own setter, which wants to know the library of each part.
        whole = unet if self.beside is None else BesideUNet(unet, self.beside)
        vars(pipe)["unet"] = whole
        with composed(unet, conditions, lambda: step):
            denoised: torch.Tensor = pipe(
                **conditions.arguments(step),
                latents=latents.to(pipe.unet.dtype),
                generator=list(self.generators),
                width=latents.shape[3] * factor,
                height=latents.shape[2] * factor,
                num_inference_steps=job.steps,
                guidance_scale=job.guidance_scale,
                callback_on_step_end=after_call,
                output_type="latent",
            ).images
        if stopped:
            raise Stopped
        return denoised
