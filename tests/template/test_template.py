"""The template language, against dynamicprompts' own answers and against brute force."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdamd.errors import BadRequest
from sdamd.prompt import extra_networks, parse_weights, schedule
from sdamd.template import COUNTED, LETTERS_MAX, NESTING_MAX, Mode, Template, Wildcards, is_template
from sdamd.template.binding import Line

DATA = json.loads(
    (Path(__file__).parents[1] / "data" / "template" / "dynamicprompts.json").read_text()
)

BETTER: dict[str, list[str] | str] = {
    # What dynamicprompts does here is a fault: it refuses a bare % or $, has no escape, reads
    # a wildcard in a LoRA's name, and repeats the name of a missing wildcard forever.
    "<lora:foo__bar__x:1>": ["<lora:foo__bar__x:1>"],
    "$$ 5": ["$$ 5"],
    "100% {a|b}": ["100% a", "100% b"],
    r"\{a|b\}": ["{a|b}"],
    "__missing__": "the wildcard 'missing' is not known",
}


class Named:
    """Wildcards that are in no file."""

    def __init__(self, lines: Mapping[str, Sequence[str | Line]] | None = None) -> None:
        self.lines = lines or {}

    def find(self, pattern: str) -> Mapping[str, Sequence[Line]]:
        if pattern not in self.lines:
            raise BadRequest(f"there is no wildcard {pattern!r}")
        lines = self.lines[pattern]
        return {pattern: [x if isinstance(x, Line) else Line(text=x) for x in lines]}


def every(text: str, **lines: Sequence[str | Line]) -> list[str]:
    return list(Template(text, Named(lines)).combinations())


def drawn(text: str, *, number: int = 0, seed: int = 0, **lines: Sequence[str | Line]) -> str:
    return Template(text, Named(lines)).make(number, seed)


def problem(text: str, **lines: Sequence[str | Line]) -> str:
    with pytest.raises(BadRequest) as caught:
        Template(text, Named(lines))
    return str(caught.value)


# -- what dynamicprompts says --------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wildcards")
    for name, text in DATA["files"].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("vector", DATA["vectors"], ids=[v["template"] for v in DATA["vectors"]])
def test_combinations_are_those_of_dynamicprompts(vector: dict[str, Any], folder: Path) -> None:
    text = vector["template"]
    expected = BETTER.get(text, vector["combinatorial_first_12"])
    if isinstance(expected, str):
        with pytest.raises(BadRequest, match=expected):
            Template(text, Wildcards(folder))
        return
    texts = Template(text, Wildcards(folder)).combinations()
    assert list(itertools.islice(texts, 12)) == expected


# Measured with dynamicprompts 0.31.0 as well, beyond the file.
@pytest.mark.parametrize(
    ("text", "texts"),
    [
        (
            "{2$$a|{b|c}|d}",
            ["a,b", "a,c", "a,d", "b,a", "c,a", "b,d", "c,d", "d,a", "d,b", "d,c"],
        ),
        ("{a|b} {@x|y|z}", ["a x", "b y"]),
        ("{2$$ | $$a|b}", ["a | b", "b | a"]),
        ("{5$$a|b}", ["a,b", "b,a"]),
        ("{0$$a|b}", [""]),
        ("{0-1$$a|b}", ["", "a", "b"]),
        ("{-2$$a|b|c}", ["a", "b", "c", "a,b", "a,c", "b,a", "b,c", "c,a", "c,b"]),
        ("{3$$__colours__}", ["blue,green", "green,blue"]),
        ("%{a ... b ... $$x}", ["a x b ... "]),
        ("%{…$$x}", ["x"]),
        ("__coat(season=winter)__", ["winter coat, winter"]),
        ("__coat(season={a|b})__", ["a coat, a", "a coat, b", "b coat, a", "b coat, b"]),
        ("${season=summer}__coat__", ["summer coat, summer"]),
        ("${x?=b}${x}", ["b"]),
        ("${x:else}", ["else"]),
        ("{a|}", ["a", ""]),
        ("{a||b}", ["a", "", "b"]),
        ("a__colours__b", ["ablueb", "agreenb"]),
        ("{1::a|0::b}", ["a", "b"]),
        ("{a::b|c}", ["a::b", "c"]),
        ("${a-b=1}${a-b}", ["1"]),
        ("__${t:colours}__", ["blue", "green"]),
        ("{!a|b} {c|d}", ["a c", "a d", "b c", "b d"]),
        ("}a", ["}a"]),
        ("{a|b}}", ["a}", "b}"]),
        ("<lora:{a|b}:0.5>", ["<lora:a:0.5>", "<lora:b:0.5>"]),
        ("${x = {a|b}}${x}|${x}", ["a|a", "a|b", "b|a", "b|b"]),
    ],
)
def test_more_combinations_are_those_of_dynamicprompts(text: str, texts: list[str]) -> None:
    found = every(text, colours=["blue", "green"], coat=["${season:spring} coat, ${season:spring}"])
    assert found == texts


# -- what is ours --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("{[a|b]|c}", ["[a|b]", "c"]),  # the prompt's alternation is one option
        ("{[a|b|c}", ["[a", "b", "c"]),  # and a bracket that is not closed is a letter
        ("[{a|b}|c]", ["[a|c]", "[b|c]"]),
        ("{ a | b }", [" a ", " b "]),
        ("{very |}big", ["very big", "big"]),
        (r"{a\|b|c}", ["a|b", "c"]),
        (r"{\(a\)|b\\}", [r"\(a\)", r"b\\"]),
        (r"\\{a|b}", [r"\\a", r"\\b"]),
        (r"\__colours__ {x|y}", ["__colours__ x", "__colours__ y"]),
        (r"\$\{x\} {a|b}", ["${x} a", "${x} b"]),
        ("${a|b} $5 100% {c}", ["$a $5 100% c", "$b $5 100% c"]),
        ("#ff0000 {a|b} # c", ["#ff0000 a # c", "#ff0000 b # c"]),
        ("<lora:__colours__:1>", ["<lora:blue:1>", "<lora:green:1>"]),
        ("<lora:{a__colours__b|c}:1>", ["<lora:a__colours__b:1>", "<lora:c:1>"]),
        ("(a:1.2) BREAK [b:c:0.5] AND {d|e}", [f"(a:1.2) BREAK [b:c:0.5] AND {x}" for x in "de"]),
        ("${x={a|b}}${x=${x}c}${x}", ["ac", "bc"]),  # the value that it had before
        ("{${x=a}|b}${x:none}", ["none", "bnone"]),  # set within an option only
        ("{2$$$$a|b}", ["ab", "ba"]),
        ("a ______ {b}", ["a ______ b"]),
        ("{2-9$$a|b}", ["a,b", "b,a"]),
    ],
)
def test_what_the_prompt_and_old_texts_need_passes_through(text: str, texts: list[str]) -> None:
    assert every(text, colours=["blue", "green"]) == texts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a red house",
        "{word} {{masterpiece}}, best quality",
        '{"prompt": "x", "steps": 5}',
        "smile :} or :{",
        "100% cotton, $5, $$ and %",
        "[a|b] (c:1.2) [d:e:0.5] <lora:foo__bar__x:0.8> BREAK AND \\(x\\)",
        "a | b",
        "snake__case and __ and ____",
        "\\{a|b\\} \\__x__",
        "{a [b|c]}",
        "# not a comment?",
        "50 ${ {5}",
    ],
)
def test_a_text_without_a_choice_is_no_template(text: str) -> None:
    assert not is_template(text)


@pytest.mark.parametrize(
    "text",
    ["{a|b}", "{2$$a}", "__x__", "a{b|", "${x}", "${x=a}", "%{a$$b}", "<lora:__x__:1>", "{{a|b}}"],
)
def test_a_text_with_a_choice_is_a_template(text: str) -> None:
    assert is_template(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a {b|c", r"template, column 3 ('{b|c'): '{' is not closed; \{ is the character itself"),
        ("x\ny {b|c", "line 2, column 3"),
        ("${x={a|b}", "'${' is not closed"),
        ("${x}", "the variable 'x' is not set; set are: none; ${x:text} gives it a default"),
        ("${y=1} ${x}", "set are: y"),
        ("%{a}", "'%{' needs $$ and '}'"),
        ("{5-2$$a|b}", "5-2$$ is no range; allowed is as in 2-5$$"),
        ("{1234567$$a|b}", "over 6 digits"),
        ("{9999999::a|b}", "a weight is 9999999; allowed 0 to 1000000"),
        ("{0::a|0::b}", "all weights are 0"),
        ("__nothing__", "template, column 1 ('__nothing__'): there is no wildcard 'nothing'"),
        ("__coat(winter)__", "'winter' is no argument; allowed is as in season=winter"),
        ("${x={a|b}}__${x}__", "holds a choice; allowed is text"),
        ("__empty__", "the wildcard 'empty' has no line to draw"),
        ("__broken__", "in a line of the wildcard 'broken': template, column 1"),
        ("{" * 99 + "a|b" + "}" * 99, f"nested deeper than {NESTING_MAX}"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, said: str) -> None:
    assert said in problem(text, empty=[], broken=["{a|b"], coat=["x"])


@pytest.mark.parametrize(
    ("lines", "circle"),
    [
        ({"a": ["x", "__a__"]}, "a -> a"),
        ({"a": ["__b__"], "b": ["__c__"], "c": ["{x|__a__}"]}, "a -> b -> c -> a"),
        ({"a": ["__b(x=1)__"], "b": ["${x} __b(x=2)__"]}, "b -> b"),
    ],
)
def test_a_wildcard_that_includes_itself_is_refused_with_the_circle(
    lines: dict[str, list[str]], circle: str
) -> None:
    assert f"includes itself: {circle}" in problem("__a__", **lines)


def test_wildcards_are_nested_only_so_deep() -> None:
    lines = {f"w{i}": [f"{{x|__w{i + 1}__}}"] for i in range(200)} | {"w200": ["x"]}
    assert f"nested deeper than {NESTING_MAX}" in problem("__w0__", **lines)


def test_variables_are_nested_only_so_deep() -> None:
    text = "${x0={a|b}}" + "".join(f"${{x{i}={{a|${{x{i - 1}}}}}}}" for i in range(1, 300))
    assert "nested deeper" in problem(text + "${x299}")


# -- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a", 1),
        ("{a|b|c} {d|e}", 6),
        ("{1|2|3|4|5|6|7|8|9|10}" * 9, 10**9),
        ("{1|2|3|4|5|6|7|8|9|10}" * 1000, COUNTED),
        ("{-9$$a|b|c|d|e|f|g|h|i}", 986_409),
        ("{2$$__big__}", 100_000 * 99_999),
        ("{2-$$__big__}", COUNTED),
        ("{40$$__big__}", COUNTED),
        ("{@a|b}", None),
        ("{~a|b}", None),
        ("{~a|b} {c|d}", 2),
        ("{~word} {@}", 1),
        ("${x=!{a|b}} ${x}", 1),
        ("{a|{~b|c}}", 2),
    ],
)
def test_combinations_are_counted_without_making_them(text: str, count: int | None) -> None:
    before = time.process_time()
    template = Template(text, Named({"big": [f"line {i}" for i in range(100_000)]}))
    assert template.count() == count
    assert len(set(itertools.islice(template.combinations(), 30))) >= min(30, count or 2)
    assert time.process_time() - before < 5


def test_a_billion_combinations_are_made_from_any_number() -> None:
    template = Template("{1|2|3|4|5|6|7|8|9|0}" * 9, Named())
    assert template.make(123_456_788, 0, mode=Mode.COMBINATORIAL) == "234567899"


def test_arrangements_of_too_many_choices_are_refused() -> None:
    template = Template("{2000$$__w__}", Named({"w": ["{a|b}"] * 3000}))
    with pytest.raises(BadRequest, match="too many for the combinatorial mode"):
        template.count()
    assert template.make(0, 1)  # at random it can be drawn


letters = st.text("ab c", max_size=3)
trees: st.SearchStrategy[Any] = st.recursive(
    letters,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("chain", parts))
        | st.tuples(
            st.just("choice"),
            st.lists(inner, min_size=1, max_size=3),
            st.integers(0, 3),
            st.integers(0, 3),
        )
    ),
    max_leaves=8,
)


def written(tree: Any) -> str:
    if isinstance(tree, str):
        return tree
    if tree[0] == "chain":
        return "".join(map(written, tree[1]))
    low, high = sorted(tree[2:])
    return f"{{{low}-{high}$$/$${'|'.join(map(written, tree[1]))}}}"


def brute(tree: Any) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    if tree[0] == "chain":
        return ["".join(parts) for parts in itertools.product(*map(brute, tree[1]))]
    low, high = (min(n, len(tree[1])) for n in sorted(tree[2:]))
    options = [brute(option) for option in tree[1]]
    return [
        "/".join(texts)
        for size in range(low, high + 1)
        for taken in itertools.permutations(options, size)
        for texts in itertools.product(*taken)
    ]


@given(trees)
def test_combinations_are_those_of_brute_force(tree: Any) -> None:
    expected = brute(tree)
    template = Template(written(tree), Named())
    assert template.count() == len(expected)
    if len(expected) <= 500:
        assert list(template.combinations()) == expected


@given(trees, st.integers(0, 2**64 - 1))
def test_what_is_drawn_is_one_of_the_combinations(tree: Any, seed: int) -> None:
    made = Template(written(tree), Named()).make(0, seed)
    expected = brute(tree)
    assert made in expected


# -- hostile texts -------------------------------------------------------------------------------

hostile = st.lists(
    st.sampled_from([*"ab{}|$%_\\[]<>:=!?@~-01.#*(), \n", "__w__", "${x", "$$"]), max_size=40
).map("".join)


@given(hostile)
@example("<a:__w(>)__")
@example("{2$$__w__|}")
@example("${x=!${x=!a}}${x}")
@example("%{%{a$$b}$$c}")
def test_any_text_is_a_template_or_an_error(text: str) -> None:
    try:
        template = Template(text, Named({"w": ["x", "{y|z}"]}))
        count = template.count()
    except BadRequest:
        return
    template.make(0, 1)
    texts = list(itertools.islice(template.combinations(), 300))
    if count is not None and count < 300:
        assert len(texts) == count


@given(st.text())
def test_a_text_without_signs_is_left_letter_for_letter(text: str) -> None:
    text = text.translate(dict.fromkeys(map(ord, "{}_$%\\"), "-"))
    assert not is_template(text)
    assert every(text) == [text] == [drawn(text)]


@given(hostile)
def test_a_text_that_is_no_template_would_not_multiply_either(text: str) -> None:
    if not is_template(text):
        try:
            texts = every(text)
        except BadRequest:
            return  # an emoticon's brace
        assert len(texts) == 1


@given(st.text(st.sampled_from(list("ab(){}[]:|1.0 <>\\,")), max_size=30))
def test_the_prompt_language_can_read_whatever_comes_out(text: str) -> None:
    try:
        made = drawn(text)
    except BadRequest:
        return
    parse_weights(made)
    schedule(extra_networks(made)[0], 5)


@pytest.mark.parametrize(
    "text",
    [
        "{a|b}" * 6_000,
        "__w" * 20_000,
        "[{a|" * 16_000,
        "<a:" * 20_000 + "{a|b}",
        "{a|" + "[b|c]" * 12_000 + "}",
        "\\" * 60_000 + "{a|b}",
        "${x=a}" * 9_000,
        "_" * 60_000 + "{a|b}",
    ],
)
def test_time_grows_with_the_length_of_the_text_and_no_faster(text: str) -> None:
    before = time.process_time()
    is_template(text)
    try:
        template = Template(text, Named())
        template.count()
        template.make(0, 1)
    except BadRequest:
        pass
    assert time.process_time() - before < 10


@pytest.mark.parametrize("mode", [Mode.RANDOM, Mode.COMBINATORIAL])
def test_what_doubles_at_every_level_is_stopped(mode: Mode) -> None:
    text = "${x0=ab}" + "".join(f"${{x{i}=${{x{i - 1}}}${{x{i - 1}}}}}" for i in range(1, 30))
    template = Template(text + "${x29}", Named())
    assert template.count(mode) == 1
    with pytest.raises(BadRequest, match=f"longer than {LETTERS_MAX} characters"):
        template.make(0, 0, mode=mode)


# -- chance --------------------------------------------------------------------------------------


def test_what_a_seed_draws_stays_what_it_was() -> None:
    """These texts are in pictures' names and people's notes: another draw would be a fault."""
    template = Template("{red|blue|green} {2$$ and $$a|b|c} {3::x|y}", Named())
    made = [template.make(0, seed) for seed in (0, 1, 2, 2**64 - 1)]
    assert made == [
        "green a and c x",
        "red a and b x",
        "red b and a x",
        "green b and c x",
    ]


def test_the_same_seed_draws_the_same_and_others_draw_others() -> None:
    template = Template("{1|2|3|4|5|6|7|8}" * 8, Named())
    texts = [template.make(0, seed) for seed in range(100)]
    assert texts == [template.make(0, seed) for seed in range(100)]
    assert len(set(texts)) > 95
    assert template.make(0, 5, stream="prompt") != template.make(0, 5, stream="negative_prompt")


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("{a|b}", {"a": 0.5, "b": 0.5}),
        ("{3::a|b|0::c}", {"a": 0.75, "b": 0.25}),
        ("{1-2$$a|0::b}", {"a": 1.0}),
        ("{2$$8::a|b|b2}", {"a,b": 0.4, "a,b2": 0.4, "b,a": 0.0889, "b2,a": 0.0889,
                            "b,b2": 0.0111, "b2,b": 0.0111}),
        ("{1-2$$a|b}", {"a": 0.25, "b": 0.25, "a,b": 0.25, "b,a": 0.25}),
        ("__hats__", {"hat": 0.75, "cap": 0.25}),
    ],
)  # fmt: skip
def test_at_random_options_come_as_often_as_their_weights_say(
    text: str, shares: dict[str, float]
) -> None:
    hats = [Line(text="hat", weight=3), Line(text="cap")]
    template = Template(text, Named({"hats": hats}))
    found = Counter(template.make(0, seed) for seed in range(4000))
    assert set(found) == set(shares)
    for made, share in shares.items():
        assert found[made] / 4000 == pytest.approx(share, abs=0.03)


def test_several_of_a_wildcard_are_never_the_same_line() -> None:
    template = Template("{3$$__w__}", Named({"w": list("abcdef")}))
    for seed in range(200):
        assert len(set(template.make(0, seed).split(","))) == 3


def test_a_variable_is_drawn_at_each_use_or_once() -> None:
    again = Template("${x={1|2|3|4|5|6}}${x} ${x} ${x} ${x}", Named())
    once = Template("${x=!{1|2|3|4|5|6}}${x} ${x} ${x} ${x}", Named())
    assert any(len(set(again.make(0, seed).split())) > 1 for seed in range(20))
    assert all(len(set(once.make(0, seed).split())) == 1 for seed in range(20))
    assert len({once.make(0, seed) for seed in range(40)}) == 6


def test_in_turn_goes_by_the_number_of_the_picture_whatever_the_seed() -> None:
    template = Template("{@a|{b|c}} __@w__", Named({"w": ["x", "y", "z"]}))
    assert [template.make(n, seed=n * 7) for n in range(6)] == [
        "a x", "b y", "a z", "c x", "a y", "b z",
    ]  # fmt: skip


def test_all_of_a_choice_come_in_turn_at_random_too() -> None:
    template = Template("{!a|b} {!c|d}", Named())
    assert [template.make(n, seed=3) for n in range(5)] == ["a c", "a d", "b c", "b d", "a c"]
