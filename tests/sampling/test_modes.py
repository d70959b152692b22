"""Image to image, inpainting, outpainting and second passes with the embedded model's parts."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    UNet2DConditionModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image, ImageDraw

from sdamd import models
from sdamd.backends.torch_backend import TorchBackend, TorchPipeline
from sdamd.errors import BadImage, OutOfVram, Stopped, Unfinished
from sdamd.picture import Picture
from sdamd.plan import Plan, make_plan
from sdamd.request import HiresUpscaler, Job, MaskFill, ResizeMode
from sdamd.sampling import conditioning, noise, schedulers
from sdamd.sampling.sample import decode
from sdamd.settings import Settings


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(index=0, prompt="", negative_prompt="", checkpoint="", width=128, height=128,
              steps=1, guidance_scale=1.0, scheduler="Euler", seed=0, upscale=1)  # fmt: skip
    checkpoint = models.find("", Path("/nowhere"))
    return make_plan(job, None, checkpoint, Settings(home=Path("/nowhere"), device="cpu"))


@pytest.fixture(scope="module")
def pipeline(plan: Plan) -> Iterator[TorchPipeline]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TorchBackend().load(models.find("", Path("/nowhere")), plan)
    torch.set_num_threads(threads)


def going_on(step: int, steps: int) -> bool:
    return False


Make = Callable[..., Image.Image]


@pytest.fixture
def make(pipeline: TorchPipeline, plan: Plan) -> Make:
    def one(job: Job, **how: Any) -> Image.Image:
        (made,) = pipeline.sample([job], replace(plan, **how), going_on)
        assert isinstance(made, Image.Image), made
        return made

    return one


def picture_of(image: Image.Image, name: str) -> Picture:
    written = io.BytesIO()
    image.save(written, "PNG")
    return Picture(sha256=name.encode().hex().ljust(64, "0"), name=name, data=written.getvalue())


def scene(width: int = 64, height: int = 64) -> Image.Image:
    image = Image.new("RGB", (width, height), (90, 140, 220))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, height // 2, width, height), fill=(60, 120, 60))
    draw.ellipse((width // 4, height // 4, width // 2, height // 2), fill=(230, 60, 40))
    return image


def box(left: int, top: int, right: int, bottom: int, size: tuple[int, int] = (64, 64)) -> Picture:
    mask = Image.new("L", size, 0)
    mask.paste(255, (left, top, right, bottom))
    return picture_of(mask, f"mask {left} {top} {right} {bottom}")


@pytest.fixture
def start(job: Job) -> Job:
    return replace(
        job, width=64, height=64, steps=4, strength=0.5, init_image=picture_of(scene(), "scene")
    )


def difference(a: Image.Image, b: Image.Image) -> int:
    assert a.size == b.size
    return int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max())


# -- what must hold ------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 0.2])
def test_a_strength_of_no_step_gives_the_picture_back(
    make: Make, start: Job, strength: float
) -> None:
    assert make(replace(start, strength=strength)).tobytes() == scene().tobytes()


@pytest.mark.parametrize("scheduler", ["Euler", "DPM++ 2M Karras", "DDIM"])
def test_a_strength_of_one_is_a_picture_from_text(make: Make, start: Job, scheduler: str) -> None:
    job = replace(start, scheduler=scheduler, strength=1.0)
    alone = replace(job, init_image=None, strength=None)
    assert make(job).tobytes() == make(alone).tobytes()


def test_the_stronger_the_further_from_the_picture(make: Make, start: Job) -> None:
    near, far = (make(replace(start, strength=strength)) for strength in (0.25, 0.75))

    def distance(image: Image.Image) -> float:
        return float(np.abs(np.asarray(image, float) - np.asarray(scene(), float)).mean())

    assert 0 < distance(near) < distance(far)


def test_the_same_seed_is_the_same_picture_and_another_another(make: Make, start: Job) -> None:
    job = replace(start, scheduler="Euler a")
    first = make(job).tobytes()
    assert make(job).tobytes() == first
    assert make(replace(job, seed=8)).tobytes() != first


def test_a_picture_of_a_batch_is_the_single_picture(
    pipeline: TorchPipeline, plan: Plan, make: Make, start: Job
) -> None:
    start = replace(start, mask_image=box(16, 16, 64, 48), mask_fill=MaskFill.NOISE)
    jobs = [
        replace(start, seed=seed, prompt=prompt) for seed, prompt in ((1, "sea"), (2, "a AND b"))
    ]
    together = pipeline.sample(jobs, plan, going_on)
    for image, job in zip(together, jobs, strict=True):
        assert isinstance(image, Image.Image)
        assert difference(image, make(job)) <= 1


@pytest.mark.parametrize("fill", list(MaskFill))
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_what_is_not_masked_stays_to_the_byte(
    make: Make, start: Job, fill: str, strength: float
) -> None:
    job = replace(
        start, mask_image=box(24, 24, 48, 48), mask_blur=1, mask_fill=fill, strength=strength
    )
    made = np.asarray(make(job))
    touched = (made != np.asarray(scene())).any(-1)
    assert touched[26:46, 26:46].mean() > 0.9
    touched[19:53, 19:53] = False
    assert not touched.any()


def test_only_the_region_is_worked_on_at_full_resolution(make: Make, start: Job) -> None:
    large = scene(320, 200)
    job = replace(
        start, init_image=picture_of(large, "large"), mask_padding=8, mask_blur=0,
        mask_image=box(100, 80, 130, 110, large.size), strength=1.0,
    )  # fmt: skip
    made = make(job)
    assert made.size == large.size
    touched = (np.asarray(made) != np.asarray(large)).any(-1)
    assert touched[80:110, 100:130].mean() > 0.9
    touched[80:110, 100:130] = False
    assert not touched.any()


@pytest.mark.parametrize("steps", [1, 2])
def test_outpainting_keeps_the_picture_in_its_place(make: Make, start: Job, steps: int) -> None:
    job = replace(
        start, width=96, height=80, outpaint_right=32, outpaint_top=16, outpaint_steps=steps,
        mask_blur=1, strength=1.0,
    )  # fmt: skip
    made = make(job)
    assert made.size == (96, 80)
    kept = 64 - 8
    assert made.crop((0, 24, kept, 80)).tobytes() == scene().crop((0, 8, kept, 64)).tobytes()


def test_latents_can_be_enlarged_in_the_place_of_the_picture(make: Make, start: Job) -> None:
    job = replace(start, width=96, height=96, resize_mode=ResizeMode.LATENT)
    made = make(job)
    assert made.size == (96, 96)
    assert make(replace(job, strength=0.0)).size == (96, 96)
    assert difference(made, make(replace(job, resize_mode=ResizeMode.STRETCH))) > 1


# -- diffusers' own pipelines ------------------------------------------------------------------


@pytest.fixture
def most_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers draws from around the latents with the generator of the noise; we do not."""
    monkeypatch.setattr(
        DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()
    )


def parts_of(pipeline: TorchPipeline, **others: Any) -> dict[str, Any]:
    parts = {**pipeline._pipe.components, "requires_safety_checker": False}
    return parts | others


def theirs(
    pipe: Any, pipeline: TorchPipeline, plan: Plan, job: Job, **pictures: Any
) -> Image.Image:
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = schedulers.build(job.scheduler, pipeline._training)
    with torch.inference_mode():
        latents = pipe(
            **conditioning.encode(pipeline._pipe, [job]).arguments(1),
            **pictures,
            strength=job.strength,
            num_inference_steps=job.steps,
            guidance_scale=job.guidance_scale,
            generator=noise.generators([job.seed]),
            output_type="latent",
        ).images
        (made,) = decode(pipe.vae, latents, plan)
    assert isinstance(made, Image.Image)
    return made


@pytest.mark.usefixtures("most_likely")
@pytest.mark.parametrize(
    "scheduler",
    ["Euler", "Euler a", "DPM2", "DPM++ 2M Karras", "DPM++ SDE", "DDIM", "DDPM", "UniPC", "LCM"],
)
def test_image_to_image_is_that_of_diffusers(
    pipeline: TorchPipeline, plan: Plan, make: Make, start: Job, scheduler: str
) -> None:
    job = replace(start, scheduler=scheduler, prompt="a red house")
    pipe = StableDiffusionImg2ImgPipeline(**parts_of(pipeline))
    assert difference(make(job), theirs(pipe, pipeline, plan, job, image=scene())) <= 1


def masked_part(image: Image.Image) -> Image.Image:
    return image.crop((16, 24, 48, 56))


@pytest.mark.usefixtures("most_likely")
@pytest.mark.parametrize("scheduler", ["Euler", "DPM2", "DPM++ 2M Karras", "DDIM", "UniPC"])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_inpainting_is_that_of_diffusers(
    pipeline: TorchPipeline, plan: Plan, make: Make, start: Job, scheduler: str, strength: float
) -> None:
    mask = box(16, 24, 48, 56)
    job = replace(start, scheduler=scheduler, strength=strength, mask_image=mask, mask_blur=0)
    pipe = StableDiffusionInpaintPipeline(**parts_of(pipeline))
    pictures = {"image": scene(), "mask_image": Image.open(io.BytesIO(mask.data))}
    made = theirs(pipe, pipeline, plan, job, **pictures, width=64, height=64)
    assert difference(masked_part(make(job)), masked_part(made)) <= 1


@pytest.fixture
def inpainting(pipeline: TorchPipeline, monkeypatch: pytest.MonkeyPatch) -> UNet2DConditionModel:
    """The embedded UNet with five more inputs, which it heeds a little."""
    config = {**pipeline._pipe.unet.config, "in_channels": 9}
    unet = UNet2DConditionModel.from_config(config).eval().requires_grad_(requires_grad=False)
    state = {name: weight.float() for name, weight in pipeline._pipe.unet.state_dict().items()}
    more = torch.randn(
        (len(state["conv_in.weight"]), 5, 3, 3), generator=torch.Generator().manual_seed(0)
    )
    state["conv_in.weight"] = torch.cat([state["conv_in.weight"], more / 50], dim=1)
    unet.load_state_dict(state)
    monkeypatch.setitem(vars(pipeline._pipe), "unet", unet)
    return unet


@pytest.mark.usefixtures("most_likely", "inpainting")
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_inpainting_with_nine_channels_is_that_of_diffusers(
    pipeline: TorchPipeline, plan: Plan, make: Make, start: Job, strength: float
) -> None:
    mask = box(16, 24, 48, 56)
    job = replace(start, strength=strength, mask_image=mask, mask_blur=0)
    pipe = StableDiffusionInpaintPipeline(**parts_of(pipeline))
    pictures = {"image": scene(), "mask_image": Image.open(io.BytesIO(mask.data))}
    made = theirs(pipe, pipeline, plan, job, **pictures, width=64, height=64)
    assert difference(masked_part(make(job)), masked_part(made)) <= 1
    assert make(job).crop((0, 0, 64, 24)).tobytes() == scene().crop((0, 0, 64, 24)).tobytes()


@pytest.mark.usefixtures("inpainting")
def test_an_inpainting_model_can_all_that_others_can(make: Make, start: Job) -> None:
    assert make(replace(start, init_image=None, strength=None)).size == (64, 64)
    assert make(start).size == (64, 64)
    assert make(replace(start, hires_scale=1.5, hires_steps=2)).size == (96, 96)


# -- the second pass -----------------------------------------------------------------------------


@pytest.fixture
def twice(job: Job) -> Job:
    return replace(
        job, width=64, height=64, steps=3, hires_scale=1.5, hires_steps=2,
        hires_scheduler="Euler", hires_guidance_scale=4.0, hires_strength=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", list(HiresUpscaler))
def test_every_way_of_enlarging_gives_the_size(make: Make, twice: Job, kind: str) -> None:
    assert make(replace(twice, hires_upscaler=kind)).size == (96, 96)


def test_a_second_pass_of_no_step_is_the_enlarged_picture(make: Make, twice: Job) -> None:
    job = replace(twice, hires_strength=0.0, hires_upscaler=HiresUpscaler.LANCZOS)
    large = make(job.without_hires()).resize((96, 96), Image.Resampling.LANCZOS)
    assert make(job).tobytes() == large.tobytes()


def test_a_second_pass_is_image_to_image_on_the_first_ones_picture(make: Make, twice: Job) -> None:
    """But for the noise, which goes on where the first pass left it."""
    twice = replace(twice, hires_upscaler=HiresUpscaler.LANCZOS)
    made = make(twice)
    large = make(twice.without_hires()).resize((96, 96), Image.Resampling.LANCZOS)
    again = make(replace(twice.without_hires(), width=96, height=96, steps=2, strength=0.5,
                         init_image=picture_of(large, "large")))  # fmt: skip
    means = [np.asarray(image, float).mean((0, 1)) for image in (made, again)]
    assert np.abs(means[0] - means[1]).max() < 25


def test_scheduler_guidance_and_steps_of_the_second_pass_are_its_own(
    pipeline: TorchPipeline, plan: Plan, make: Make, twice: Job
) -> None:
    twice = replace(twice, hires_steps=4)
    first = make(twice)
    for other in (
        {"hires_scheduler": "Euler a"}, {"hires_guidance_scale": 1.0}, {"hires_steps": 6},
    ):  # fmt: skip
        assert make(replace(twice, **other)).tobytes() != first.tobytes()
    told: list[tuple[int, int]] = []

    def watch(step: int, steps: int) -> bool:
        told.append((step, steps))
        return False

    pipeline.sample([replace(twice, hires_scheduler="Heun", hires_steps=4)], plan, watch)
    assert told == [(n, 3 + 3) for n in range(1, 7)]


def out_of_memory_beyond(
    pipeline: TorchPipeline, monkeypatch: pytest.MonkeyPatch, latents: int
) -> None:
    unet = pipeline._pipe.unet
    forward = unet.forward

    def failing(sample: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if sample.shape[2] > latents:
            raise OutOfVram("no room for the second pass")
        return forward(sample, *arguments, **options)

    monkeypatch.setattr(unet, "forward", failing)


@pytest.mark.report("B11")
@pytest.mark.parametrize("kind", [HiresUpscaler.NETWORK, HiresUpscaler.LATENT])
def test_the_first_picture_is_kept_when_the_second_pass_runs_out_of_memory(
    pipeline: TorchPipeline, plan: Plan, make: Make, twice: Job,
    monkeypatch: pytest.MonkeyPatch, kind: str,
) -> None:  # fmt: skip
    twice = replace(twice, hires_upscaler=kind)
    alone = make(twice.without_hires())
    out_of_memory_beyond(pipeline, monkeypatch, 8)
    (made,) = pipeline.sample([twice], plan, going_on)
    assert isinstance(made, Unfinished)
    assert "ran out of memory" in str(made)
    assert made.image.tobytes() == alone.tobytes()


@pytest.mark.report("B11")
def test_tiles_take_the_second_pass_where_the_whole_has_no_room(
    pipeline: TorchPipeline, make: Make, twice: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory_beyond(pipeline, monkeypatch, 8)
    assert make(replace(twice, denoise_tile=64)).size == (96, 96)
    assert make(twice, denoise_tile=64).size == (96, 96)
    assert make(replace(twice, hires_tile=64)).size == (96, 96)


def test_stopping_works_in_the_second_pass_too(
    pipeline: TorchPipeline, plan: Plan, twice: Job
) -> None:
    with pytest.raises(Stopped):
        pipeline.sample([twice], plan, lambda step, steps: step >= 4)


# -- tiles ---------------------------------------------------------------------------------------


@pytest.mark.report("C12")
def test_without_need_of_tiles_nothing_changes(make: Make, job: Job) -> None:
    job = replace(job, width=96, height=64, steps=2)
    never = make(replace(job, denoise_tile=0))
    assert make(job).tobytes() == never.tobytes()
    assert make(replace(job, denoise_tile=128)).tobytes() == never.tobytes()
    assert make(job, denoise_tile=64).tobytes() != never.tobytes()


def ramp(size: int) -> Image.Image:
    """A smooth picture: no column or row differs much from the next."""
    across = np.linspace(60, 200, size)[None].repeat(size, 0)
    return Image.fromarray(
        np.stack([across, across.T, (across + across.T) / 2], -1).astype(np.uint8)
    )


def worst_seam(image: Image.Image, borders: list[int]) -> float:
    """The largest difference of neighbours across a border, over the median elsewhere."""
    levels = np.asarray(image, float)
    ratios = []
    for axis in (0, 1):
        steps = np.abs(np.diff(levels, axis=axis)).mean(axis=(1 - axis, 2))
        near = [at - 1 for at in borders]
        elsewhere = np.delete(steps, near)
        ratios.append(max(steps[at] for at in near) / np.median(elsewhere))
    return float(max(ratios))


@pytest.mark.report("C11")
def test_no_seam_shows_where_tiles_meet(make: Make, job: Job) -> None:
    smooth = replace(
        job, prompt="", width=128, height=128, steps=4, guidance_scale=1.0, strength=0.25,
        init_image=picture_of(ramp(128), "ramp"),
    )  # fmt: skip
    blended = make(replace(smooth, denoise_tile=64))
    # Tiles of 64 read from 0, 32, 64.
    assert worst_seam(blended, [32, 64, 96]) <= 1.5


@pytest.mark.report("C11")
def test_no_seam_shows_in_a_picture_enlarged_tile_by_tile(make: Make, job: Job) -> None:
    enlarged = make(
        replace(
            job, prompt="", width=64, height=64, steps=4, strength=0.0, guidance_scale=1.0,
            init_image=picture_of(ramp(64), "ramp"), hires_scale=2, hires_steps=4,
            hires_scheduler="Euler", hires_guidance_scale=1.0, hires_strength=0.25, hires_tile=64,
            hires_upscaler=HiresUpscaler.LANCZOS,
        )
    )  # fmt: skip
    assert enlarged.size == (128, 128)
    assert worst_seam(enlarged, [32, 64, 96]) <= 1.5


@pytest.mark.report("C13")
def test_a_tile_of_one_colour_is_decoded_again(
    make: Make, pipeline: TorchPipeline, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(job, width=192, height=128, steps=1)
    sound = make(job, vae_tile=128)
    vae = pipeline._pipe.vae
    decode, failed = vae.decode, [True]

    def once_black(latents: torch.Tensor, **options: Any) -> Any:
        pixels = decode(latents, **options)[0]
        if failed:
            failed.clear()
            pixels = pixels.clone()
            pixels[..., :, 96:] = -1
        return (pixels,)

    monkeypatch.setattr(vae, "decode", once_black)
    assert difference(make(job, vae_tile=128), sound) == 0


@pytest.mark.report("C13")
def test_a_tile_that_is_of_one_colour_twice_is_what_the_model_drew(
    make: Make, pipeline: TorchPipeline, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = pipeline._pipe.vae
    decode = vae.decode

    def black_on_the_right(latents: torch.Tensor, **options: Any) -> Any:
        pixels = decode(latents, **options)[0].clone()
        pixels[..., :, 96:] = -1
        return (pixels,)

    monkeypatch.setattr(vae, "decode", black_on_the_right)
    made = make(replace(job, width=192, height=128, steps=1), vae_tile=128)
    assert made.crop((96, 0, 192, 128)).getextrema() == ((0, 0), (0, 0), (0, 0))


def test_a_vae_that_cannot_take_the_picture_is_a_bad_image(
    pipeline: TorchPipeline, plan: Plan, start: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = pipeline._pipe.vae
    encode = vae.encode

    def spoilt(pixels: torch.Tensor, **options: Any) -> Any:
        return encode(pixels * torch.nan, **options)

    monkeypatch.setattr(vae, "encode", spoilt)
    (made,) = pipeline.sample([start], plan, going_on)
    assert isinstance(made, BadImage)
    assert "for the picture to start from" in str(made)
