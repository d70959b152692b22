from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
