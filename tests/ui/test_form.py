"""The form is made from the request's fields, and its values make a request."""

import re
from dataclasses import Field, fields
from string import Formatter
from typing import Any

import pytest

from sdamd import scheduler
from sdamd.checkpoint import FAMILIES
from sdamd.errors import BadRequest
from sdamd.request import SEED_MAX, Request
from ui.form import make_field, make_fields, own_values, to_request
from ui.i18n import CHINESE, ENGLISH, TEXTS, help_key, label_key, language_of, translations

FIELDS = {asked.name: asked for asked in fields(Request)}
I18N = translations()


def texts(language: str) -> dict[str, str]:
    known: dict[str, str] = I18N.translations_dict[language]
    return known


def test_every_field_has_one_component_in_the_order_of_the_request() -> None:
    assert list(make_fields(I18N, list(reversed(FIELDS)))) == list(FIELDS)


@pytest.mark.parametrize("asked", FIELDS.values(), ids=list(FIELDS))
def test_an_untouched_component_means_the_default(asked: Field[Any]) -> None:
    component = make_field(asked, I18N)
    assert to_request({asked.name: component.value}) == Request()


@pytest.mark.parametrize(
    ("name", "kind", "step"),
    [
        ("prompt", "textbox", None),
        ("negative_prompt", "textbox", None),
        ("checkpoint", "dropdown", None),
        ("width", "textbox", "step-8"),
        ("height", "textbox", "step-8"),
        ("steps", "textbox", "step-1"),
        ("guidance_scale", "textbox", "step-0.5"),
        ("scheduler", "dropdown", None),
        ("seed", "textbox", "step-1"),
        ("count", "textbox", "step-1"),
        ("upscale", "textbox", "step-1"),
    ],
)
def test_a_component_fits_its_field(name: str, kind: str, step: str | None) -> None:
    component = make_field(FIELDS[name], I18N)
    assert component.get_block_name() == kind
    assert component.elem_classes == ([step] if step else [])
    assert component.elem_id == f"field-{name}"


def test_prompts_have_several_lines_and_numbers_one() -> None:
    assert make_field(FIELDS["prompt"], I18N).lines > 2
    assert make_field(FIELDS["seed"], I18N).max_lines == 1


def test_all_schedulers_are_offered_after_the_models_own_and_others_can_be_typed() -> None:
    component = make_field(FIELDS["scheduler"], I18N)
    assert [value for _, value in component.choices] == ["", *scheduler.names()]
    assert component.allow_custom_value


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_empty_components_show_what_the_model_brings(family: Any) -> None:
    own = own_values(family, ENGLISH)
    assert own["width"]["placeholder"] == str(family.width)
    assert own["steps"]["placeholder"] == str(family.defaults.steps)
    first, value = own["scheduler"]["choices"][0]
    assert (first, value) == (f"{family.defaults.scheduler} (default)", "")
    assert set(own) == {"width", "height", "steps", "guidance_scale", "scheduler", "upscale"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prompt": "a", "steps": "", "scheduler": "", "checkpoint": ""}, Request(prompt="a")),
        ({"width": " 512 ", "height": "64"}, Request(width=512, height=64)),
        ({"guidance_scale": "7.5"}, Request(guidance_scale=7.5)),
        ({"prompt": "  kept  "}, Request(prompt="  kept  ")),
        ({"checkpoint": None, "scheduler": None}, Request()),
        ({"count": ""}, Request()),
    ],
)
def test_values_make_a_request(values: dict[str, object], expected: Request) -> None:
    assert to_request(values) == expected


@pytest.mark.parametrize(
    "seed", [0, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 6687881544318117707, 2**63, SEED_MAX]
)
def test_a_seed_is_exact_to_the_last_digit(seed: int) -> None:
    """C16: big seeds were rounded or clipped."""
    assert to_request({"seed": str(seed)}).seed == seed


@pytest.mark.parametrize("seed", ["18446744073709551616", "-1", "1e5", "12a", "1_0", "٣"])
def test_what_is_no_seed_is_refused_and_not_clipped(seed: str) -> None:
    """C16: torch takes -1 for 2**64-1."""
    with pytest.raises(BadRequest, match=r"seed is .*; allowed .*0 to 2\*\*64-1"):
        to_request({"seed": seed})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(BadRequest) as caught:
        to_request({"width": "100", "steps": "9999", "guidance_scale": "abc", "count": "0"})
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "width", "steps", "guidance_scale", "count",
    ]  # fmt: skip


# -- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", [ENGLISH, CHINESE])
@pytest.mark.parametrize("asked", FIELDS.values(), ids=list(FIELDS))
def test_every_field_has_a_label_and_help(asked: Field[Any], language: str) -> None:
    known = texts(language)
    assert known[label_key(asked)]
    assert known[help_key(asked)]
    if language == CHINESE:
        assert re.search(r"[\u4e00-\u9fff]", known[label_key(asked)])


def test_help_says_what_is_allowed() -> None:
    assert texts(ENGLISH)["help width"] == (
        "Width in pixels, before upscaling (64 to 16384; multiples of 8; empty: the model's own)"
    )
    assert texts(CHINESE)["help steps"] == "去噪步数（1 至 150；留空则用模型默认值）"


def test_both_languages_say_the_same_things_with_the_same_values() -> None:
    assert texts(ENGLISH).keys() == texts(CHINESE).keys()
    for key, english in TEXTS[ENGLISH].items():
        assert _slots(english) == _slots(TEXTS[CHINESE][key]), key


def _slots(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        ("zh-CN,zh;q=0.9,en;q=0.8", CHINESE),
        ("zh", CHINESE),
        ("de-DE,de;q=0.9,zh;q=0.5", CHINESE),
        ("en-GB", ENGLISH),
        ("fr", ENGLISH),
        ("", ENGLISH),
        (None, ENGLISH),
    ],
)
def test_the_language_is_the_browsers(accepted: str | None, language: str) -> None:
    assert language_of(accepted) == language
