"""Axes and templates: from rows to the requests of single cells and pictures."""

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.batch_file import Axis, Row, expand, parse_axes
from sdamd.errors import BadRequest
from sdamd.request import SEED_MAX, Request
from sdamd.template import Mode, Wildcards, is_template


@pytest.fixture
def wildcards(tmp_path: Path) -> Wildcards:
    (tmp_path / "colour.txt").write_text("red\nblue\ngreen\n")
    (tmp_path / "self.txt").write_text("a __self__\n")
    return Wildcards(tmp_path)


def row(**values: object) -> Row:
    return Row(line=3, where="f.csv line 3", request=Request.from_dict(values))


def made(rows: list[Row], wildcards: Wildcards, **options: object) -> list[Request]:
    found = list(expand(rows, wildcards=wildcards, **options))  # type: ignore[arg-type]
    assert all(row.request for row in found), found
    return [row.request for row in found if row.request]


def problem(one: Row, wildcards: Wildcards, **options: object) -> str:
    (found,) = expand([one], wildcards=wildcards, **options)  # type: ignore[arg-type]
    assert found.request is None
    return "\n".join(found.problems)


# -- axes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("steps=10,20,30", (10, 20, 30)),
        ("steps=1-5", (1, 2, 3, 4, 5)),
        ("steps=5-1", (5, 4, 3, 2, 1)),
        ("steps=10..30(5)", (10, 15, 20, 25, 30)),
        ("steps=10-30(+10), 35", (10, 20, 30, 35)),
        ("steps=1..10[4]", (1, 4, 7, 10)),
        ("steps=7,7,8", (7, 8)),
        ("guidance-scale=1..2(0.2)", (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)),
        ("guidance_scale=1-1.5(0.25)", (1.0, 1.25, 1.5)),
        ("Guidance Scale=7", (7.0,)),
        ("scheduler=Euler a,DPM++ 2M", ("Euler a", "DPM++ 2M")),
        ('prompt="a red house, fog",a', ("a red house, fog", "a")),
        ('prompt="say ""x""",b', ('say "x"', "b")),
        ("seed=18446744073709551615,0", (SEED_MAX, 0)),
    ],
)
def test_an_axis_is_a_field_and_its_values(word: str, values: tuple[object, ...]) -> None:
    (axis,) = parse_axes([word])
    assert axis.values == values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps"], "--vary 'steps': allowed is FIELD=VALUE,VALUE"),
        (["steps="], "a value is missing"),
        (["steps=1,,2"], "a value is missing"),
        (["stpes=1"], "field 'stpes' is not known; the nearest: steps"),
        (["count=1,2"], "field 'count' is not known"),
        (["steps=0-2"], "steps is 0; allowed 1 to 150"),
        (["steps=abc"], "steps is 'abc'; allowed is a whole number"),
        (["steps=1..9(0)"], "has a step of 0; allowed is one above 0"),
        (["steps=1..99999999999"], "'1..99999999999' has too many or no values; allowed are 1"),
        (["steps=1..2[0]"], "has too many or no values"),
        (["guidance_scale=1..2(0.0000001)"], "has too many or no values"),
        (["scheduler=Eular a"], "Eular a"),
        (['prompt="a'], "a double quote is in the wrong place"),
        (["steps=1,2", "steps=3"], "--vary gives steps twice"),
        (["steps=1-150", "seed=1..1000"], "--vary makes 150000 cells; allowed are 10000"),
        (["width=1001"], "the nearest 1000 and 1008"),
    ],
)
def test_a_wrong_axis_is_told(words: list[str], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_axes(words)
    assert said in str(caught.value)


def test_all_that_is_wrong_with_the_axes_is_told_at_once() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_axes(["steps=0,151", "x=1", "width"])
    assert len(caught.value.problems) == 4


@given(st.text(max_size=30), st.sampled_from(["steps", "guidance_scale", "prompt", "scheduler"]))
def test_any_word_is_an_axis_or_an_error(text: str, name: str) -> None:
    try:
        (axis,) = parse_axes([f"{name}={text}"])
    except BadRequest:
        return
    assert 1 <= len(axis.values) <= 1000


def test_axes_make_every_cell_with_one_seed(wildcards: Wildcards) -> None:
    axes = parse_axes(["steps=10,20", "scheduler=Euler,Euler a"])
    found = list(expand([row(prompt="a", count=2)], wildcards=wildcards, axes=axes))
    assert [one.cell for one in found] == [
        ("steps 10", "scheduler Euler"),
        ("steps 10", "scheduler Euler a"),
        ("steps 20", "scheduler Euler"),
        ("steps 20", "scheduler Euler a"),
    ]
    requests = [one.request for one in found if one.request]
    assert [(r.steps, r.scheduler) for r in requests] == [
        (10, "Euler"),
        (10, "Euler a"),
        (20, "Euler"),
        (20, "Euler a"),
    ]
    assert len({r.seed for r in requests}) == 1
    assert requests[0].seed is not None
    assert {r.count for r in requests} == {2}


def test_a_seed_may_be_varied_itself(wildcards: Wildcards) -> None:
    axes = (Axis(field="seed", values=(1, 5)),)
    assert [r.seed for r in made([row(prompt="a")], wildcards, axes=axes)] == [1, 5]


# -- templates -----------------------------------------------------------------------------------


def test_at_random_each_picture_is_a_text_of_its_own_decided_by_its_seed(
    wildcards: Wildcards,
) -> None:
    one = row(prompt="a __colour__ house", negative_prompt="{x|y}", seed=7, count=40)
    requests = made([one], wildcards)
    assert requests == made([one], wildcards)
    assert [r.seed for r in requests] == list(range(7, 47))
    assert {r.count for r in requests} == {1}
    assert {r.prompt for r in requests} == {f"a {c} house" for c in ("red", "blue", "green")}
    # The two prompts are not drawn in step.
    assert len({(r.prompt, r.negative_prompt) for r in requests}) == 6
    (again,) = made([row(prompt=one.request and one.request.prompt, seed=9)], wildcards)
    assert again.prompt == requests[2].prompt


def test_a_seed_that_is_not_given_is_drawn_and_kept(wildcards: Wildcards) -> None:
    first, second = made([row(prompt="{a|b}", count=2)], wildcards)
    assert first.seed is not None
    assert second.seed == first.seed + 1
    assert made([row(prompt="{a|b}", seed=first.seed)], wildcards)[0].prompt == first.prompt


def test_seeds_go_around_from_the_largest(wildcards: Wildcards) -> None:
    requests = made([row(prompt="{a|b}", seed=SEED_MAX, count=2)], wildcards)
    assert [r.seed for r in requests] == [SEED_MAX, 0]


def test_all_combinations_are_made_in_order(wildcards: Wildcards) -> None:
    one = row(prompt="{a|b} __colour__", negative_prompt="{x|y}", seed=1, count=2)
    requests = made([one], wildcards, mode=Mode.COMBINATORIAL)
    assert len(requests) == 2 * 3 * 2 * 2
    assert [(r.prompt, r.negative_prompt, r.seed) for r in requests[:5]] == [
        ("a red", "x", 1),
        ("a red", "x", 2),
        ("a red", "y", 3),
        ("a red", "y", 4),
        ("a blue", "x", 5),
    ]


def test_axes_and_templates_go_together(wildcards: Wildcards) -> None:
    axes = parse_axes(["prompt={a|b} house,a cat"])
    requests = made([row(seed=1)], wildcards, axes=axes, mode=Mode.COMBINATORIAL)
    assert [r.prompt for r in requests] == ["a house", "b house", "a cat"]


def test_literal_rows_and_the_mode_off_leave_braces_alone(wildcards: Wildcards) -> None:
    one = row(prompt="{a|b} __colour__", count=3)
    assert made([one], wildcards, mode=Mode.OFF) == [one.request]
    literal = Row(line=1, where="x", request=one.request, literal=True)
    assert made([literal], wildcards) == [one.request]


def test_a_row_without_choices_stays_as_it_is(wildcards: Wildcards) -> None:
    one = row(prompt="{word} (a:1.2) [b|c] 100% <lora:a__b__c:1>", count=3)
    for mode in Mode:
        assert made([one], wildcards, mode=mode) == [one.request]


def test_too_many_combinations_need_a_limit_and_are_counted_at_once(wildcards: Wildcards) -> None:
    billion = row(prompt="{1|2|3|4|5|6|7|8|9|0}" * 9, seed=0)
    before = time.process_time()
    assert problem(billion, wildcards, mode=Mode.COMBINATORIAL) == (
        "f.csv line 3: its combinations are 1000000000 pictures; "
        "allowed are 100000, or give a limit"
    )
    endless = row(prompt="{@a|b}", seed=0)
    assert "without end" in problem(endless, wildcards, mode=Mode.COMBINATORIAL)
    few = made([billion, endless], wildcards, mode=Mode.COMBINATORIAL, limit=3)
    assert [r.prompt for r in few] == ["1" * 9, "111111112", "111111113", "a", "b", "a"]
    assert time.process_time() - before < 5


def test_nothing_is_made_before_it_is_asked_for(wildcards: Wildcards) -> None:
    rows = (row(prompt="{1|2|3|4|5|6|7|8|9|0}" * 5, seed=i) for i in itertools.count())
    found = expand(rows, wildcards=wildcards, mode=Mode.COMBINATORIAL)
    assert len(list(itertools.islice(found, 5))) == 5


def test_a_limit_holds_for_each_row_without_choices_too(wildcards: Wildcards) -> None:
    requests = made([row(prompt="a", count=9), row(prompt="b")], wildcards, limit=4)
    assert [(r.prompt, r.count) for r in requests] == [("a", 4), ("b", 1)]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a {b|c", "f.csv line 3: prompt: template, column 3 ('{b|c'): '{' is not closed"),
        ("__self__", "includes itself: self -> self"),
        ("__coulor__", "the nearest: colour"),
        ("${x0=ab}" + "".join(f"${{x{i}=${{x{i - 1}}}${{x{i - 1}}}}}" for i in range(1, 29))
         + "${x28}", "grows longer"),
    ],
)  # fmt: skip
def test_a_wrong_template_is_told_with_row_field_and_column(
    prompt: str, said: str, wildcards: Wildcards
) -> None:
    assert said in problem(row(prompt=prompt), wildcards)


def test_a_bad_row_passes_and_the_others_go_on(wildcards: Wildcards) -> None:
    bad = Row(line=1, where="x", problems=("x: wrong",))
    found = list(expand([bad, row(prompt="{a|"), row(prompt="b")], wildcards=wildcards))
    assert [one.request is None for one in found] == [True, True, False]
    assert found[0] == bad


@given(st.text(max_size=40))
def test_a_prompt_without_a_choice_comes_out_letter_for_letter(text: str) -> None:
    try:
        request = Request(prompt=text)
    except BadRequest:
        return
    if not is_template(text):
        one = Row(line=1, where="x", request=request)
        assert list(expand([one], wildcards=Wildcards(Path("nowhere")))) == [
            Row(line=1, where="x", request=request, literal=True)
        ]
