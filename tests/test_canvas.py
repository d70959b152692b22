"""What is drawn on, and how the drawing gets back into the picture."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from sdamd import canvas
from sdamd.errors import BadRequest
from sdamd.picture import Picture
from sdamd.request import Job, MaskFill, MaskMode, ResizeMode


def picture_of(image: Image.Image, name: str) -> Picture:
    written = io.BytesIO()
    image.save(written, "PNG")
    return Picture(sha256=name.ljust(64, "0"), name=name, data=written.getvalue())


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


def box_mask(size: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
    mask = Image.new("L", size, 0)
    ImageDraw.Draw(mask).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=255)
    return mask


@pytest.fixture
def asked(job: Job) -> Job:
    return replace(
        job, width=128, height=64, strength=0.5, init_image=picture_of(noise(128, 64), "a")
    )


GREEN = (0, 255, 0)


def changed(before: Image.Image, after: Image.Image) -> NDArray[np.bool_]:
    touched: NDArray[np.bool_] = (np.asarray(before) != np.asarray(after)).any(-1)
    return touched


def test_a_picture_of_the_size_is_taken_as_it_is(asked: Job) -> None:
    made = canvas.first(asked)
    assert made.picture.tobytes() == made.untouched.tobytes() == noise(128, 64).tobytes()
    assert made.mask is None
    drawn = Image.new("RGB", (128, 64), GREEN)
    assert made.finished(drawn) is drawn


@pytest.mark.parametrize("mode", [ResizeMode.CROP, ResizeMode.STRETCH, ResizeMode.PAD])
@pytest.mark.parametrize("size", [(100, 300), (640, 64), (128, 64), (131, 66), (16, 16)])
def test_every_mode_gives_the_size_that_is_asked_for(
    asked: Job, mode: str, size: tuple[int, int]
) -> None:
    made = canvas.first(replace(asked, resize_mode=mode, init_image=picture_of(noise(*size), "b")))
    assert made.picture.size == (128, 64)
    assert made.picture.mode == "RGB"


def test_a_few_columns_too_many_are_cut_and_the_others_not_resampled(asked: Job) -> None:
    made = canvas.first(replace(asked, init_image=picture_of(noise(133, 66), "b")))
    assert made.picture.tobytes() == noise(133, 66).crop((2, 1, 130, 65)).tobytes()


def test_padding_goes_on_with_the_colours_of_the_edge(asked: Job) -> None:
    red = picture_of(Image.new("RGB", (32, 64), "red"), "red")
    made = canvas.first(replace(asked, resize_mode=ResizeMode.PAD, init_image=red))
    assert made.picture.getcolors() == [(128 * 64, (255, 0, 0))]


def test_for_latent_the_picture_keeps_its_size_in_multiples_of_8(asked: Job) -> None:
    job = replace(asked, resize_mode=ResizeMode.LATENT, init_image=picture_of(noise(77, 45), "b"))
    made = canvas.first(job)
    assert made.picture.size == (72, 40)
    assert made.enlarged == (128, 64)
    assert made.untouched.size == (128, 64)


@given(
    st.tuples(st.integers(0, 100), st.integers(0, 40), st.integers(8, 60), st.integers(8, 40)),
    st.integers(0, 6),
)
def test_what_is_not_masked_stays_to_the_byte(corner: tuple[int, int, int, int], blur: int) -> None:
    left, top, width, height = corner
    box = (left, top, min(128, left + width), min(64, top + height))
    job = Job(
        index=0, prompt="", negative_prompt="", checkpoint="", width=128, height=64, steps=1,
        guidance_scale=1.0, scheduler="Euler", seed=0, upscale=1, strength=1.0, mask_blur=blur,
        init_image=picture_of(noise(128, 64), "a"),
        mask_image=picture_of(box_mask((128, 64), box), "m"),
    )  # fmt: skip
    finished = canvas.first(job).finished(Image.new("RGB", (128, 64), GREEN))
    touched = changed(noise(128, 64), finished)
    far = np.ones((64, 128), bool)
    reach = 4 * blur + 2 if blur else 0  # beyond it a blur of three boxes is zero
    far[max(0, box[1] - reach) : box[3] + reach, max(0, box[0] - reach) : box[2] + reach] = False
    assert not touched[far].any()
    if not blur:
        inside = np.asarray(finished)[box[1] : box[3], box[0] : box[2]]
        assert (inside == GREEN).all()


def test_black_can_be_what_is_drawn(asked: Job) -> None:
    mask = picture_of(box_mask((128, 64), (0, 0, 64, 64)), "m")
    white = canvas.first(replace(asked, mask_image=mask)).mask
    black = canvas.first(replace(asked, mask_image=mask, mask_mode=MaskMode.BLACK)).mask
    assert white is not None
    assert black is not None
    assert (white.getbbox(), black.getbbox()) == ((0, 0, 64, 64), (64, 0, 128, 64))


def test_a_mask_of_another_size_is_scaled(asked: Job) -> None:
    small = picture_of(box_mask((32, 16), (8, 4, 16, 12)), "m")
    made = canvas.first(replace(asked, mask_image=small)).mask
    assert made is not None
    assert made.getbbox() == (32, 16, 64, 48)


def test_transparency_can_be_the_mask(asked: Job) -> None:
    clear = noise(128, 64)
    clear.putalpha(Image.eval(box_mask((128, 64), (0, 0, 40, 64)), lambda level: 255 - level))
    init = picture_of(clear, "clear")
    made = canvas.first(replace(asked, init_image=init, mask_image=init)).mask
    assert made is not None
    assert made.getbbox() == (0, 0, 40, 64)


def test_only_the_masked_region_is_worked_on_and_the_rest_keeps_its_pixels(asked: Job) -> None:
    whole = noise(1000, 700)
    job = replace(
        asked, mask_padding=16, mask_blur=0, init_image=picture_of(whole, "w"),
        mask_image=picture_of(box_mask(whole.size, (500, 300, 560, 340)), "m"),
    )  # fmt: skip
    made = canvas.first(job)
    assert made.picture.size == (128, 64)
    assert made.box is not None
    left, top, right, bottom = made.box
    assert (right - left) / (bottom - top) == pytest.approx(2, rel=0.03)
    assert left <= 484
    assert right >= 576
    finished = made.finished(Image.new("RGB", (128, 64), GREEN))
    assert finished.size == whole.size
    expected = np.zeros((700, 1000), bool)
    expected[300:340, 500:560] = True
    assert (changed(whole, finished) == expected).all()


@given(
    st.integers(1, 300), st.integers(1, 200), st.integers(1, 300), st.integers(1, 200),
    st.integers(0, 400), st.integers(64, 512), st.integers(64, 512),
)  # fmt: skip
def test_a_region_holds_the_mask_and_lies_in_the_picture(
    left: int, top: int, right: int, bottom: int, padding: int, width: int, height: int
) -> None:
    masked = (min(left, right), min(top, bottom), max(left, right) + 1, max(top, bottom) + 1)
    made = canvas._widened(masked, padding, (width, height), (301, 201))
    assert 0 <= made[0] <= masked[0] < masked[2] <= made[2] <= 301
    assert 0 <= made[1] <= masked[1] < masked[3] <= made[3] <= 201


def test_outpainting_keeps_the_picture_but_for_a_seam(asked: Job) -> None:
    job = replace(asked, width=192, height=64, outpaint_right=64, mask_blur=2)
    made = canvas.first(job)
    assert made.picture.size == (192, 64)
    finished = made.finished(Image.new("RGB", (192, 64), GREEN))
    kept = 128 - 2 * canvas.REACH * 2 - 2
    left = (0, 0, kept, 64)
    assert finished.crop(left).tobytes() == noise(128, 64).crop(left).tobytes()
    assert set(finished.crop((128, 0, 192, 64)).get_flattened_data()) == {GREEN}


def test_rounds_add_up_to_what_is_asked_for_in_multiples_of_8(asked: Job) -> None:
    job = replace(asked, outpaint_left=40, outpaint_top=8, outpaint_right=136, outpaint_steps=3)
    every = list(canvas.rounds(job))
    assert [sum(side) for side in zip(*every, strict=True)] == [40, 8, 136, 0]
    assert all(margin % 8 == 0 and margin >= 0 for margins in every for margin in margins)


def test_masked_ground_may_take_the_colours_around_it(asked: Job) -> None:
    red = Image.new("RGB", (128, 64), "red")
    red.paste("blue", (40, 20, 80, 44))
    job = replace(
        asked, init_image=picture_of(red, "r"), mask_fill=MaskFill.FILL,
        mask_image=picture_of(box_mask((128, 64), (40, 20, 80, 44)), "m"),
    )  # fmt: skip
    assert canvas.first(job).picture.getcolors() == [(128 * 64, (255, 0, 0))]


def test_filling_goes_smoothly_from_one_side_to_the_other() -> None:
    ground = Image.new("RGB", (96, 64), "black")
    ground.paste("white", (64, 0, 96, 64))
    known = Image.new("L", (96, 64), 255)
    known.paste(0, (32, 0, 64, 64))
    row = np.asarray(canvas.filled(ground, known), int)[32, :, 0]
    assert np.diff(row).max() < 40
    assert (np.diff(row) >= -2).all()
    assert (row[:32] == 0).all()
    assert (row[64:] == 255).all()


def test_a_picture_without_its_bytes_is_a_sentence(asked: Job) -> None:
    bare = Picture(sha256="a" * 64, name="cat.png")
    with pytest.raises(BadRequest, match=r"init_image 'cat\.png' is here without its bytes"):
        canvas.first(replace(asked, init_image=bare))
