import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdamd.errors import BadRequest, unknown
from sdamd.picture import Picture
from sdamd.request import (
    PROMPT_MAX_BYTES,
    SEED_MAX,
    HiresUpscaler,
    Job,
    MaskMode,
    Request,
    ResizeMode,
    limits_of,
    problem_of,
    type_of,
)

FIELDS = {f.name: f for f in dataclasses.fields(Request)}


def problems(values: dict[str, object]) -> list[str]:
    with pytest.raises(BadRequest) as raised:
        Request.from_dict(values)
    return list(raised.value.problems)


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "step"),
    [
        ("width", 64, 16384, 8),
        ("height", 64, 16384, 8),
        ("steps", 1, 150, 1),
        ("guidance_scale", 1, 50, 0.5),
        ("seed", 0, 2**64 - 1, 1),
        ("count", 1, 100_000, 1),
        ("upscale", 1, 4, 1),
    ],
)
def test_the_ends_of_a_range_are_allowed_and_what_lies_beyond_is_not(
    name: str, lowest: float, highest: float, step: float
) -> None:
    for allowed in (lowest, highest):
        assert getattr(Request.from_dict({name: allowed}), name) == allowed
        assert getattr(Request.from_dict({name: str(allowed)}), name) == allowed
    for refused in (lowest - step, highest + step):
        said = f"{name} is {refused}; allowed {limits_of(FIELDS[name]).range_text()}"
        assert problems({name: refused}) == [said]


def test_every_number_has_limits_and_every_field_a_help_text() -> None:
    for asked in FIELDS.values():
        limits = limits_of(asked)
        assert limits.help
        if type_of(asked) is not str:
            assert limits.minimum is not None
            assert limits.maximum is not None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"width": 0}, "width is 0; allowed 64 to 16384"),
        ({"width": 100000}, "width is 100000; allowed 64 to 16384"),
        ({"width": -64}, "width is -64; allowed 64 to 16384"),
        pytest.param(
            {"width": 1001},
            "width is 1001; allowed multiples of 8, the nearest 1000 and 1008",
            id="E29 nearest sizes",
        ),
        ({"width": 16383}, "width is 16383; allowed multiples of 8, the nearest 16376 and 16384"),
        ({"height": 520.5}, "height is 520.5; allowed is a whole number, 64 to 16384"),
        ({"steps": 0}, "steps is 0; allowed 1 to 150"),
        ({"steps": 151}, "steps is 151; allowed 1 to 150"),
        ({"steps": "many"}, "steps is 'many'; allowed is a whole number, 1 to 150"),
        ({"steps": True}, "steps is True; allowed is a whole number, 1 to 150"),
        ({"steps": [1]}, "steps is [1]; allowed is a whole number, 1 to 150"),
        ({"guidance_scale": math.nan}, "guidance_scale is nan; allowed 1 to 50"),
        ({"guidance_scale": math.inf}, "guidance_scale is inf; allowed 1 to 50"),
        ({"guidance_scale": "-inf"}, "guidance_scale is -inf; allowed 1 to 50"),
        ({"guidance_scale": "NaN"}, "guidance_scale is nan; allowed 1 to 50"),
        ({"guidance_scale": False}, "guidance_scale is False; allowed is a number, 1 to 50"),
        ({"guidance_scale": "7_5"}, "guidance_scale is '7_5'; allowed is a number, 1 to 50"),
        ({"guidance_scale": 0.99}, "guidance_scale is 0.99; allowed 1 to 50"),
        ({"guidance_scale": 10**400}, None),
        ({"prompt": 5}, "prompt is 5; allowed is text"),
        ({"prompt": "a\0b"}, "prompt holds a NUL character; allowed is text without it"),
        (
            {"negative_prompt": "a\ud800"},
            "negative_prompt holds a lone surrogate, which is not text; allowed is valid Unicode",
        ),
        ({"count": 0}, "count is 0; allowed 1 to 100000"),
        ({"upscale": 5}, "upscale is 5; allowed 1 to 4"),
        ({"strength": 1.1}, "strength is 1.1; allowed 0 to 1"),
        ({"strength": -0.1}, "strength is -0.1; allowed 0 to 1"),
        ({"resize_mode": "fit"}, "resize_mode is 'fit'; allowed crop, stretch, pad, latent"),
        ({"mask_fill": "x" * 900}, None),
        ({"hires_scale": 9}, "hires_scale is 9.0; allowed 1 to 8"),
        (
            {"outpaint_left": 12},
            "outpaint_left is 12; allowed multiples of 8, the nearest 8 and 16",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    values: dict[str, object], said: str | None
) -> None:
    (problem,) = problems(values)
    if said is not None:
        assert problem == said
    assert len(problem) < 200


@pytest.mark.parametrize(
    "seed", [-1, 2**64, "-1", str(2**64), "", "1e5", "12a", "0x10", "1_000", "٣", 1.5, 2.0**60]
)
def test_a_seed_that_is_none_is_refused_and_never_clipped(seed: object) -> None:
    """C16: seeds were rounded, clipped or silently taken for another."""
    (problem,) = problems({"seed": seed})
    assert problem.startswith("seed is ")
    assert "0 to 2**64-1" in problem


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63, SEED_MAX])
def test_a_seed_survives_as_text(seed: int) -> None:
    """C16: a seed beyond 2**53 loses digits in every reader that takes numbers for doubles."""
    request = Request.from_dict({"seed": str(seed)})
    assert request.seed == seed
    written = json.loads(json.dumps(request.to_dict()))
    assert written["seed"] == str(seed)
    assert Request.from_dict(written) == request


def test_whole_floats_are_whole_numbers_since_forms_send_them() -> None:
    assert Request.from_dict({"steps": 20.0, "seed": 5.0}) == Request(steps=20, seed=5)


def test_blanks_around_a_number_do_not_matter() -> None:
    assert Request.from_dict({"steps": " 20 ", "guidance_scale": " 7.5 "}) == Request(
        steps=20, guidance_scale=7.5
    )


@pytest.mark.parametrize(("letters", "size"), [("a", 1), ("é", 2), ("画", 3), ("🏔", 4)])
def test_a_prompt_is_measured_in_bytes(letters: str, size: int) -> None:
    most = PROMPT_MAX_BYTES // size
    assert Request.from_dict({"prompt": letters * most}).prompt == letters * most
    (problem,) = problems({"prompt": letters * (most + 1)})
    assert problem == f"prompt is {(most + 1) * size} bytes; allowed at most {PROMPT_MAX_BYTES}"


def test_a_prompt_of_100_kb_is_refused_without_repeating_it() -> None:
    assert problems({"prompt": "a" * 100_000}) == ["prompt is 100000 bytes; allowed at most 65536"]


def test_an_empty_prompt_is_allowed() -> None:
    assert Request.from_dict({"prompt": ""}) == Request()


def test_none_means_the_default() -> None:
    nothing = dict.fromkeys(FIELDS)
    assert Request.from_dict(nothing) == Request()


def test_all_problems_are_told_at_once() -> None:
    values = {"width": 0, "steps": 0, "seed": -1, "guidance_scale": "x", "prmpt": "", "count": 2}
    with pytest.raises(BadRequest) as raised:
        Request.from_dict(values)
    assert len(raised.value.problems) == 5
    assert str(raised.value) == "\n".join(raised.value.problems)


def test_the_constructor_checks_the_limits_too() -> None:
    with pytest.raises(BadRequest) as raised:
        Request(width=63, seed=SEED_MAX + 1)
    assert raised.value.problems == (
        "width is 63; allowed 64 to 16384",
        "seed is 18446744073709551616; allowed 0 to 2**64-1",
    )


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("negativ_prompt", "the nearest: negative_prompt, prompt"),
        ("Steps", "the nearest: steps"),
        ("cfg", "known: prompt, negative_prompt, "),
        ("sampler", "the nearest: scheduler"),
    ],
)
def test_an_unknown_field_comes_with_the_nearest(name: str, nearest: str) -> None:
    (problem,) = problems({name: 1})
    assert problem.startswith(f"field {name!r} is not known; {nearest}")


def test_a_long_unknown_name_is_shown_shortened() -> None:
    assert len(unknown("x" * 1_000_000, ["steps"], "field")) < 200


def test_a_long_list_of_names_is_shown_shortened() -> None:
    said = unknown("zzz", [f"name{n}" for n in range(100)], "card")
    assert said.endswith("name10, name11 and 88 more")


# -- round trips ---------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


def multiple_of_8(lowest: int, highest: int) -> st.SearchStrategy[int]:
    return st.integers(lowest // 8, highest // 8).map(lambda n: n * 8)


REQUESTS = st.builds(
    Request,
    prompt=TEXT,
    negative_prompt=TEXT,
    checkpoint=TEXT,
    width=st.none() | multiple_of_8(64, 16384),
    height=st.none() | multiple_of_8(64, 16384),
    steps=st.none() | st.integers(1, 150),
    guidance_scale=st.none() | st.floats(1, 50),
    scheduler=st.none() | TEXT,
    seed=st.none() | st.integers(0, SEED_MAX),
    count=st.integers(1, 100_000),
    upscale=st.none() | st.integers(1, 4),
    init_image=st.none() | TEXT,
    strength=st.none() | st.floats(0, 1),
    mask_mode=st.sampled_from(tuple(MaskMode)),
    mask_padding=st.none() | st.integers(0, 1024),
    hires_scale=st.floats(1, 8),
    hires_upscaler=st.sampled_from(tuple(HiresUpscaler)),
)
PICTURES = st.builds(
    Picture,
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/\\"), max_size=20),
    data=st.just(b""),
)
JOBS = st.builds(
    Job,
    index=st.integers(0, 10**6),
    prompt=TEXT,
    negative_prompt=TEXT,
    checkpoint=TEXT,
    width=multiple_of_8(64, 16384),
    height=multiple_of_8(64, 16384),
    steps=st.integers(1, 150),
    guidance_scale=st.floats(1, 50),
    scheduler=TEXT,
    seed=st.integers(0, SEED_MAX),
    upscale=st.integers(1, 4),
    init_image=st.none() | PICTURES,
    strength=st.none() | st.floats(0, 1),
    mask_image=st.none() | PICTURES,
    mask_padding=st.none() | st.integers(0, 1024),
    resize_mode=st.sampled_from(tuple(ResizeMode)),
    outpaint_left=multiple_of_8(0, 4096),
    hires_scale=st.floats(1, 8),
    hires_steps=st.none() | st.integers(1, 150),
    hires_scheduler=st.none() | TEXT,
    denoise_tile=st.none() | st.integers(0, 64).map(lambda n: n * 64),
)


@given(REQUESTS)
@example(Request(seed=SEED_MAX, guidance_scale=1.0000000000000002))
def test_a_request_survives_json(request: Request) -> None:
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request


@given(REQUESTS)
def test_a_request_survives_as_text_in_every_field(request: Request) -> None:
    """As a command line or a file of comma-separated values carries it."""
    texts = {name: str(value) for name, value in request.to_dict().items()}
    assert Request.from_dict(texts) == request


@given(REQUESTS)
def test_only_what_was_asked_for_is_written(request: Request) -> None:
    for name, value in request.to_dict().items():
        assert value != FIELDS[name].default


@given(JOBS)
def test_a_job_survives_json_and_the_way_to_another_process(job: Job) -> None:
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert pickle.loads(pickle.dumps(job)) == job


@given(JOBS)
def test_a_jobs_request_asks_for_the_same(job: Job) -> None:
    request = job.to_request()
    assert request.count == 1
    for asked in dataclasses.fields(Job):
        value = getattr(job, asked.name)
        if asked.name != "index":
            expected = value.reference if isinstance(value, Picture) else value
            assert getattr(request, asked.name) == expected


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=8), ANYTHING))
def test_whatever_comes_in_is_a_valid_request_or_bad(values: dict[str, object]) -> None:
    try:
        request = Request.from_dict(values)
    except BadRequest as error:
        assert all(error.problems)  # noqa: PT017  # either way is right
    else:
        assert not any(problem_of(f, getattr(request, f.name)) for f in FIELDS.values())
