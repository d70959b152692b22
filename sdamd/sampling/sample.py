"""The sampling itself: jobs in, pictures out, through an unchanged diffusers pipeline."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from sdamd import canvas, tiles
from sdamd.canvas import Canvas
from sdamd.errors import BadImage, OutOfVram, Unfinished
from sdamd.gallery import check_image
from sdamd.plan import Plan
from sdamd.request import HiresUpscaler, Job, MaskFill
from sdamd.sampling import noise, schedulers
from sdamd.sampling.denoise import Kept, Run
from sdamd.sampling.encode import drawn_in, encode, without_drawn
from sdamd.sampling.schedulers import Scheduler
from sdamd.sampling.tiling import OVERLAP, shares, vae_factor

log = logging.getLogger(__name__)

Made: TypeAlias = Image.Image | BadImage | Unfinished
Enlarge: TypeAlias = Callable[[Image.Image, int], Image.Image]
"""Enlarges an RGB picture 2, 3 or 4 times."""

INPAINTING_CHANNELS = 9
"""What a UNet takes that was trained to see the mask and the masked picture."""


@torch.inference_mode()
def sample(
    pipe: Any,
    jobs: Sequence[Job],
    plan: Plan,
    training: Mapping[str, object],
    watch: Callable[[int, int], bool],
    enlarge: Enlarge | None = None,
) -> list[Made]:
    """Make one RGB picture per job, or say why it is none.

    Args:
        pipe: a `StableDiffusionPipeline` or `StableDiffusionXLPipeline`.
        jobs: equal in all but prompts, seed and index.
        plan: in which tiles the UNet works where the job does not say.
        training: the checkpoint's scheduler config (betas, prediction type).
        watch: called after each step with (step, steps), all passes together; True stops.
        enlarge: the network for a second pass that wants one.

    Returns:
        Pictures; `Unfinished` where the second pass failed and the first one's picture is there.

    Raises:
        Stopped: `watch` returned True.
        BadRequest: a picture to start from is without its bytes.
    """
    return _Sampling(pipe, jobs, plan, training, watch, enlarge).made()


class _Sampling:
    """One pass of jobs through all its stages."""

    def __init__(
        self,
        pipe: Any,
        jobs: Sequence[Job],
        plan: Plan,
        training: Mapping[str, object],
        watch: Callable[[int, int], bool],
        enlarge: Enlarge | None,
    ) -> None:
        self._pipe = pipe
        self._jobs = jobs
        self._job = jobs[0]
        self._plan = plan
        self._training = training
        self._watch = watch
        self._enlarge = enlarge
        self._generators = noise.generators([job.seed for job in jobs])
        self._factor = vae_factor(pipe.vae)
        side = plan.denoise_tile if self._job.denoise_tile is None else self._job.denoise_tile
        self._tile = side // self._factor
        self._calls_done = 0
        self._calls = self._count_calls()

    def made(self) -> list[Made]:
        """All pictures."""
        if self._job.init_image is None:
            latents = self._from_noise()
            if self._job.hires_scale == 1:
                return [*decode(self._pipe.vae, latents, self._plan)]
            return self._with_second_pass(latents, None)
        try:
            pictures = self._from_picture()
        except BadImage as error:  # the picture to start from, which all have in common
            return [BadImage(str(error)) for _ in self._jobs]
        if self._job.hires_scale == 1:
            return [*pictures]
        return self._with_second_pass(None, pictures)

    # -- the first pass --------------------------------------------------------------------------

    def _from_noise(self) -> torch.Tensor:
        job = self._job
        size = (job.height // self._factor, job.width // self._factor)
        beside = None
        if self._is_inpainting_model:
            blank = Canvas(picture=Image.new("RGB", (job.width, job.height)))
            beside = self._beside([blank] * len(self._jobs), size)
        run = self._run(self._scheduler(self._jobs, 0), beside=beside)
        return run(self._noise(size))

    def _from_picture(self) -> list[Image.Image | BadImage]:
        """Image to image, inpainting and outpainting, in as many rounds as that takes."""
        canvases = [canvas.first(self._job)] * len(self._jobs)
        bad: dict[int, BadImage] = {}
        pictures: list[Image.Image] = []
        for number, margins in enumerate(canvas.rounds(self._job)):
            if number:
                canvases = [canvas.extended(self._job, image, margins) for image in pictures]
            drawn = self._drawn(canvases)
            for row, image in enumerate(drawn):
                if isinstance(image, BadImage):
                    bad.setdefault(row, image)
            pictures = [
                each.untouched if isinstance(image, BadImage) else image
                for each, image in zip(canvases, drawn, strict=True)
            ]
        return [bad.get(row, image) for row, image in enumerate(pictures)]

    def _drawn(self, canvases: Sequence[Canvas]) -> list[Image.Image | BadImage]:
        """One round: each canvas drawn on, with what is to stay as it was."""
        skip = schedulers.first_step(self._job.steps, self._job.strength or 0)
        if skip >= self._job.steps:
            return [each.untouched for each in canvases]
        size = canvases[0].enlarged or canvases[0].picture.size
        first_noise = self._noise((size[1] // self._factor, size[0] // self._factor))
        made = self._run_on(canvases, first_noise, jobs=self._jobs, skip=skip)
        return [
            image if isinstance(image, BadImage) else each.finished(image)
            for each, image in zip(canvases, made, strict=True)
        ]

    def _run_on(
        self,
        canvases: Sequence[Canvas],
        fresh: torch.Tensor,
        *,
        jobs: Sequence[Job],
        skip: int,
        ended: bool = False,
        part: bool = False,
    ) -> list[Image.Image | BadImage]:
        """Encode, denoise and decode; `fresh` is the noise to begin with."""
        latents = encode(self._pipe.vae, [each.picture for each in canvases]).cpu()
        size = (fresh.shape[2], fresh.shape[3])
        if latents.shape[2:] != fresh.shape[2:]:
            latents = _resized(latents, size, HiresUpscaler.LATENT)
        drawn = drawn_in([each.mask for each in canvases], size)
        scheduler = self._scheduler(jobs, skip)
        start = fresh
        if skip:
            begun = latents if ended else self._with_fill(latents, drawn)
            start = schedulers.noised(scheduler, begun, fresh, 0)
        kept = beside = None
        if self._is_inpainting_model:
            beside = self._beside(canvases, size)
        elif canvases[0].mask is not None:
            kept = Kept(latents=latents, noise=fresh, drawn=drawn)
        run = self._run(scheduler, jobs=jobs, kept=kept, beside=beside, ended=ended)
        return decode(self._pipe.vae, run(start), self._plan, part=part)

    def _with_fill(self, latents: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """The latents to begin with, where the mask's part is to hold something else."""
        if self._job.mask_fill == MaskFill.NOISE:
            return latents * (1 - drawn) + noise.draw(self._generators, latents) * drawn
        if self._job.mask_fill == MaskFill.ZERO:
            return latents * (1 - drawn)
        return latents

    def _beside(self, canvases: Sequence[Canvas], size: tuple[int, int]) -> torch.Tensor:
        """What an inpainting model sees beside the latents: the mask, and the picture without."""
        drawn = drawn_in([each.mask for each in canvases], size)
        alone: dict[int, Image.Image] = {}
        for each in canvases:
            alone.setdefault(id(each), without_drawn(each.picture, each.mask))
        seen = encode(self._pipe.vae, [alone[id(each)] for each in canvases]).cpu()
        if seen.shape[2:] != drawn.shape[2:]:
            seen = _resized(seen, size, HiresUpscaler.LATENT)
        return torch.cat([drawn, seen], dim=1)

    # -- the second pass -------------------------------------------------------------------------

    def _with_second_pass(
        self, latents: torch.Tensor | None, pictures: Sequence[Image.Image | BadImage] | None
    ) -> list[Made]:
        """The second pass over the first one's result, of which latents or pictures are given."""
        failed = None
        second: list[Image.Image | BadImage] = []
        if pictures is None and (self._job.hires_tile or not self._enlarges_latents):
            assert latents is not None
            pictures = decode(self._pipe.vae, latents, self._plan)
        try:
            second = self._second_pass(latents, pictures)
        except (OutOfVram, BadImage) as error:
            failed = str(error)
        # Outside of the handler, whose traceback holds on to the device's memory.
        if failed is None and not any(isinstance(image, BadImage) for image in second):
            bad = [None] * len(second) if pictures is None else pictures
            return [b if isinstance(b, BadImage) else s for b, s in zip(bad, second, strict=True)]
        if pictures is None:
            assert latents is not None
            pictures = decode(self._pipe.vae, latents, self._plan)
        whys = [failed] * len(pictures) if failed is not None else [
            str(image) if isinstance(image, BadImage) else None for image in second
        ]  # fmt: skip
        return [
            first if isinstance(first, BadImage) else
            second[row] if why is None else Unfinished(why, first)
            for row, (first, why) in enumerate(zip(pictures, whys, strict=True))
        ]  # fmt: skip

    @property
    def _enlarges_latents(self) -> bool:
        return self._job.hires_upscaler not in (HiresUpscaler.NETWORK, HiresUpscaler.LANCZOS)

    def _second_pass(
        self, latents: torch.Tensor | None, pictures: Sequence[Image.Image | BadImage] | None
    ) -> list[Image.Image | BadImage]:
        job = self._job
        jobs = [_of_second_pass(each) for each in self._jobs]
        skip = schedulers.first_step(jobs[0].steps, job.hires_strength)
        wide, high = job.hires_size
        if self._enlarges_latents and not job.hires_tile:
            if latents is None:
                assert pictures is not None
                latents = encode(self._pipe.vae, _or_grey(pictures)).cpu()
            size = (high // self._factor, wide // self._factor)
            start = _resized(latents.cpu().float(), size, job.hires_upscaler)
        else:
            assert pictures is not None
            large = [self._enlarged(image) for image in _or_grey(pictures)]
            if skip >= jobs[0].steps:
                return [*large]
            if job.hires_tile:
                return self._second_pass_in_tiles(large, jobs, skip)
            start = encode(self._pipe.vae, large).cpu()
        if skip < jobs[0].steps:
            scheduler = self._scheduler(jobs, skip)
            fresh = self._noise((start.shape[2], start.shape[3]))
            run = self._run(scheduler, jobs=jobs, ended=True, beside=self._nothing_beside(start))
            start = run(schedulers.noised(scheduler, start, fresh, 0) if skip else fresh)
        return decode(self._pipe.vae, start, self._plan)

    def _second_pass_in_tiles(
        self, pictures: Sequence[Image.Image], jobs: Sequence[Job], skip: int
    ) -> list[Image.Image | BadImage]:
        """One tile after another, each a picture of its own, of the noise at its place.

        Tiles cross over linearly where they overlap. A tile starts from what its neighbours have
        made of the picture by then, so that both show one scene there. All stages are bounded by
        the tile.
        """
        wide, high = self._job.hires_size
        rows, columns = self._tiles_of_second_pass()
        field = self._noise((high // self._factor, wide // self._factor))
        made = [np.asarray(image, np.float32).copy() for image in pictures]
        down, across = shares(rows, self._factor), shares(columns, self._factor)
        bad: dict[int, BadImage] = {}
        for y, of_y in zip(rows, down, strict=True):
            for x, of_x in zip(columns, across, strict=True):
                big_y, big_x = y.times(self._factor), x.times(self._factor)
                where = slice(big_y.start, big_y.stop), slice(big_x.start, big_x.stop)
                box = (big_x.start, big_y.start, big_x.stop, big_y.stop)
                canvases = [Canvas(picture=_rounded(levels[where])) for levels in made]
                fresh = field[:, :, y.start : y.stop, x.start : x.stop]
                drawn = self._run_on(canvases, fresh, jobs=jobs, skip=skip, ended=True, part=True)
                share = (of_y[:, None] * of_x)[..., None].numpy()
                for row, image in enumerate(drawn):
                    if isinstance(image, BadImage):
                        bad.setdefault(row, image)
                        continue
                    # The shares of all tiles add up to one, so nothing of the start is left.
                    before = np.asarray(pictures[row].crop(box), np.float32)
                    made[row][where] += share * (np.asarray(image, np.float32) - before)
        return [bad.get(row) or _rounded(levels) for row, levels in enumerate(made)]

    def _tiles_of_second_pass(self) -> tuple[tuple[tiles.Span, ...], tuple[tiles.Span, ...]]:
        """Rows and columns of tiles, in latents."""
        wide, high = self._job.hires_size
        side = self._job.hires_tile // self._factor
        rows, columns = (
            tiles.cut(length // self._factor, tile=side, context=side // OVERLAP)
            for length in (high, wide)
        )
        return rows, columns

    def _enlarged(self, image: Image.Image) -> Image.Image:
        """The picture at the second pass' size."""
        size = self._job.hires_size
        if self._job.hires_upscaler == HiresUpscaler.NETWORK:
            if self._enlarge is None:
                raise ValueError("hires_upscaler is network, and there is none")
            while image.width < size[0]:
                image = self._enlarge(image, min(4, -(-size[0] // image.width)))
        return image.resize(size, Image.Resampling.LANCZOS)

    # -- what both have --------------------------------------------------------------------------

    @property
    def _is_inpainting_model(self) -> bool:
        return bool(self._pipe.unet.config.in_channels == INPAINTING_CHANNELS)

    def _nothing_beside(self, like: torch.Tensor) -> torch.Tensor | None:
        """For an inpainting model that draws all of the picture anew."""
        if not self._is_inpainting_model:
            return None
        high, wide = like.shape[2:]
        blank = Canvas(picture=Image.new("RGB", (wide * self._factor, high * self._factor)))
        return self._beside([blank] * len(like), (high, wide))

    def _noise(self, size: tuple[int, int]) -> torch.Tensor:
        """Fresh noise for latents of this height and width."""
        channels = self._pipe.vae.config.latent_channels
        return noise.initial_latents(self._generators, (channels, *size))

    def _scheduler(self, jobs: Sequence[Job], skip: int) -> Scheduler:
        scheduler = schedulers.build(jobs[0].scheduler, self._training, skip=skip)
        scheduler.set_timesteps(jobs[0].steps)
        return scheduler

    def _run(
        self,
        scheduler: Scheduler,
        *,
        jobs: Sequence[Job] | None = None,
        kept: Kept | None = None,
        beside: torch.Tensor | None = None,
        ended: bool = False,
    ) -> Run:
        return Run(
            pipe=self._pipe,
            jobs=jobs or self._jobs,
            scheduler=scheduler,
            generators=self._generators,
            told=self._tell,
            tile=self._tile,
            kept=kept,
            beside=beside,
            ended=ended,
        )

    def _tell(self) -> bool:
        self._calls_done += 1
        return self._watch(self._calls_done, self._calls)

    def _count_calls(self) -> int:
        """Of the model, in all passes, rounds and tiles."""
        job = self._job
        skip = 0
        if job.init_image is not None:
            skip = schedulers.first_step(job.steps, job.strength or 0)
        calls = self._calls_of(self._jobs, skip) * job.outpaint_steps
        if job.hires_scale > 1:
            jobs = [_of_second_pass(job)]
            second = self._calls_of(jobs, schedulers.first_step(jobs[0].steps, job.hires_strength))
            if job.hires_tile:
                rows, columns = self._tiles_of_second_pass()
                second *= len(rows) * len(columns)
            calls += second
        return calls

    def _calls_of(self, jobs: Sequence[Job], skip: int) -> int:
        if skip >= jobs[0].steps:
            return 0
        return len(self._scheduler(jobs, skip).timesteps)


def _of_second_pass(job: Job) -> Job:
    """The job as its second pass is: one of its own size, steps, scheduler and guidance."""
    width, height = job.hires_size
    return replace(
        job.without_hires(),
        width=width,
        height=height,
        steps=job.hires_steps or job.steps,
        scheduler=job.hires_scheduler or job.scheduler,
        guidance_scale=job.hires_guidance_scale or job.guidance_scale,
    )


_MODES = {
    HiresUpscaler.LATENT: "bilinear",
    HiresUpscaler.LATENT_BICUBIC: "bicubic",
    HiresUpscaler.LATENT_NEAREST: "nearest-exact",
}


def _resized(latents: torch.Tensor, size: tuple[int, int], kind: str) -> torch.Tensor:
    """Latents at another height and width."""
    return functional.interpolate(latents, size=size, mode=_MODES[HiresUpscaler(kind)])


def _rounded(levels: NDArray[np.float32]) -> Image.Image:
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))


def _or_grey(pictures: Sequence[Image.Image | BadImage]) -> list[Image.Image]:
    """Pictures of one size, with a stand-in for those that failed, so that the rest can go on."""
    size = next((p.size for p in pictures if not isinstance(p, BadImage)), None)
    if size is None:
        raise BadImage(str(pictures[0]))
    grey = Image.new("RGB", size, (128, 128, 128))
    return [grey if isinstance(p, BadImage) else p for p in pictures]


def decode(
    vae: Any, latents: torch.Tensor, plan: Plan, *, part: bool = False
) -> list[Image.Image | BadImage]:
    """Latents (pictures, channels, height / 8, width / 8) to pictures, each one checked.

    A picture that is NaN, constant or black is decoded once more in float32, since some VAEs
    leave the range of float16; if it still is, a `BadImage` takes its place. A `part` of a picture
    may be of one colour, and so may a tile of the VAE that is so twice.
    """
    pixels = _decode(vae, latents)
    return [
        _checked(vae, latents[number : number + 1], picture, plan, part=part)
        for number, picture in enumerate(pixels)
    ]


def _checked(
    vae: Any, latents: torch.Tensor, pixels: torch.Tensor, plan: Plan, *, part: bool
) -> Image.Image | BadImage:
    """One picture of `pixels` (3, height, width), if need be after decoding its latents again."""
    if not latents.isfinite().all():
        return BadImage(
            "the UNet gave NaN or infinity, which no other decoding mends; dtype float32 may help"
        )
    image, problem = _to_image(pixels, part=part)
    odd = None if problem or part else _odd_tile(image, plan.vae_tile, vae_factor(vae))
    if odd or (problem and vae.dtype != torch.float32):
        log.warning("%s; decoding again in float32", problem or odd)
        image, problem = _to_image(_decode_in_float32(vae, latents), part=part)
    return BadImage(problem) if problem else image


def _odd_tile(image: Image.Image, tile: int, factor: int) -> str | None:
    """Say which of the VAE's tiles is of one colour, as a kernel that failed leaves it.

    Source: https://github.com/microsoft/DirectML/issues/545, a black tile in a sound picture.
    """
    if not 0 < tile < max(image.size):
        return None
    levels = np.asarray(image)
    side = tile // factor
    grid = tiles.grid(
        image.width // factor, image.height // factor, tile=side, context=side // OVERLAP
    )
    for each in grid:
        x, y = each.x.times(factor), each.y.times(factor)
        kept = levels[y.keep : y.keep_stop, x.keep : x.keep_stop].reshape(-1, 3)
        if (kept == kept[0]).all():
            return f"the VAE's tile at {x.keep}, {y.keep} is of one colour"
    return None


def _decode_in_float32(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    narrow = vae.dtype
    try:
        pixels: torch.Tensor = _decode(vae.float(), latents)[0]
    finally:
        vae.to(narrow)
    return pixels


def _decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents to pixels (pictures, 3, height, width) in float32, nominally in -1 to 1."""
    scaled = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor
    pixels: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
    return pixels.float()


def _to_image(pixels: torch.Tensor, *, part: bool = False) -> tuple[Image.Image, str | None]:
    """Pixels (3, height, width) in -1 to 1 to a picture, and what is wrong with it."""
    problem = None if pixels.isfinite().all() else "the picture is NaN or infinite"
    rounded = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().nan_to_num().to(torch.uint8)
    image = Image.fromarray(rounded.permute(1, 2, 0).cpu().numpy())
    return image, problem or (None if part else check_image(image))
