"""Other tools' weights in prompts mean here what they mean there."""

from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdamd import prompt as language
from sdamd.interchange import weights
from sdamd.prompt import Fragment

TEXTS = st.text(
    st.sampled_from("ab ,:.|[]()\\{}+-<>1AND") | st.characters(exclude_categories=["Cs"])
)
WEIGHTS = st.sampled_from([1.0, 1.1, 1.21, 0.9, 1.5, -1.0, 0.0, 0.33333333])
FRAGMENTS = st.lists(st.builds(lambda t, w: Fragment(text=t, weight=w), TEXTS, WEIGHTS), max_size=6)


def meaning(text: str) -> list[tuple[str, float]]:
    """What sdamd makes of a prompt: its one part's words with their weights, at every step."""
    left, tags = language.extra_networks(text)
    assert tags == ()
    (part,) = language.subprompts(left)
    assert part.weight == 1
    (phase,) = language.schedule(part.text, 20)
    return merged((f.text, round(f.weight, 6)) for f in language.parse_weights(phase.text))


def merged(words: object) -> list[tuple[str, float]]:
    """Neighbours of one weight in one; blanks at the end mean nothing."""
    runs = groupby(((t, w) for t, w in words if t), key=lambda word: word[1])  # type: ignore[attr-defined]
    found = [("".join(t for t, _ in run), w) for w, run in runs]
    if found and found[-1][1] == 1:
        found[-1] = (found[-1][0].rstrip(), 1.0)
    return [word for word in found if word[0]]


@given(FRAGMENTS)
@example([Fragment(text="one AND two BREAK three")])
@example([Fragment(text="game console:1.19")])
@example([Fragment(text="<lora:x:1> [a|b] [a:b:0.5]")])
@example([Fragment(text="a:", weight=1.5), Fragment(text="0.5")])
@example([Fragment(text="\\", weight=1.5)])
@example([Fragment(text="AN"), Fragment(text="D", weight=1.0)])
def test_what_is_written_is_read_as_the_same_words(fragments: list[Fragment]) -> None:
    written = weights.write(fragments)
    assert meaning(written) == merged((f.text, round(f.weight, 6)) for f in fragments)


@given(TEXTS)
@example("AND")
@example("BREAK")
@example("<a:b>")
@example("x:1")
def test_an_escaped_text_is_itself(text: str) -> None:
    assert "".join(t for t, _ in meaning(weights.write([Fragment(text=text)]))) == text.rstrip()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("a cat", "a cat"),
        ("(a cat:1.2), dog", "(a cat:1.2), dog"),
        ("((a))", "((a))"),
        ("((a:1.3) b)", "(a:1.3)( b:1.1)"),  # an explicit weight replaces what is around it
        ("(a (b:0.5):1.4)", "(a :1.4)(b:0.5)"),
        ("(a:1e2)", "(a:100)"),
        ("(a:b)", "(a:b)"),
        ("[a]", "\\[a\\]"),
        ("[a|b] (c)", "\\[a|b\\] (c:1.1)"),
        ("\\(a\\)", "\\(a\\)"),
        ("\\(a\\) (b)", "\\(a\\) (b)"),
        ("a) b", "a) b"),
        ("(a", "\\(a"),  # what is not closed is text there, and 1.1 to the end here
        ("(a:nan)", "(a:nan)"),
        ("", ""),
        ("one AND two", "one A\\ND two"),
        ("a:0.5", "(a:0.5:1)"),
        ("C:\\x", "C:\\\\x"),
        ("{a|b} __x__", "{a|b} __x__"),
    ],
)
def test_comfyuis_weights(theirs: str, ours: str) -> None:
    assert weights.from_comfyui(theirs) == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("a cat", "a cat"),
        ("{cat}", "(cat:1.05)"),
        ("{{cat}} dog", "(cat:1.1025) dog"),
        ("[cat]", "(cat:0.95238095)"),
        ("{[cat]}", "cat"),
        ("(cat)", "\\(cat\\)"),
        ("1.5::night, rain::, sea", "(night, rain:1.5), sea"),
        ("-1::hat::", "(hat:-1)"),
        ("{1.5::night::}", "(night:1.575)"),
        ("a } b", "a } b"),
        ("{open", "(open:1.05)"),
        ("12:30, 3-4", "12:30, 3-4"),
        ("std::vector", "std::vector"),
    ],
)
def test_novelais_weights(theirs: str, ours: str) -> None:
    assert weights.from_novelai(theirs) == ours


@pytest.mark.parametrize(
    ("theirs", "ours", "exact"),
    [
        ("a cat", "a cat", True),
        ("a cat+ and dog++", "a (cat:1.1) and (dog:1.21)", True),
        ("noisy++, jpg+.", "(noisy:1.21), (jpg:1.1).", True),
        ("(a cat)++", "(a cat:1.21)", True),
        ("(a cat)1.3 x", "(a cat:1.3) x", True),
        ("(a cat)", "a cat", True),
        ("(a (big)+ cat)1.5", "(a :1.5)(big:1.65)( cat:1.5)", True),
        ("a grey- cat--", "a (grey:0.9) (cat:0.81)", False),
        ("t-shirt, sci-fi", "t-shirt, sci-fi", True),
        ("C++ + -", "(C:1.21) + -", True),
        ("\\(a\\)", "\\(a\\)", True),
        ("a (b", "a \\(b", True),
        ("[a:b:0.5]", "\\[a:b:0.5\\]", True),
        ('("a", "b").blend(0.7, 0.3)', '("a", "b").blend(0.7, 0.3)', False),
        ('("a", "b").and()', '("a", "b").and()', False),
    ],
)
def test_invokeais_weights(theirs: str, ours: str, exact: bool) -> None:
    written, problems = weights.from_invokeai(theirs)
    assert written == ours
    assert (not problems) is exact


@given(TEXTS)
@example("(" * 5000 + "a" + ")" * 5000)
@example("(a:1.1" * 2000 + ")" * 2000)
@example("{" * 50_000 + "a")
@example("[" * 50_000)
@example("a" + "+" * 50_000)
@example("(a)" + "-" * 50_000)
def test_any_text_becomes_a_prompt(text: str) -> None:
    for written in (
        weights.from_comfyui(text), weights.from_novelai(text), weights.from_invokeai(text)[0],
    ):  # fmt: skip
        language.parse_weights(written)
        assert language.extra_networks(written)[1] == () or ".blend" in text or ".and" in text


def test_embeddings_are_named_once() -> None:
    found = weights.embeddings(
        "embedding:easynegative, (embedding:dir/x.pt:1.2) embedding:easynegative"
    )
    assert found == ["easynegative", "dir/x.pt"]
