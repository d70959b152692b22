import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sdamd.batch import DRAWN_SEED_MAX, expand
from sdamd.checkpoint import FAMILIES
from sdamd.errors import BadRequest
from sdamd.request import SEED_MAX, Job, Request
from sdamd.scheduler import resolve


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_request_leaves_open_is_the_familys(name: str) -> None:
    family = FAMILIES[name]
    (job,) = expand(Request(prompt="a", seed=5), family)
    assert job == Job(
        index=0,
        prompt="a",
        negative_prompt="",
        checkpoint="",
        width=family.width,
        height=family.height,
        steps=family.defaults.steps,
        guidance_scale=family.defaults.guidance_scale,
        scheduler=family.defaults.scheduler,
        seed=5,
        upscale=family.defaults.upscale,
    )


def test_what_a_request_says_holds_for_every_picture() -> None:
    request = Request(
        prompt="a",
        negative_prompt="b",
        checkpoint="c",
        width=64,
        height=72,
        steps=1,
        guidance_scale=1.0,
        scheduler="k_euler_ancestral",
        seed=9,
        count=3,
        upscale=2,
    )
    for index, job in enumerate(expand(request, FAMILIES["sd15"])):
        assert job.to_request() == Request.from_dict(
            request.to_dict() | {"count": 1, "seed": 9 + index, "scheduler": "Euler a"}
        )
        assert job.index == index


@given(st.integers(0, SEED_MAX), st.integers(1, 50))
def test_picture_i_has_seed_plus_i_around_the_end(seed: int, count: int) -> None:
    jobs = list(expand(Request(seed=seed, count=count), FAMILIES["tiny"]))
    assert [job.index for job in jobs] == list(range(count))
    assert [job.seed for job in jobs] == [(seed + i) % 2**64 for i in range(count)]


def test_the_seed_after_the_largest_is_0() -> None:
    """C16: nothing is clipped at the end of the range."""
    jobs = expand(Request(seed=SEED_MAX, count=2), FAMILIES["tiny"])
    assert [job.seed for job in jobs] == [SEED_MAX, 0]


def test_seed_0_is_a_seed_and_not_a_missing_one() -> None:
    assert next(expand(Request(seed=0), FAMILIES["tiny"])).seed == 0


def test_a_missing_seed_is_drawn_below_2_to_the_32() -> None:
    drawn = {next(expand(Request(), FAMILIES["tiny"])).seed for _ in range(20)}
    assert len(drawn) > 15
    assert all(0 <= seed <= DRAWN_SEED_MAX for seed in drawn)


def test_a_hundred_thousand_pictures_are_not_made_before_the_first() -> None:
    jobs = expand(Request(seed=1, count=100_000), FAMILIES["tiny"])
    assert [job.seed for job in islice(jobs, 2)] == [1, 2]


def test_a_scheduler_has_its_one_name_in_a_job() -> None:
    (job,) = expand(Request(scheduler="dpmpp_2m_k"), FAMILIES["tiny"])
    assert job.scheduler == resolve("DPM++ 2M Karras") == "DPM++ 2M Karras"


def test_an_unknown_scheduler_comes_with_the_nearest() -> None:
    with pytest.raises(BadRequest, match="scheduler 'Eular' is not known; the nearest: Euler"):
        next(expand(Request(scheduler="Eular"), FAMILIES["tiny"]))


@pytest.mark.parametrize(
    ("request_", "problems"),
    [
        (
            Request(prompt="a <lora:x:0.8>, <lora:x:0.8> b"),
            ["prompt asks for the LoRA 'x'; this version cannot use LoRAs yet"],
        ),
        (
            Request(prompt="<hypernet:h:1>", negative_prompt="<lora:n>", scheduler="no such"),
            [
                "prompt asks for the hypernet 'h'; this version cannot use hypernets yet",
                "negative_prompt asks for the LoRA 'n'; this version cannot use LoRAs yet",
                "scheduler",
            ],
        ),
    ],
)
def test_a_network_in_a_prompt_is_refused_and_not_read_as_words(
    request_: Request, problems: list[str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        list(expand(request_, FAMILIES["sd15"]))
    for said, problem in zip(caught.value.problems, problems, strict=True):
        assert said.startswith(problem)


# -- modes ---------------------------------------------------------------------------------------


def a_file(folder: Path, name: str, size: tuple[int, int], colour: object = "grey") -> str:
    """A picture of one colour but for its left half, which is white."""
    image = Image.new("RGBA", size, colour)  # type: ignore[arg-type]  # a colour
    image.paste("white", (0, 0, size[0] // 2, size[1]))
    image.save(folder / name)
    return str(folder / name)


def refused(asked: Request, family: str = "sd15") -> list[str]:
    with pytest.raises(BadRequest) as caught:
        list(expand(asked, FAMILIES[family]))
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("family", "picture", "asked", "size"),
    [
        ("sd15", (512, 768), {}, (512, 768)),
        ("sd15", (1001, 777), {}, (1000, 776)),
        ("sd15", (4000, 3000), {}, (1184, 888)),  # four times the pixels of 512 x 512
        ("sdxl", (1536, 1024), {}, (1536, 1024)),
        ("sd15", (40, 60), {}, (64, 96)),
        ("sd15", (4000, 3000), {"width": 512}, (512, 384)),
        ("sd15", (4000, 3000), {"height": 384}, (512, 384)),
        ("sd15", (4000, 3000), {"width": 512, "height": 512}, (512, 512)),
        ("sd15", (512, 512), {"outpaint_left": 64, "outpaint_top": 128}, (576, 640)),
        ("sd15", (4000, 3000), {"mask_padding": 32}, (512, 512)),
    ],
)
def test_a_picture_keeps_its_size_where_none_is_asked_for(
    tmp_path: Path,
    family: str,
    picture: tuple[int, int],
    asked: dict[str, Any],
    size: tuple[int, int],
) -> None:
    path = a_file(tmp_path, "a.png", picture)
    if "mask_padding" in asked:
        asked = {**asked, "mask_image": a_file(tmp_path, "m.png", picture, "black")}
    (job,) = expand(Request(init_image=path, **asked), FAMILIES[family])
    assert (job.width, job.height) == size


def test_a_picture_to_start_from_is_its_content_and_name_in_a_job(tmp_path: Path) -> None:
    path = a_file(tmp_path, "a.png", (64, 64))
    (job,) = expand(Request(init_image=path), FAMILIES["tiny"])
    assert job.init_image is not None
    assert job.init_image.name == "a.png"
    assert (job.strength, job.upscale) == (0.75, 1)
    written = json.dumps(job.to_dict())
    assert str(tmp_path) not in written
    again = Job.from_dict(json.loads(written))
    assert again == job
    assert again.pictures[0].data == b""
    filled = again.with_pictures({job.init_image.sha256: job.init_image.data})
    assert filled.pictures[0].data == Path(path).read_bytes()
    (found,) = expand(job.to_request(), FAMILIES["tiny"], [tmp_path])
    assert found == job


@pytest.mark.parametrize(
    ("asked", "problems"),
    [
        ({"strength": 0.5}, ["strength is given without init_image"]),
        (
            {"mask_image": "m.png", "outpaint_left": 8},
            ["mask_image is given without", "outpaint_left is given without"],
        ),
        ({"init_image": "gone.png"}, ["init_image gone.png does not exist"]),
        (
            {"init_image": "a.png", "mask_image": "gone.png", "scheduler": "no such"},
            ["scheduler 'no such'", "mask_image gone.png does not exist"],
        ),
        ({"init_image": "a.png", "mask_padding": 8}, ["mask_padding is given without mask_image"]),
        (
            {"init_image": "a.png", "mask_image": "wide.png"},
            ["mask_image 'wide.png' is 128 x 32 pixels; allowed is the shape of the init image"],
        ),
        (
            {"init_image": "a.png", "mask_image": "black.png"},
            ["mask_image 'black.png' has nothing white, so nothing would be drawn anew"],
        ),
        (
            {"init_image": "a.png", "mask_image": "white.png", "mask_mode": "black"},
            ["mask_image 'white.png' has nothing black"],
        ),
        (
            {"init_image": "a.png", "mask_image": "alpha"},
            ["mask_image is alpha, and the init image has nothing transparent"],
        ),
        (
            {"init_image": "a.png", "mask_image": "m.png", "resize_mode": "latent"},
            ["resize_mode is latent; allowed without mask_image and outpainting"],
        ),
        (
            {"init_image": "a.png", "width": 96, "height": 64, "outpaint_left": 64},
            ["outpainting leaves 32 x 64 of 96 x 64 pixels"],
        ),
        (
            {"init_image": "a.png", "mask_image": "m.png", "mask_padding": 8, "hires_scale": 2},
            ["hires_scale is 2 with mask_padding"],
        ),
        (
            {"width": 8192, "height": 512, "hires_scale": 4, "hires_scheduler": "Eular"},
            ["scheduler 'Eular' is not known", "hires_scale is 4, which makes 32768 x 2048 pixels"],
        ),
    ],
)
def test_what_does_not_go_together_is_said_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], problems: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a_file(tmp_path, "a.png", (64, 64))
    a_file(tmp_path, "m.png", (64, 64), "black")
    a_file(tmp_path, "wide.png", (128, 32), "black")
    Image.new("L", (64, 64), 0).save("black.png")
    Image.new("L", (64, 64), 255).save("white.png")
    said = refused(Request(**asked))
    assert len(said) == len(problems)
    for sentence, problem in zip(said, problems, strict=True):
        assert sentence.startswith(problem)


@pytest.mark.report("E29")
@pytest.mark.parametrize("scale", [1.1, 1.3, 1.5, 1.77, 2, 7.9])
def test_a_second_pass_has_sides_in_multiples_of_8(scale: float) -> None:
    (job,) = expand(Request(width=520, height=776, hires_scale=scale), FAMILIES["sd15"])
    for side, before in zip(job.hires_size, (520, 776), strict=True):
        assert side % 8 == 0
        assert abs(side - before * scale) <= 4


def test_a_second_pass_takes_from_the_first_what_is_not_said() -> None:
    (job,) = expand(Request(hires_scale=2, steps=7, hires_guidance_scale=3), FAMILIES["tiny"])
    assert (job.hires_steps, job.hires_scheduler) == (7, job.scheduler)
    assert (job.hires_guidance_scale, job.upscale) == (3, 1)
    off = job.without_hires()
    assert off == next(expand(Request(seed=job.seed, steps=7, upscale=1), FAMILIES["tiny"]))


def test_modes_that_are_off_leave_no_trace_in_a_job() -> None:
    asked = Request(seed=1, hires_steps=5, mask_blur=9, hires_tile=64, outpaint_steps=3)
    assert list(expand(asked, FAMILIES["sd15"])) == list(expand(Request(seed=1), FAMILIES["sd15"]))
