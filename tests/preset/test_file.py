"""Preset files: what is read, what is refused and where, and that writing loses nothing."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.errors import BadRequest
from sdamd.preset import Need, Preset, read, write
from sdamd.preset.file import MAX_BYTES
from sdamd.preset.library import entries, shipped_folder

MINIMAL = 'schema = 1\nname = "x"\n'
SHA = "ab" * 32


def problems_of(text: str | bytes) -> tuple[str, ...]:
    data = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(BadRequest) as caught:
        read(data, "p.toml")
    return caught.value.problems


def test_a_whole_preset_is_read() -> None:
    preset = read(
        f"""
        schema = 1
        name = "Portrait"
        description = "one person"
        author = "Ann"
        licence = "CC0-1.0"
        tags = ["a", "b"]
        families = ["sd15", "sdxl"]
        [request]
        width = 512
        prompt = "photo of {{prompt}}"
        [needs.checkpoint]
        name = "some-model"
        sha256 = "{SHA}"
        url = "https://example.org/model"
        [[needs.loras]]
        name = "detail.safetensors"
        [tiers.16]
        width = 768
        """.encode(),
        "p.toml",
    )
    assert preset == Preset(
        name="Portrait", description="one person", author="Ann", licence="CC0-1.0",
        tags=("a", "b"), families=("sd15", "sdxl"),
        values={"width": 512, "prompt": "photo of {prompt}"},
        needs=(
            Need(kind="checkpoint", name="some-model", sha256=SHA, url="https://example.org/model"),
            Need(kind="loras", name="detail.safetensors"),
        ),
        tiers={16: {"width": 768}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        (MINIMAL + "[request]\nwidht = 3", "line 4, column 1", "the nearest: width"),
        (MINIMAL + "[request]\n  width = 3", "line 4, column 3", "width is 3; allowed 64 to 16384"),
        (MINIMAL + "[request]\nsteps = 2.5", "line 4", "allowed is a whole number"),
        (MINIMAL + "[request]\nsteps = true", "line 4", "allowed is a whole number"),
        (MINIMAL + "[request]\nguidance_scale = nan", "line 4", "guidance_scale is nan"),
        (MINIMAL + "[request]\nguidance_scale = inf", "line 4", "guidance_scale is inf"),
        (MINIMAL + '[request]\nscheduler = "Eulr a"', "line 4", "the nearest: Euler a"),
        (MINIMAL + '[request]\ncheckpoint = "m"', "line 4", "allowed is [needs.checkpoint]"),
        (MINIMAL + '[request]\ninit_image = "a.png"', "line 4", "presets hold no paths"),
        (MINIMAL + "request = 3", "line 3", "allowed is a table"),
        (MINIMAL + "[tiers.9]\nwidth = 512", "line 3", "allowed are 8, 12, 16, 24 GiB"),
        (MINIMAL + "[tiers.16]\nwidth = 1", "line 4", "width is 1"),
        (MINIMAL + "[needs.model]\nname = 'a'", "line 3", "need 'model' is not known"),
        (MINIMAL + '[needs.vae]\nurl = "https://a"', "line 3", "name is missing"),
        (MINIMAL + '[needs.vae]\nname = "a"\nsha256 = "12"', "line 5", "allowed are 64 digits"),
        (MINIMAL + '[needs.vae]\nname = "a"\nurl = "file:///a"', "line 5", "https://"),
        (MINIMAL + "[[needs.loras]]\nname='a'\n[[needs.loras]]\nname='b'\nx=1", "line 7", "'x'"),
        (MINIMAL + "[needs.loras]\nname='a'", "line 3", "allowed is a table [[needs.loras]]"),
        (MINIMAL + 'families = ["sd16"]', "line 3", "family 'sd16' is not known"),
        (MINIMAL + "tags = 3", "line 3", "allowed is a list"),
        (MINIMAL + 'tags = [""]', "line 3", "tag is 0 letters"),
        (MINIMAL + 'description = "a\\nb"', "line 3", "without control characters"),
        (MINIMAL + 'licence = "\\u202e"', "line 3", "without control characters"),
        (MINIMAL + "author = 3", "line 3", "author is 3; allowed is text"),
        (MINIMAL + 'authr = "x"', "line 3", "the nearest: author"),
        ('name = "x"', "line 1", "schema is missing"),
        ('schema = "1"\nname = "x"', "line 1", "schema is '1'; allowed is 1"),
        ("schema = 1", "line 1", "name is missing"),
        ('schema = 1\nname = "  "', "line 2", "allowed 1 to 80"),
        ('schema = 2\nname = "x"\nnew = 1', "line 1", "a newer one is needed"),
    ],
)  # fmt: skip
def test_each_fault_is_told_with_its_place(text: str, place: str, sentence: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith("p.toml, ")
    assert place in problem
    assert sentence in problem


def test_all_faults_are_told_at_once() -> None:
    text = 'schema = 1\nnam = "x"\n[request]\nwidth = 1\nheight = 1\n[tiers.7]\n'
    assert len(problems_of(text)) == 5


def test_what_stands_in_a_text_of_several_lines_is_no_key() -> None:
    text = MINIMAL + '[request]\nprompt = """\nwidth = 1\n[needs]\n"""\nheight = 7\n'
    assert "line 8, column 1" in problems_of(text)[0]


@pytest.mark.report("E28")
@pytest.mark.parametrize(
    "name",
    ["../x", "..", "C:\\models\\x.safetensors", "/home/alice/x", "sub\\x", "sub/x", "~x", "a:b",
     "x\0", " x", "CON|x"],
)  # fmt: skip
def test_a_need_names_no_folder(name: str) -> None:
    quoted = name.replace("\\", "\\\\").replace("\0", "\\u0000")
    assert problems_of(f'{MINIMAL}[needs.checkpoint]\nname = "{quoted}"')


@pytest.mark.report("E27")
@pytest.mark.report("E09")
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "schema is missing"),
        (b"\0\1\2", "not valid TOML"),
        ('schema = 1\nname = "Портрет"'.encode("cp1251"), "line 2, column 9: byte 0xcf"),
        (b"\xff\xfe" + 'schema = 1\nname = "x"'.encode("utf-16-le"), "line 1, column 1: byte 0xff"),
        (b"schema = 1\nschema = 1\n", "line 2"),
        (b'schema = 1\nname = "x\n', "line 2"),
        (b"x = " + b"[" * 5000, "nested too deep"),
        (b"#" * (MAX_BYTES + 1), "allowed at most 262144"),
    ],
)
def test_a_broken_file_is_refused_in_a_sentence(data: bytes, sentence: str) -> None:
    assert any(sentence in problem for problem in problems_of(data))


def test_a_mark_in_front_of_utf8_is_no_fault() -> None:
    assert read(b"\xef\xbb\xbf" + MINIMAL.encode(), "p.toml").name == "x"


texts = st.text(
    st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=40
).filter(lambda text: text == text.strip() and text)


@given(
    name=texts, description=texts, tags=st.lists(texts, max_size=3),
    prompt=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60),
    width=st.integers(8, 2048).map(lambda n: n * 8), guidance=st.floats(1, 50),
    tier=st.sampled_from([8, 12, 16, 24]),
)  # fmt: skip
def test_what_is_written_is_read_again(
    name: str, description: str, tags: list[str], prompt: str, width: int, guidance: float,
    tier: int,
) -> None:  # fmt: skip
    # TOML keeps no difference between the ends of lines.
    prompt = re.sub(r"\r\n?", "\n", prompt)
    preset = Preset(
        name=name, description=description, tags=tuple(tags),
        values={"prompt": prompt, "guidance_scale": guidance},
        needs=(Need(kind="embeddings", name="x", sha256=SHA), Need(kind="vae", name="y")),
        tiers={tier: {"width": width}},
    )  # fmt: skip
    assert read(write(preset), "p.toml") == preset


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_preset_or_refused(data: bytes) -> None:
    problems: tuple[str, ...] = ()
    try:
        read(data, "p.toml")
    except BadRequest as error:
        problems = error.problems
    assert all(problem.startswith("p.toml") for problem in problems)


def test_every_shipped_preset_is_right_and_says_what_it_is_for(tmp_path: Path) -> None:
    shipped = list(entries(tmp_path))
    assert len(shipped) >= 16
    assert [e.problems for e in shipped if e.preset is None] == []
    for entry in shipped:
        assert entry.preset is not None
        assert len(entry.preset.description) > 20
        assert entry.preset.author
        assert entry.preset.licence
    assert shipped_folder().is_dir()
