"""Names of files: legal everywhere, within their budget, inside their folder."""

import re
import unicodedata
from datetime import datetime
from pathlib import PureWindowsPath

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sdamd.errors import BadRequest
from sdamd.filename import NAME_BYTES, TOKENS, Pattern, token_values
from sdamd.request import Job
from sdamd.settings import DEFAULT_FILENAME

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
# A busy machine is no fault of the code.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NOW = datetime(2026, 1, 31, 14, 3, 22)

# The rules of Windows, written anew from its documentation.
WINDOWS_DEVICE = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE
)


def values(*, prompt: str = "mountains by the sea", number: int = 1, **more: str) -> dict[str, str]:
    job = Job(
        index=4,
        prompt=prompt,
        negative_prompt="",
        checkpoint="",
        width=128,
        height=192,
        steps=20,
        guidance_scale=7.5,
        scheduler="DPM++ 2M Karras",
        seed=1234567890,
        upscale=4,
    )
    return token_values(job, checkpoint="embedded", number=number, now=NOW) | more


def assert_legal(name: str, budget: int = NAME_BYTES) -> None:
    assert name
    assert len(name.encode()) <= budget
    assert len(name.encode("utf-16-le")) // 2 <= budget
    assert not re.search(r'[<>:"/\\|?*\x00-\x1f\x7f]', name)
    assert not name.startswith((".", " "))
    assert not name.endswith((".", " "))
    assert not WINDOWS_DEVICE.fullmatch(name)
    assert not WINDOWS_DEVICE.fullmatch(f"{name}.png")
    assert not PureWindowsPath(name).drive
    assert not any(unicodedata.category(letter) in {"Cc", "Cs", "Cn"} for letter in name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (DEFAULT_FILENAME, "00001-1234567890-mountains by the sea"),
        ("[date] [time]", "2026-01-31 14-03-22"),
        ("[checkpoint]_[scheduler]", "embedded_DPM++ 2M Karras"),
        ("[width]x[height], [steps] steps at [guidance_scale]", "512x768, 20 steps at 7.5"),
        ("[index]", "4"),
        ("out", "out"),
        ("[[seed]]", "[1234567890]"),
        ("ab:c", "ab c"),
        ("CON", "_CON"),
        ("...", "untitled"),
        ("山水-[seed]", "山水-1234567890"),
    ],
)
def test_a_pattern_gives_the_name_that_it_looks_like(pattern: str, name: str) -> None:
    assert Pattern.parse(pattern).stem(values()) == name


def test_every_token_has_a_value() -> None:
    assert values().keys() == TOKENS.keys()


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("[number]-[seed]-[prompt]", "00001-1234567890"),
        ("[prompt]-[seed]", "1234567890"),
        ("[number]-[prompt]-[seed]", "00001-1234567890"),
        ("[prompt]", "untitled"),
    ],
)
def test_an_empty_prompt_takes_its_joint_along(pattern: str, name: str) -> None:
    assert Pattern.parse(pattern).stem(values(prompt="")) == name


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("CON", "_CON"),
        ("nul.txt", "_nul.txt"),
        ("NUL.tar.gz", "_NUL.tar.gz"),
        ("com1 .x", "_com1 .x"),
        ("LPT³", "_LPT³"),
        ("CONIN$", "_CONIN$"),
        ("icon", "icon"),
        ("a:b", "a b"),
        ("a/b", "a b"),
        ("..", "untitled"),
        (".", "untitled"),
        (" x. ", "x"),
        (".hidden", "hidden"),
        ("\u202egnp.exe", "gnp.exe"),
        ("a\0b", "ab"),
        ("two\nlines\tand a tab", "two lines and a tab"),
        ('<lora:x:1>, "(cat:1.2)"?*|', "lora x 1 , (cat 1.2)"),
        ("\udc80", "untitled"),
        ("e\u0301", "é"),
        ("../../x", "x"),
        ("C:\\Windows\\x", "C Windows x"),
    ],
)
def test_what_is_illegal_on_any_system_is_put_right(prompt: str, name: str) -> None:
    """E12, F08."""
    stem = Pattern.parse("[prompt]").stem(values(prompt=prompt))
    assert stem == name
    assert_legal(stem)


@pytest.mark.parametrize(
    ("prompt", "letters"),
    [
        ("\N{FIRE}" * 300, "\N{FIRE}"),
        ("山" * 300, "山"),
        ("a" * 251 + ".tmp", "a"),
        ("a" * 1000, "a"),
        ("e\N{COMBINING DOT BELOW}\N{COMBINING DOUBLE ACUTE ACCENT}" * 100, "ẹ\u030b"),
        ("\U0001f1e6\U0001f1f9" * 100, "\U0001f1e6\U0001f1f9"),
        ("\U0001f44d\U0001f3fd" * 100, "\U0001f44d\U0001f3fd"),
        (FAMILY * 50, FAMILY),
    ],
    ids=["emoji", "chinese", "ascii", "long", "accents", "flags", "skin tones", "families"],
)  # fmt: skip
@pytest.mark.parametrize("budget", [251, 139, 60, 45])
def test_a_long_prompt_is_cut_between_letters(prompt: str, letters: str, budget: int) -> None:
    """E11: in bytes, with number and seed kept, and no letter torn apart."""
    stem = Pattern.parse(DEFAULT_FILENAME).stem(values(prompt=prompt), budget=budget)
    assert_legal(stem, budget)
    kept = stem.removeprefix("00001-1234567890-")
    assert kept
    assert kept != stem
    assert kept == letters * (len(kept) // len(letters))


def test_a_heap_of_marks_is_cut_all_the_same() -> None:
    """E11."""
    stem = Pattern.parse("[prompt]").stem(values(prompt="a" + "\u0323" * 500), budget=50)
    assert_legal(stem, 50)
    assert stem.startswith("ạ")


def test_the_suffix_stays_when_the_name_is_cut() -> None:
    """E13."""
    stem = Pattern.parse("[prompt]").stem(values(prompt="x" * 300), suffix="-00012", budget=40)
    assert stem == "x" * 33 + "-00012"


LITERALS = st.text(st.characters(exclude_characters="/\\[]"), max_size=30)
PATTERNS = st.lists(LITERALS | st.sampled_from([f"[{t}]" for t in TOKENS]), max_size=8).map("".join)


@unhurried
@given(pattern=PATTERNS, prompt=st.text(max_size=300), budget=st.integers(28, NAME_BYTES))
@example(pattern="[prompt].[prompt]", prompt="con", budget=28)
@example(pattern="[prompt] .x", prompt="aux", budget=28)
@example(pattern="[seed][seed][seed][seed][seed]", prompt="", budget=28)
@example(pattern=".[prompt]", prompt="", budget=28)
def test_any_name_is_legal_and_within_its_budget(pattern: str, prompt: str, budget: int) -> None:
    """E11, E12, F08."""
    try:
        parsed = Pattern.parse(pattern)
    except BadRequest:
        return
    for suffix in ("", "-00002"):
        stem = parsed.stem(values(prompt=prompt), suffix=suffix, budget=budget)
        assert_legal(stem, budget)
        assert stem.endswith(suffix)


@pytest.mark.parametrize(
    ("pattern", "folders"),
    [
        ("a/b", ("a",)),
        ("a\\b", ("a",)),
        ("[date]/[checkpoint]/[number]", ("2026-01-31", "embedded")),
        ("[prompt]/x", ("mountains by the sea",)),
        ("test/../sub/x", ("sub",)),
        ("./a//b", ("a",)),
        ("con/x", ("_con",)),
        (".../x", ("untitled",)),
    ],
)
def test_a_pattern_may_name_folders_inside(pattern: str, folders: tuple[str, ...]) -> None:
    """F08."""
    assert Pattern.parse(pattern).folder_names(values()) == folders


@pytest.mark.parametrize("prompt", ["..", "../..", "/", "/tmp/x", "..\\x", ".", "", "\0", "C:"])
def test_no_value_leads_out_of_the_folder(prompt: str) -> None:
    """F08: as a folder's or a file's name."""
    pattern = Pattern.parse("[prompt]/[checkpoint]/.[prompt]")
    hostile = values(prompt=prompt, checkpoint=f"../{prompt}")
    for name in (*pattern.folder_names(hostile), pattern.stem(hostile)):
        assert_legal(name)


@pytest.mark.parametrize(
    "pattern",
    ["../x", "a/../../x", "/tmp/x", "\\\\server\\x", "C:\\x", "c:x", "..\\x", " .. /x", "/[seed]"],
)
def test_a_pattern_that_leaves_the_folder_is_refused(pattern: str) -> None:
    """F08."""
    with pytest.raises(BadRequest, match="leaves the output folder"):
        Pattern.parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("a/", "ends in a folder"),
        ("a/..", "ends in a folder"),
        ("[sed]", r"token of the file-name pattern 'sed' is not known; the nearest: .*seed"),
        ("[Promt]-[numbr]", "'Promt'.*prompt.*\n.*'numbr'.*number"),
        ("[]", "'' is not known"),
        ("[number]/x", "only in the file's name"),
        ("a" * 256, "is 256 letters; allowed 255"),
    ],
)
def test_a_wrong_pattern_is_refused_with_every_problem(pattern: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        Pattern.parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "stem", "number"),
    [
        (DEFAULT_FILENAME, "00007-123-a cat", 7),
        (DEFAULT_FILENAME, "00007-123", 7),
        (DEFAULT_FILENAME, "123456-123-a cat", 123456),
        (DEFAULT_FILENAME, "7-123-a cat", 0),
        (DEFAULT_FILENAME, "20260131-120000-a cat", 0),
        (DEFAULT_FILENAME, "holiday 00009-123", 0),
        ("[seed]-[number]", "99999-00008", 8),
        ("[prompt]-[number]-[seed]", "a 12345-00008-123456", 8),
        ("[prompt]-[number]-[seed]", "a 12345-67890-00008-123456", 67890),
        ("[prompt]-[number]", "00008", 8),
        ("[number] and [number]", "00008 and 00008", 8),
        ("[prompt] [number]", "in 12345 00008", 8),
        ("[date]_[number]", "2026-01-31_00010", 10),
        ("[guidance_scale]-[number]", "7.5-00010", 10),
        ("out", "out", 0),
        ("out", "out-00003", 3),
        ("[prompt]", "a cat-00003", 3),
    ],
)
def test_the_number_is_found_in_a_name(pattern: str, stem: str, number: int) -> None:
    """E16."""
    assert Pattern.parse(pattern).highest_number([stem]) == number


@unhurried
@given(
    pattern=PATTERNS.filter(lambda pattern: "[number]" not in pattern),
    prompt=st.text(max_size=40),
    number=st.integers(1, 9_999_999),
)
def test_the_number_of_an_uncut_name_is_never_found_too_low(
    pattern: str, prompt: str, number: int
) -> None:
    """E16: neighbours of digits may hide it, and a text may look like a higher one."""
    try:
        parsed = Pattern.parse(f"{pattern} [number]")
    except BadRequest:
        return
    stem = parsed.stem(values(prompt=prompt, number=number))
    if stem.endswith(f" {number:05d}"):
        assert parsed.highest_number([stem]) >= number


def test_the_highest_of_many_names_counts() -> None:
    """E16."""
    pattern = Pattern.parse(DEFAULT_FILENAME)
    assert pattern.highest_number(["00002-1-x", "00011-1", "junk", "00003-1-x"]) == 11
    assert pattern.highest_number([]) == 0
