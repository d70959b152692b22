import json
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdamd.errors import BadRequest
from sdamd.prompt import (
    BREAK,
    WEIGHT_MAX,
    Fragment,
    Tag,
    extra_networks,
    parse_weights,
    schedule,
    subprompts,
)

VECTORS = json.loads((Path(__file__).parent / "data" / "prompt" / "vectors.json").read_text())


def vectors(group: str) -> pytest.MarkDecorator:
    rows = VECTORS[group]
    return pytest.mark.parametrize("vector", rows, ids=[repr(row["in"]) for row in rows])


def weighed(fragments: tuple[Fragment, ...]) -> list[tuple[str, float]]:
    return [(fragment.text, fragment.weight) for fragment in fragments]


def phases(text: str, steps: int, **options: Any) -> list[list[object]]:
    return [[phase.until, phase.text] for phase in schedule(text, steps, **options)]


# -- what AUTOMATIC1111 says ---------------------------------------------------------------------


@vectors("attention")
def test_weights_are_those_of_a1111(vector: dict[str, Any]) -> None:
    assert weighed(parse_weights(vector["in"])) == [(text, w) for text, w in vector["out"]]


@vectors("schedule")
def test_schedules_are_those_of_a1111(vector: dict[str, Any]) -> None:
    assert phases(vector["in"], vector["steps"]) == vector["out"]
    old = phases(vector["in"], vector["steps"], old_timelines=True)
    assert old == vector["old_timelines"]


@vectors("schedule_hires")
def test_schedules_of_a_second_pass_are_those_of_a1111(vector: dict[str, Any]) -> None:
    made = phases(vector["in"], vector["hires_steps"], first_steps=vector["base_steps"])
    assert made == vector["out"]


@vectors("multicond")
def test_subprompts_are_those_of_a1111(vector: dict[str, Any]) -> None:
    assert weighed(subprompts(vector["in"])) == [(text, w) for text, w in vector["out"]]


@vectors("extra_networks")
def test_tags_are_those_of_a1111(vector: dict[str, Any]) -> None:
    rest, tags = extra_networks(vector["in"])
    assert rest == vector["out"]["prompt"]
    assert [[tag.kind, list(tag.arguments)] for tag in tags] == vector["out"]["nets"]


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", [("", 1)]),
        ("()", [("", 1)]),
        ("(a)(b)", [("ab", 1.1)]),
        ("(a:1.2.3)", [("a:1.2.3", 1.1)]),
        ("(a:)", [("a:", 1.1)]),
        ("(a: 2 )b", [("a", 2), ("b", 1)]),
        ("(a:+2)", [("a", 2)]),
        ("[a:2]", [("a:2", 1 / 1.1)]),
        ("a:2)", [("a:2)", 1)]),
        ("[(a:1.5)]", [("a", 1.5 / 1.1)]),
        ("([a)b]", [("a", 1.0), ("b", 1 / 1.1)]),
        ("(a:0)", [("a", 0)]),
        ("a] b", [("a] b", 1)]),
        ("a\\nb\\", [("anb", 1)]),
        (r"\\\(", [("\\(", 1)]),
        (r"(a\))", [("a)", 1.1)]),
        ("(a BREAK b:1.2)", [("a", 1.2), ("BREAK", -1.2), ("b", 1.2)]),
        ("(a BREAK b:1)", [("a", 1), ("BREAK", -1), ("b", 1)]),
        ("a\n BREAK\n", [("a", 1), ("BREAK", -1), ("", 1)]),
        ("(" * 200 + "a", [("a", WEIGHT_MAX)]),
        ("(a:-99999)", [("a", -WEIGHT_MAX)]),
        ("(a:" + "9" * 5000 + ")", [("a", WEIGHT_MAX)]),
    ],
)
def test_weights(text: str, fragments: list[tuple[str, float]]) -> None:
    made = parse_weights(text)
    assert [f.text for f in made] == [text for text, _ in fragments]
    assert [f.weight for f in made] == pytest.approx([weight for _, weight in fragments])


def test_break_within_a_weight_is_a_word() -> None:
    assert BREAK in parse_weights("(a) BREAK b")
    assert BREAK not in parse_weights("(a BREAK b)")


# -- AND -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [("", 1)]),
        ("AND", [("", 1), ("", 1)]),
        ("a AND\nb:0.5", [("a", 1), ("\nb", 0.5)]),
        ("a:-1 AND b: +.5 ", [("a", -1), (" b", 0.5)]),
        ("(a:1.2) AND [b:c:0.5]", [("(a:1.2)", 1), (" [b:c:0.5]", 1)]),
        ("[a AND b:c:0.5]", [("[a", 1), (" b:c:0.5]", 1)]),
        ("a:b:2.", [("a:b", 2)]),
        ("a:1e2", [("a:1e2", 1)]),
        ("two\nlines :0.5", [("two\nlines :0.5", 1)]),
        ("a:" + "9" * 5000, [("a", WEIGHT_MAX)]),
    ],
)
def test_subprompts(text: str, parts: list[tuple[str, float]]) -> None:
    assert weighed(subprompts(text)) == parts


# -- editing and alternation ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps", "expected"),
    [
        ("", 3, [[3, ""]]),
        ("[[a:b:2]|c]", 4, [[1, "a"], [2, "c"], [3, "b"], [4, "c"]]),
        ("[a|[b|c]]", 4, [[1, "a"], [2, "c"], [3, "a"], [4, "c"]]),
        ("[[[b]]:2]", 4, [[2, ""], [4, "[[b]]"]]),
        ("[[a::1]b:c:3]", 4, [[1, "ab"], [3, "b"], [4, "c"]]),
        ("[a:[b:c:2]:3]", 4, [[3, "a"], [4, "c"]]),
        ("[a:b:99]", 4, [[4, "a"]]),
        ("[a:b:0.5 ]", 4, [[2, "a"], [4, "b"]]),
        ("[a:b:1e0]", 4, [[1, "a"], [4, "b"]]),
        ("[a:b:1e999]", 4, [[4, "a"]]),
        ("[a:b:-1e999]", 4, [[4, "b"]]),
        ("[a:b]", 4, [[4, "[a:b]"]]),
        ("[a:b:c:2]", 4, [[4, "[a:b:c:2]"]]),
        ("[a:b|c]", 4, [[4, "[a:b|c]"]]),
        ("[a:b [c:d:2]]", 4, [[2, "[a:b c]"], [4, "[a:b d]"]]),
        ("[a|(b:1.1)]", 2, [[1, "a"], [2, "(b:1.1)"]]),
        ("((a][:b:c [d:3]", 4, [[3, "((a][:b:c "], [4, "((a][:b:c d"]]),
        ("[a (b] c:d:2]", 4, [[4, "[a (b] c:d:2]"]]),
        ("[a ) b:c:2]", 4, [[4, "[a ) b:c:2]"]]),
        (r"[a\:\]b:c:2]", 4, [[2, r"a\:\]b"], [4, "c"]]),
        ("a | b [c:d:2]", 4, [[2, "a | b c"], [4, "a | b d"]]),
        ("a\\", 4, [[4, "a\\"]]),
    ],
)
def test_schedules(text: str, steps: int, expected: list[list[object]]) -> None:
    assert phases(text, steps) == expected


# -- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("<lora:a>", (1, 1)),
        ("<lora:a:0.5>", (0.5, 0.5)),
        ("<lora:a:0.5:0.25>", (0.5, 0.25)),
        ("<lora:a:unet=0.25>", (1, 0.25)),
        ("<lora:a:te=0.5>", (0.5, 0.5)),
        ("<lora:a:te=-.5:unet= 2 :dyn=3>", (-0.5, 2)),
    ],
)
def test_a_networks_weights_are_of_text_encoder_and_unet(
    text: str, weights: tuple[float, float]
) -> None:
    (tag,) = extra_networks(text)[1]
    assert (tag.kind, tag.name, tag.weights()) == ("lora", "a", weights)


@pytest.mark.parametrize("weight", ["", "strong", "1.2.3", "nan", "te=", "1_0"])
def test_a_networks_weight_that_is_no_number_is_an_error(weight: str) -> None:
    with pytest.raises(BadRequest, match=r"the weight of lora 'a' is .* allowed is a number"):
        Tag(kind="lora", arguments=("a", weight)).weights()


@pytest.mark.parametrize("text", ["I <3: you>", "<lora:>", "<lora>", "<:a>", "a <b", "<a\n:b"])
def test_what_is_no_tag_stays(text: str) -> None:
    assert extra_networks(text) == (text, ())


# -- any text ------------------------------------------------------------------------------------

PIECES = ["a", " ", "\n", "(", ")", "[", "]", ":", "|", "\\", "1.5", "2", "-", "BREAK", "AND",
          ",", "<lora:", ">", "猫", "[a:b:0.5]", "[a|b]", "(a:1.2)"]  # fmt: skip
prompts = st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=80)


@given(prompts, st.integers(1, 30), st.none() | st.integers(1, 30))
@example("[a:b:0.1]", 1, 30)
def test_no_text_is_an_error(text: str, steps: int, first_steps: int | None) -> None:
    for fragment in (*parse_weights(text), *subprompts(text)):
        assert math.isfinite(fragment.weight)
        assert abs(fragment.weight) <= WEIGHT_MAX
    extra_networks(text)
    for old in (False, True):
        made = schedule(text, steps, first_steps=first_steps, old_timelines=old)
        assert made[-1].until == steps
        untils = [phase.until for phase in made]
        assert untils == sorted(set(untils))
        assert untils[0] >= 1
        assert all(a.text != b.text for a, b in pairwise(made))


@given(prompts)
def test_the_fragments_join_to_the_text_without_its_signs(text: str) -> None:
    """Nothing is lost but brackets, weights, backslashes and the blanks around BREAK."""
    joined = "".join(fragment.text for fragment in parse_weights(text))
    rest = iter(text)
    assert all(letter in rest for letter in joined)
    plain = "".join(letter for letter in text if letter not in "()[]\\:").replace("BREAK", "")
    words = "".join(f.text for f in parse_weights(plain))
    assert words == plain


@given(st.text(alphabet=st.characters(exclude_characters="[]()\\:|<>"), max_size=80))
def test_a_text_without_signs_is_itself(text: str) -> None:
    assert phases(text, 5) == [[5, text]]
    assert extra_networks(text) == (text, ())


@given(st.text(max_size=40))
def test_what_is_escaped_is_itself(text: str) -> None:
    escaped = "".join(f"\\{c}" if c in "()[]\\" else c for c in text).replace("BREAK", "")
    assert "".join(f.text for f in parse_weights(escaped)) == text.replace("BREAK", "")


@pytest.mark.parametrize(
    "make",
    [
        lambda n: "(" * n,
        lambda n: "[" * n,
        lambda n: "()" * (n // 2),
        lambda n: "[" * (n // 2) + "]" * (n // 2),
        lambda n: "[" * (n // 2 - 2) + "a|b" + "]" * (n // 2 - 2),
        lambda n: "[a:" * (n // 8) + "b" + ":0.5]" * (n // 8),
        lambda n: "[a|b]" * (n // 5),
        lambda n: ":" + "1" * n,
        lambda n: "(a:" + " " * n,
        lambda n: " " * n,
        lambda n: "BREAK " * (n // 6),
        lambda n: "a :1 AND " * (n // 9),
        lambda n: "<a:" * (n // 3),
        lambda n: "\\" * n,
        lambda n: "(a:1.1)" * (n // 7),
    ],
)
def test_a_hostile_text_is_read_at_once(make: Callable[[int], str]) -> None:
    """A tenth of a second or so; with the square of its length it would take minutes."""
    text = make(100_000)
    start = time.process_time()
    parse_weights(text)
    schedule(text, 3)
    subprompts(text)
    extra_networks(text)
    assert time.process_time() - start < 8
