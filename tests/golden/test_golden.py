"""Each mode still makes the picture that it made: a change of pixels is never an accident.

The pictures beside this file are the embedded model's, in float32 on a CPU with AVX2. After a
change that is meant to change them, or a new embedded model, they are written anew with
`SDAMD_WRITE_GOLDEN=1 pytest tests/golden`, and looked at.
"""

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from sdamd import models
from sdamd.backends.torch_backend import TorchBackend, TorchPipeline
from sdamd.picture import Picture
from sdamd.plan import Plan, make_plan
from sdamd.request import HiresUpscaler, Job
from sdamd.settings import Settings

HERE = Path(__file__).parent
LEAST_PSNR = 45.0
"""In decibels; another kind of CPU rounds otherwise, by up to a level or two of 255."""


def picture_of(image: Image.Image, name: str) -> Picture:
    written = io.BytesIO()
    image.save(written, "PNG")
    return Picture(sha256=name.encode().hex().ljust(64, "0"), name=name, data=written.getvalue())


def scene() -> Image.Image:
    image = Image.new("RGB", (96, 64), (90, 140, 220))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 36, 96, 64), fill=(60, 120, 60))
    draw.ellipse((20, 12, 52, 44), fill=(230, 60, 40))
    return image


def mask() -> Image.Image:
    made = Image.new("L", (96, 64), 0)
    ImageDraw.Draw(made).ellipse((40, 16, 80, 56), fill=255)
    return made


TEXT = Job(
    index=0, prompt="a red house by the sea", negative_prompt="", checkpoint="", width=96,
    height=64, steps=6, guidance_scale=4.0, scheduler="DPM++ 2M", seed=7, upscale=1,
)  # fmt: skip
START = replace(TEXT, init_image=picture_of(scene(), "scene"), strength=0.7)
TWICE = replace(
    TEXT, width=64, hires_scale=1.5, hires_steps=4, hires_strength=0.5, hires_scheduler="Euler a",
    hires_guidance_scale=3.0,
)  # fmt: skip
JOBS = {
    "text": TEXT,
    "image": START,
    "inpaint": replace(START, mask_image=picture_of(mask(), "mask"), mask_blur=2),
    "region": replace(START, mask_image=picture_of(mask(), "mask"), mask_padding=4, width=64),
    "outpaint": replace(START, width=128, outpaint_right=32, outpaint_steps=2, strength=0.9),
    "hires-network": TWICE,
    "hires-latent": replace(TWICE, hires_upscaler=HiresUpscaler.LATENT),
    "hires-tiles": replace(TWICE, hires_tile=64),
    "denoise-tiles": replace(TEXT, denoise_tile=64),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    machine = Settings(home=Path("/nowhere"), device="cpu")
    return make_plan(TEXT, None, models.find("", Path("/nowhere")), machine)


@pytest.fixture(scope="module")
def pipeline(plan: Plan) -> Iterator[TorchPipeline]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TorchBackend().load(models.find("", Path("/nowhere")), plan)
    torch.set_num_threads(threads)


def psnr(a: Image.Image, b: Image.Image) -> float:
    assert a.size == b.size
    error = np.square(np.asarray(a, float) - np.asarray(b, float)).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.parametrize("name", JOBS)
def test_a_mode_makes_the_picture_that_it_made(
    pipeline: TorchPipeline, plan: Plan, name: str
) -> None:
    (made,) = pipeline.sample([JOBS[name]], plan, lambda step, steps: False)
    assert isinstance(made, Image.Image)
    file = HERE / f"{name}.png"
    if os.environ.get("SDAMD_WRITE_GOLDEN"):
        made.save(file, optimize=True)
    with Image.open(file) as stored:
        assert psnr(made, stored) >= LEAST_PSNR
