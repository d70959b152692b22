"""The sampling itself: jobs in, pictures out, through an unchanged diffusers pipeline."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from sdamd.errors import BadImage, Stopped
from sdamd.gallery import check_image
from sdamd.plan import Plan
from sdamd.request import Job
from sdamd.sampling import conditioning, noise, schedulers, tiling
from sdamd.sampling.composition import composed
from sdamd.scheduler import parse

log = logging.getLogger(__name__)


@torch.inference_mode()
def sample(
    pipe: Any,
    jobs: Sequence[Job],
    plan: Plan,
    training: Mapping[str, object],
    watch: Callable[[int, int], bool],
) -> list[Image.Image | BadImage]:
    """Make one RGB picture per job, or say why it is none.

    Args:
        pipe: a `StableDiffusionPipeline` or `StableDiffusionXLPipeline`.
        jobs: equal in all but prompts, seed and index.
        plan: how the VAE works.
        training: the checkpoint's scheduler config (betas, prediction type).
        watch: called after each step with (step, steps); True stops.

    Raises:
        Stopped: `watch` returned True.
    """
    job = jobs[0]
    pipe.scheduler = schedulers.build(job.scheduler, training)
    generators = noise.generators([j.seed for j in jobs])
    shape = (pipe.unet.config.in_channels, job.height // 8, job.width // 8)
    latents = noise.initial_latents(generators, shape)
    conditions = conditioning.encode(pipe, jobs)
    calls_per_step = parse(job.scheduler)[0].evaluations
    stopped = False
    step = 1

    def after_call(pipe: Any, call: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal stopped, step
        stopped = stopped or watch(call + 1, pipe.num_timesteps)
        pipe._interrupt = stopped
        before, step = step, min((call + 1) // calls_per_step + 1, job.steps)
        if step > before and conditions.changes_at(step):
            return tensors | conditions.loop_tensors(step)
        return tensors

    with composed(pipe.unet, conditions, lambda: step):
        denoised = pipe(
            **conditions.arguments(step),
            latents=latents.to(pipe.unet.dtype),
            generator=generators,
            width=job.width,
            height=job.height,
            num_inference_steps=job.steps,
            guidance_scale=job.guidance_scale,
            callback_on_step_end=after_call,
            output_type="latent",
        ).images
    if stopped:
        raise Stopped
    return decode(pipe.vae, denoised, plan)


def decode(vae: Any, latents: torch.Tensor, plan: Plan) -> list[Image.Image | BadImage]:
    """Latents (pictures, channels, height / 8, width / 8) to pictures, each one checked.

    A picture that is NaN, constant or black is decoded once more in float32, since some VAEs
    leave the range of float16; if it still is, a `BadImage` takes its place.
    """
    pixels = _decode(vae, latents, plan)
    return [
        _checked(vae, latents[number : number + 1], picture, plan)
        for number, picture in enumerate(pixels)
    ]


def _checked(
    vae: Any, latents: torch.Tensor, pixels: torch.Tensor, plan: Plan
) -> Image.Image | BadImage:
    """One picture of `pixels` (3, height, width), if need be after decoding its latents again."""
    if not latents.isfinite().all():
        return BadImage(
            "the UNet gave NaN or infinity, which no other decoding mends; dtype float32 may help"
        )
    image, problem = _to_image(pixels)
    if problem and vae.dtype != torch.float32:
        log.warning("%s; decoding again in float32", problem)
        image, problem = _to_image(_decode_in_float32(vae, latents, plan))
    return BadImage(problem) if problem else image


def _decode_in_float32(vae: Any, latents: torch.Tensor, plan: Plan) -> torch.Tensor:
    narrow = vae.dtype
    try:
        pixels: torch.Tensor = _decode(vae.float(), latents, plan)[0]
    finally:
        vae.to(narrow)
    return pixels


def _decode(vae: Any, latents: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Latents to pixels (pictures, 3, height, width) in float32, nominally in -1 to 1."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor
    # MIOpen is what torch calls cudnn on ROCm; the VAE is where it can be slower than nothing.
    with torch.backends.cudnn.flags(enabled=plan.miopen, benchmark=False):
        if plan.vae_tile:
            return tiling.decode(vae, scaled, tile=plan.vae_tile)
        pixels: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
    return pixels.float()


def _to_image(pixels: torch.Tensor) -> tuple[Image.Image, str | None]:
    """Pixels (3, height, width) in -1 to 1 to a picture, and what is wrong with it."""
    problem = None if pixels.isfinite().all() else "the picture is NaN or infinite"
    rounded = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().nan_to_num().to(torch.uint8)
    image = Image.fromarray(rounded.permute(1, 2, 0).cpu().numpy())
    return image, problem or check_image(image)
