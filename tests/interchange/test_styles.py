"""Styles and presets of other tools."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdamd.errors import BadMetadata
from sdamd.interchange import fooocus, styles
from sdamd.interchange.styles import MAX_BYTES, Style, read, write_csv
from sdamd.request import PROMPT_MAX_BYTES, Request

NOIR = Style(name="noir", prompt="moody, {prompt}, film", negative_prompt="colour")

# -- reading -------------------------------------------------------------------------------------


@pytest.mark.report("E09")
@pytest.mark.parametrize(
    ("data", "found", "problem"),
    [
        (b'name,prompt,negative_prompt\nnoir,"moody, {prompt}, film",colour\n', [NOIR], ""),
        (b'\xef\xbb\xbfname,prompt,negative_prompt\r\nnoir,"moody, {prompt}, film",colour\r\n',
         [NOIR], ""),
        (b"name,prompt,negative_prompt", [], ""),
        (b"name,text\nold,a {prompt} b\n", [Style(name="old", prompt="a {prompt} b")], ""),
        (b'name,prompt,negative_prompt\nnoir,"moody \x85 caf\xe9",',
         [Style(name="noir", prompt="moody \N{HORIZONTAL ELLIPSIS} caf\xe9")], "line 2 .* cp1252"),
        ("name,prompt\n画廊,风景\n".encode("gb18030"), None, "line 2 .* read as"),
        ("name,prompt\nx,山\n".encode("utf-16"), [Style(name="x", prompt="山")], ""),
        (b"name,prompt,negative_prompt\n---- PEOPLE ----,,\n# a note,,\n\n,,\nx,y,\n",
         [Style(name="x", prompt="y")], ""),
        (b"name,prompt,negative_prompt\nx,y,z,more\n",
         [Style(name="x", prompt="y", negative_prompt="z")], "line 2 has more cells.*more"),
        (b"name,prompt\n,lost\nx,y\n",
         [Style(name="x", prompt="y")], "line 2: a style without a name"),
        (b'name,prompt\nx,"two\nlines"\ny,z\n',
         [Style(name="x", prompt="two\nlines"), Style(name="y", prompt="z")], ""),
        (b"negative_prompt,name,prompt\nn,x,p\n",
         [Style(name="x", prompt="p", negative_prompt="n")], ""),
        (b"name,positive_prompt,negative_prompt\nx,p,n\n",
         [Style(name="x", prompt="p", negative_prompt="n")], ""),
        (b"name,prompt\nx," + b"a" * (PROMPT_MAX_BYTES + 1), [], "line 2: style 'x' has a text of"),
        (b"name,prompt\nx," + b"a" * 200_000 + b"\ny,z\n", [], "line 2: field larger than"),
        (b"name,prompt\nx,a\0b\n", [Style(name="x", prompt="a\ufffdb")], ""),
    ],
)  # fmt: skip
def test_styles_csv_is_read(data: bytes, found: list[Style] | None, problem: str) -> None:
    """What is no UTF-8 is read with a warning, and nothing that is in it is dropped unsaid."""
    got = read(data)
    if found is not None:
        assert list(got.styles) == found
    if problem:
        (said,) = got.problems
        assert re.search(problem, said)
    else:
        assert got.problems == ()


@pytest.mark.parametrize(
    ("value", "found", "problems"),
    [
        ([{"name": "sai-noir", "prompt": "a {prompt}", "negative_prompt": "b"}, {"name": "x"}],
         [Style(name="sai-noir", prompt="a {prompt}", negative_prompt="b"), Style(name="x")], []),
        ({"name": "noir", "description": "d", "prompt": "p", "negative": "n", "extra": "Steps: 3",
          "wildcards": "", "preview": ""},
         [Style(name="noir", prompt="p", negative_prompt="n")],
         ["style 'noir': description: d is not used", "style 'noir': extra: Steps: 3 is not used"]),
        ([{"name": "t", "positive_prompt": "p {prompt}", "negative_prompt": ""}],
         [Style(name="t", prompt="p {prompt}")], []),
        ([{"name": "t", "preset_data": {"positive_prompt": "p", "negative_prompt": "n"}}],
         [Style(name="t", prompt="p", negative_prompt="n")], []),
        ([3, {"prompt": "p"}, {"name": "x", "prompt": 3}], [Style(name="x")],
         ["style 1 is '3'; expected is an object", "style 2: a style without a name",
          "style 'x': prompt: 3 is not used"]),
    ],
    ids=["Fooocus", "SD.Next", "InvokeAI", "InvokeAI's export", "odd"],
)  # fmt: skip
def test_lists_of_styles_are_read(value: object, found: list[Style], problems: list[str]) -> None:
    got = read(json.dumps(value).encode())
    assert list(got.styles) == found
    assert list(got.problems) == problems


@pytest.mark.report("E27")
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no header|"),
        (b"a,b,c\n1,2,3\n", "no header; expected is name,prompt,negative_prompt"),
        (b"[{]", "is not JSON"),
        (b'{"name": "C:\\Users"}', "is not JSON: Invalid"),
        (b'[{"name": "a", "name": "b"}]', "'name' twice"),
        (b"[" * 100_000, "nested too deep"),
        (b"a" * (MAX_BYTES + 1), f"allowed are at most {MAX_BYTES}"),
    ],
)
def test_what_are_no_styles_is_refused(data: bytes, sentence: str) -> None:
    if not data:
        assert read(data).styles == ()
        return
    with pytest.raises(BadMetadata, match=sentence):
        read(data)


@given(st.binary(max_size=300))
@example(b'name\n"')
@example(b"\xff\xfe")
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read(data)
    except BadMetadata as error:
        assert str(error)  # noqa: PT017  # both ways out are right


# -- writing -------------------------------------------------------------------------------------

WORDS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=60
).map(str.strip)


@given(
    st.lists(
        st.builds(
            Style,
            name=WORDS.filter(lambda name: name and not name.startswith(("#", "----"))),
            prompt=WORDS,
            negative_prompt=WORDS,
        )
    )
)
@example([Style(name='a "b", c', prompt="two\nlines", negative_prompt="水墨 \N{FIRE}")])
def test_what_is_written_is_read_again(given_styles: list[Style]) -> None:
    data = write_csv(given_styles)
    assert data.startswith(b"\xef\xbb\xbfname,prompt,negative_prompt\r\n")
    assert read(data) == styles.Styles(styles=tuple(given_styles))


@pytest.mark.parametrize(
    ("style", "prompts"),
    [
        (NOIR, ("moody, a cat, film", "fog, colour")),
        (Style(name="x"), ("a cat", "fog")),
        (Style(name="x", prompt="sharp"), ("a cat, sharp", "fog")),
    ],
)
def test_a_style_takes_the_words_in(style: Style, prompts: tuple[str, str]) -> None:
    assert style.apply("a cat", "fog") == prompts


# -- Fooocus's presets ---------------------------------------------------------------------------

PRESET = {
    "default_model": "juggernautXL_v8Rundiffusion.safetensors",
    "default_refiner": "None",
    "default_refiner_switch": 0.5,
    "default_loras": [[True, "None", 1.0], [True, "offset.safetensors", 0.1], [False, "x", 1.0],
                      ["older.safetensors", 0.5]],
    "default_cfg_scale": 4.0,
    "default_sample_sharpness": 2.0,
    "default_sampler": "dpmpp_2m_sde_gpu",
    "default_scheduler": "karras",
    "default_performance": "Speed",
    "default_prompt": "a [fish]",
    "default_prompt_negative": "",
    "default_styles": ["Fooocus V2"],
    "default_aspect_ratio": "1152*896",
    "checkpoint_downloads": {"juggernautXL_v8Rundiffusion.safetensors": "https://example.org/x"},
    "previous_default_models": [],
}  # fmt: skip


def test_a_preset_of_fooocus_gives_fields_and_fetches_nothing() -> None:
    reading = fooocus.read_preset(json.dumps(PRESET))
    assert reading.request() == Request(
        checkpoint="juggernautXL_v8Rundiffusion", prompt="a \\[fish\\]", guidance_scale=4.0,
        width=1152, height=896, steps=30, scheduler="DPM++ 2M SDE Karras",
    )  # fmt: skip
    assert sorted(f"{u.name}: {u.value}" for u in reading.unused) == [
        "LoRA offset: 0.1", "LoRA older: 0.5", "default_sample_sharpness: 2.0",
        "default_styles: ['Fooocus V2']", "previous_default_models: []",
    ]  # fmt: skip
    key = "checkpoint_downloads: juggernautXL_v8Rundiffusion.safetensors"
    assert reading.notes[key] == "https://example.org/x"


@pytest.mark.report("E27")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"default_aspect_ratio": "wide"}, "width is 'wide'"),
        ({"default_aspect_ratio": "1001*64"}, "width is 1001; allowed multiples of 8"),
        ({"default_cfg_scale": "much"}, "guidance_scale is 'much'"),
        ({"default_cfg_scale": float("nan")}, "guidance_scale is nan"),
        ({"default_overwrite_step": 999}, "steps is 999"),
        ({"default_image_number": 0}, "count is 0"),
        ({"default_model": 3}, "checkpoint is 3; allowed is text"),
    ],
)
def test_a_malformed_preset_is_refused_and_no_default_takes_its_place(
    change: dict[str, object], sentence: str
) -> None:
    reading = fooocus.read_preset(json.dumps(PRESET | change))
    with pytest.raises(BadMetadata, match=sentence):
        reading.request()


@pytest.mark.parametrize(
    ("performance", "steps", "told"),
    [("Quality", 60, False), ("Lightning", 4, True), ("Turbo", None, True)],
)
def test_a_performance_is_a_number_of_steps(
    performance: str, steps: int | None, told: bool
) -> None:
    reading = fooocus.read_preset(json.dumps({"default_performance": performance}))
    assert reading.request().steps == steps
    assert bool(reading.unused) is told
