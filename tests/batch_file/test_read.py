"""Rows of every kind of source, good and hostile."""

import codecs
import csv
import io
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from sdamd import gallery
from sdamd.batch_file import ROW_MAX_BYTES, Kind, Row, read, strict
from sdamd.errors import BadRequest, StorageError
from sdamd.metadata import Record
from sdamd.request import Job, Request
from tests.fakes import picture


def rows(content: bytes | str, kind: Kind | None, **defaults: object) -> list[Row]:
    if isinstance(content, str):
        content = content.encode()
    return list(read("-", defaults, kind=kind, stdin=io.BytesIO(content)))


def asked(content: bytes | str, kind: Kind | None, **defaults: object) -> list[Any]:
    """Each row's request as a dictionary, or its problem without the name of the source."""
    return [
        row.request.to_dict()
        if row.request
        else "\n".join(p.removeprefix("standard input ") for p in row.problems)
        for row in rows(content, kind, **defaults)
    ]


def whole_problem(content: bytes | str, kind: Kind | None) -> str:
    with pytest.raises(BadRequest) as caught:
        rows(content, kind)
    return str(caught.value)


# -- what is read --------------------------------------------------------------------------------

TWO = [{"prompt": "a", "steps": 5}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Kind.JSONL, '{"prompt": "a", "steps": 5}\n\n{"prompt": "b"}'),
        (Kind.JSONL, '{"Prompt": "a", "steps": "5"}\r\n{"prompt": "b", "steps": null}\r\n'),
        (None, '\n{"prompt": "a", "steps": 5}\n{"prompt": "b"}\n'),
        (Kind.JSON, '[{"prompt": "a", "steps": 5}, {"prompt": "b"}]'),
        (Kind.JSON, ' [\n{"prompt": "a",\n"steps": 5.0}\n,\n{"prompt": "b"}\n]\n'),
        (Kind.CSV, "prompt,steps\na,5\nb,\n"),
        (Kind.CSV, "\ufeffsep=;\r\nPrompt;Steps\r\na;5\r\n;\r\nb;\r\n"),
        (Kind.CSV, "steps\tprompt\n5\ta\n\tb"),
        (Kind.TOML, '[[job]]\nprompt = "a"\nsteps = 5\n\n[[job]]\nprompt = "b"\n'),
        (Kind.TOML, 'job = [{prompt = "a", steps = 5}, {prompt = "b"}]'),
    ],
)
def test_a_row_gives_fields_by_their_names(kind: Kind | None, content: str) -> None:
    assert asked(content, kind) == TWO


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("size", [1, 9000])
def test_text_is_utf8_or_utf16_with_its_mark(encoding: str, size: int) -> None:
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}
    text = "\n".join(["красный дом 红 🙂 Ċ"] * size)
    content = mark.get(encoding, b"") + text.encode(encoding)
    found = rows(content, Kind.LINES)
    assert len(found) == size
    assert {row.request.prompt for row in found if row.request} == {"красный дом 红 🙂 Ċ"}


def test_a_row_goes_before_the_flags_and_these_before_the_files_own_defaults() -> None:
    content = '[defaults]\nsteps = 7\nwidth = 512\nseed = 3\n[[job]]\nprompt = "a"\nseed = 4\n'
    assert asked(content, Kind.TOML, steps=9) == [
        {"prompt": "a", "steps": 9, "width": 512, "seed": "4"}
    ]


def test_a_cell_in_quotes_may_hold_lines_quotes_and_separators() -> None:
    content = 'prompt,steps\r\n"a ""b"", c\nd",5\r\ne,6\r\n'
    found = rows(content, Kind.CSV)
    assert [(row.line, row.request and row.request.prompt) for row in found] == [
        (2, 'a "b", c\nd'),
        (4, "e"),
    ]


@pytest.mark.report("E26")
def test_plain_lines_are_literal() -> None:
    lines = [
        "it's a dog",
        '"quoted"',
        "--steps 3",
        "# not a comment?",
        'C:\\path\\"',
        "  a  ",
        "{a|b} __x__",
        "<lora:x:1>",
        "a\x85b\u2028c",
    ]
    content = b"\xef\xbb\xbf" + "\r\n".join([*lines, "", "  ", "last"]).encode()
    found = rows(content, Kind.LINES)
    assert [row.request.prompt for row in found if row.request] == [*lines, "last"]
    assert found[-1].line == len(lines) + 3


@pytest.mark.report("E26")
def test_a_bad_row_is_told_with_its_line_and_field_and_the_others_go_on() -> None:
    content = '{"prompt": "a"}\n{"steps": 151, "widht": 5}\nnonsense\n{"prompt": "b"}\n'
    assert asked(content, Kind.JSONL) == [
        {"prompt": "a"},
        "line 2: steps is 151; allowed 1 to 150\n"
        "line 2: field 'widht' is not known; the nearest: width, height",
        "line 3: it is not valid JSON at column 1: Expecting value",
        {"prompt": "b"},
    ]


@pytest.mark.report("E27")
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "a",}', "it is not valid JSON at column 16"),
        ('{"prompt": "C:\\Users"}', "it is not valid JSON at column"),
        ('{"steps": NaN}', "it holds NaN, which is no number; allowed are finite ones"),
        ('{"guidance_scale": 1e999}', "guidance_scale is inf; allowed 1 to 50"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is there twice; allowed is once"),
        ('{"prompt": "a", "Prompt": "b"}', "prompt is there twice; allowed is once"),
        ("[1, 2]", "it is a list; allowed is an object of fields"),
        ('"text"', "it is text; allowed"),
        ('{"a": ' * 10_000, "nested too deep"),
        ('{"prompt": ' + "[" * 10_000 + "]" * 10_000 + "}", "nested too deep"),
        ('{"prompt": ["a"]}', "prompt is ['a']; allowed is text"),
        ('{"prompt": {"a": {"b": 1}}}', "allowed is text"),
        ('{"steps": true}', "steps is True; allowed is a whole number"),
        ('{"count": 1000000000}', "count is 1000000000; allowed 1 to 100000"),
        ('{"seed": ' + "1" * 5000 + "}", "it is not valid JSON"),
        ('{"scheduler": "Eular a"}', "the nearest: "),
        ('{"prompt": "\\ud800"}', "prompt holds a lone surrogate"),
        ('{"prompt": "a"} {"prompt": "b"}', "there is more behind its end"),
        ('{"steps": 20', "it is not valid JSON"),
    ],
)
def test_a_malformed_object_is_a_problem_and_never_another_picture(row: str, said: str) -> None:
    (bad, good) = rows(row + '\n{"prompt": "next"}', Kind.JSONL)
    assert bad.request is None
    assert said in bad.problems[0]
    assert len(bad.problems[0]) < 500
    assert good.request == Request(prompt="next")


@pytest.mark.parametrize("size", ["0", "-64", "1001", "64.5", "huge", "99999999999999999999", ""])
@pytest.mark.report("E29")
def test_a_size_that_cannot_be_is_refused_with_the_nearest(size: str) -> None:
    (row,) = rows(f'prompt,width\na,"{size}"\n', Kind.CSV)
    assert (row.request is None) == bool(size)
    if size == "1001":
        assert row.problems[0].endswith(
            "width is 1001; allowed multiples of 8, the nearest 1000 and 1008"
        )


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (
            "prompt,steps\na,5,6\nb\nc,7\n",
            ["line 2: it has 3 cells; allowed are 2", "line 3: it has 1 cells; allowed are 2", "c"],
        ),
        (
            'prompt,steps\n"a,5\nb,6\nc,7\n',
            ["line 2: it is not valid CSV: a quote is opened and not closed", "b", "c"],
        ),
        ('prompt,steps\n"a"x,5\nb,6\n', ["line 2: it is not valid CSV: ',' expected", "b"]),
        ('prompt,steps\na 5" nail,5\n', ['a 5" nail']),
        ("prompt\n" + "x" * 200_000 + "\nb\n", ["line 2: it is not valid CSV: field larger", "b"]),
    ],
)
def test_a_bad_record_spoils_its_own_line_alone(content: str, found: list[str]) -> None:
    made = asked(content, Kind.CSV)
    assert len(made) == len(found)
    for row, expected in zip(made, found, strict=True):
        assert (row if isinstance(row, str) else row["prompt"]).startswith(expected)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prompt,prompt\na,b\n", "line 1: the column 'prompt' is there twice"),
        ("prompt,widht\na,b\n", "field 'widht' is not known; the nearest: width"),
        ("prompt,\na,b\n", "a column has no name"),
        ("a house\nb\n", "field 'a_house' is not known"),
        ("prompt,steps\n", "holds no row"),
        (";;;\n,,\n", "has no header"),
        (b"prompt\xff\na", "line 1: it is not UTF-8 text"),
    ],
)
def test_a_wrong_header_refuses_the_whole(content: str | bytes, said: str) -> None:
    assert said in whole_problem(content, Kind.CSV)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[[job]]\nprompt = "a\n', "is not valid TOML"),
        ('[[job]]\nprompt = "a"\nprompt = "b"\n', "is not valid TOML"),
        ("[[jobs]]\n", "table 'jobs' is not known; the nearest: job"),
        ("job = 5\ndefaults = 3\n", "defaults is 3; allowed is [defaults]"),
        ("[defaults]\nsteps = 5\n", "holds no row"),
        ("[defaults]\nsteps = 5\nSteps = 6\n", "in [defaults] steps is there twice"),
        ("a = " + "[" * 2000, "nested too deep"),
    ],
)
def test_toml_that_is_malformed_refuses_the_whole(content: str, said: str) -> None:
    assert said in whole_problem(content, Kind.TOML)


def test_a_toml_job_is_told_with_the_line_of_its_table() -> None:
    content = '# x\n[[job]]\nprompt = "a"\n\n[[job]]\nsteps = 0\n[[job]]\nwhen = 2026-01-01\n'
    assert asked(content, Kind.TOML)[1:] == [
        "line 5: steps is 0; allowed 1 to 150",
        "line 7: field 'when' is not known; known: " + known_fields(),
    ]


def known_fields() -> str:
    names = [f.name for f in fields(Request)]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('[{"prompt": "a"}, {"steps": 0}, {"prompt": "b"}]', ["a", "line 1: steps is 0", "b"]),
        ('[{"prompt": "a", "prompt": "x"},\n{"prompt": "b"}]', ["line 1: 'prompt' is there", "b"]),
        ('[{"steps": NaN}, {"prompt": "b"}]', ["line 1: it holds NaN", "b"]),
        ('[{"prompt": "a"},\n{"prompt" 5}, {}]', ["a", "line 2: it is not valid JSON"]),
        ('[{"prompt": "a"},\n 5]', ["a", "line 2: there is no object here"]),
        ('[{"prompt": "a"}\n{"prompt": "b"}]', ["a", "line 2: ',' or ']' is missing"]),
        ('[{"prompt": "a"}] x', ["a", "line 1: there is more behind the end"]),
        ('[{"prompt": "a"}', ["a", "line 1: ',' or ']' is missing"]),
        ('[{"prompt": "a"}, {"x": ' + "[" * 10_000, ["a", "line 1: it is nested too deep"]),
    ],
)
def test_a_json_list_goes_on_as_far_as_it_can_be_read(content: str, found: list[str]) -> None:
    made = asked(content, Kind.JSON)
    assert len(made) == len(found)
    for row, expected in zip(made, found, strict=True):
        assert (row if isinstance(row, str) else row["prompt"]).startswith(expected)


# -- what is no batch ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, *(k for k in Kind if k not in {"images", "records"})])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "standard input is empty"),
        (b"\xef\xbb\xbf", "standard input is empty"),
        (b" \r\n\t\n", "standard input is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "holds NUL bytes"),
        (b"\xff\xfe\0\0a\0\0\0", "UTF-32"),
        (b"\xff\xfe[\0b", "UTF-16"),
        (b"\xff\xfe[\0\0\xd8a\0", "UTF-16"),
    ],
)
def test_what_is_no_text_is_refused_whole(kind: Kind | None, content: bytes, said: str) -> None:
    assert said in whole_problem(content, kind)


@pytest.mark.parametrize("encoding", ["cp1251", "cp1252"])
@pytest.mark.report("E26")
def test_an_old_code_page_is_told_with_what_to_do(encoding: str) -> None:
    text = "дом" if encoding == "cp1251" else "café"
    found = asked(b"a house\n" + text.encode(encoding) + b"\nb\n", Kind.LINES)
    assert found[0] == {"prompt": "a house"}
    assert found[1].startswith("line 2: it is not UTF-8 text (byte 0x")
    assert found[1].endswith("save the file as UTF-8")
    assert found[2] == {"prompt": "b"}


@contextmanager
def peak_below(size: int) -> Iterator[None]:
    """Python takes no more than so many bytes in between."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


class Endless(io.RawIOBase):
    """A file of one letter, so many times, with a line behind it; it takes no memory."""

    def __init__(self, size: int, tail: bytes) -> None:
        self._left = size
        self._tail = tail

    def read(self, size: int = -1) -> bytes:
        if self._left:
            taken = min(size, self._left)
            self._left -= taken
            return b"x" * taken
        tail, self._tail = self._tail, b""
        return tail


@pytest.mark.parametrize("kind", [Kind.LINES, Kind.JSONL])
def test_a_gigabyte_of_one_line_is_told_in_little_memory(kind: Kind) -> None:
    file = cast("BinaryIO", Endless(2**30, b'\n{"prompt": "b"}\n'))
    with peak_below(8 * 2**20):
        long, good = read("-", {}, kind=kind, stdin=file)
    assert long.problems == (
        f"standard input line 1: it is longer than {ROW_MAX_BYTES} bytes, which a row may be",
    )
    assert good.request is not None
    assert good.line == 2


@pytest.mark.parametrize("kind", [Kind.CSV, Kind.JSON])
def test_a_gigabyte_that_is_neither_table_nor_list_is_refused(kind: Kind) -> None:
    with pytest.raises(BadRequest, match=r"longer than|is no list"):
        list(read("-", {}, kind=kind, stdin=cast("BinaryIO", Endless(2**30, b""))))


def test_many_rows_take_no_more_memory_than_one() -> None:
    content = b"".join(b'{"prompt": "a house", "seed": %d}\n' % i for i in range(20_000))
    file = io.BytesIO(content)
    with peak_below(2 * 2**20):  # 20 000 requests take 10 MiB
        count = sum(row.request is not None for row in read("-", {}, kind=Kind.JSONL, stdin=file))
    assert count == 20_000


def test_many_open_quotes_take_time_as_the_lines() -> None:
    content = "prompt,steps\n" + '"a\n' * 20_001 + "b,5\n"
    before = time.process_time()
    assert asked(content, Kind.CSV)[-1] == {"prompt": "b", "steps": 5}
    assert time.process_time() - before < 20


# -- paths ---------------------------------------------------------------------------------------


def test_the_kind_is_told_by_the_suffix(tmp_path: Path) -> None:
    for name in ("a.jsonl", "A.NDJSON"):
        (tmp_path / name).write_text('{"prompt": "a"}')
    (tmp_path / "a.csv").write_text("prompt\na")
    (tmp_path / "a.tsv").write_text("prompt\tsteps\na\t\n")
    (tmp_path / "a.json").write_text('[{"prompt": "a"}]')
    (tmp_path / "a.toml").write_text('[[job]]\nprompt = "a"')
    (tmp_path / "a.txt").write_text("a")
    for path in tmp_path.iterdir():
        assert [row.request for row in read(str(path), {})] == [Request(prompt="a")], path


@pytest.mark.report("E24")
def test_paths_may_be_in_any_script(tmp_path: Path) -> None:
    path = tmp_path / "žluťoučký kůň" / "通义.txt"
    path.parent.mkdir()
    path.write_text("a")
    (row,) = read(str(path), {})
    assert row.where == f"{path} line 1"


def test_what_cannot_be_a_source_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadRequest, match="of no known kind; allowed are folders"):
        read(str(tmp_path / "a.xlsx"), {})
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        read(str(tmp_path / "missing.txt"), {})
    with pytest.raises(StorageError, match="cannot be read"):
        read("a\0.txt", {})
    with pytest.raises(BadRequest, match="is no folder; allowed for records is a folder"):
        read(str(tmp_path / "a.txt"), {}, kind=Kind.RECORDS)
    with pytest.raises(BadRequest, match="is a folder; allowed for csv is a file"):
        read(str(tmp_path), {}, kind=Kind.CSV)
    with pytest.raises(BadRequest, match="holds no picture"):
        read(str(tmp_path / "empty"), {}, kind=Kind.RECORDS)
    with pytest.raises(BadRequest, match="no standard input"):
        read("-", {})


@pytest.mark.parametrize("name", ["out", "out/../out", "file.txt"])
def test_the_source_is_not_where_pictures_are_saved(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "file.txt").write_text("x")
    output = tmp_path / name.split("/", maxsplit=1)[0]
    with pytest.raises(BadRequest, match="is also where pictures are saved"):
        read(str(tmp_path / name), {}, output=output)


def test_strict_hands_on_the_good_rows_and_refuses_at_the_end() -> None:
    content = "prompt,steps\n" + "a,0\n" * 25 + "b,5\n"
    taken: list[Row] = []
    with pytest.raises(BadRequest) as caught:
        taken += strict(rows(content, Kind.CSV))
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "and 5 more rows"
    good = rows("a\nb", Kind.LINES)
    assert list(strict(good)) == good


# -- folders -------------------------------------------------------------------------------------


def save(folder: Path, job: Job, name: str) -> Path:
    record = Record(job=job, version="0", checkpoint_name="")
    path = folder / name
    path.write_bytes(gallery.encode(picture(job), record))
    return path


def test_pictures_made_earlier_are_made_again(tmp_path: Path, job: Job) -> None:
    save(tmp_path, job, "10.png")
    (tmp_path / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "3.PNG")
    (tmp_path / "notes.txt").write_text("not a picture")
    (tmp_path / "sub.png").mkdir()
    two, three, ten = read(str(tmp_path), {"steps": 9}, kind=Kind.RECORDS)
    assert [row.line for row in (two, three, ten)] == [1, 2, 3]
    assert two.problems[0].startswith(f"{tmp_path / '2.png'}: ")
    assert len(three.problems) == 1
    assert ten.literal
    assert ten.request is not None
    assert ten.request.seed == job.seed
    assert ten.request.steps == 9


def test_each_picture_of_a_folder_becomes_an_init_image(tmp_path: Path) -> None:
    for name in ("b10.png", "b2.jpg", "a.webp"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    found = list(read(str(tmp_path), {"prompt": "a house"}))
    assert [Path(row.where).name for row in found] == ["a.webp", "b2.jpg", "b10.png"]
    assert [row.request and row.request.init_image for row in found] == [row.where for row in found]


# -- anything ------------------------------------------------------------------------------------

KINDS = st.sampled_from([Kind.JSONL, Kind.JSON, Kind.CSV, Kind.TOML, Kind.LINES, None])
START = {Kind.CSV: b"prompt,steps\n", Kind.JSON: b"[", Kind.TOML: b"[[job]]\n"}


@given(st.binary(max_size=200), KINDS)
@example(b'"\n"a\n', Kind.CSV)
@example(b"[{}", Kind.JSON)
@example(b'[{"prompt":"a"} ,', Kind.JSON)
def test_any_bytes_are_rows_or_an_error(content: bytes, kind: Kind | None) -> None:
    for start in (b"", START.get(kind, b"") if kind else b""):
        try:
            found = rows(start + content, kind)
        except BadRequest:
            continue
        for row in found:
            assert (row.request is None) == bool(row.problems)


prompts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


@given(st.lists(prompts.filter(lambda text: bool(text.strip())), min_size=1, max_size=5))
def test_what_is_written_is_read_back(texts: list[str]) -> None:
    requests = [Request(prompt=text, steps=5) for text in texts]
    values = [request.to_dict() for request in requests]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["prompt", "steps"], quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(values)
    written = {
        Kind.JSONL: "\n".join(map(json.dumps, values)),
        Kind.JSON: json.dumps(values, ensure_ascii=False),
        Kind.CSV: table.getvalue(),
    }
    for kind, text in written.items():
        assert [row.request for row in rows(text, kind)] == requests


def test_a_file_that_disappears_while_it_is_read_is_told(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError(5, os.strerror(5))
            return super().read(size)

    with pytest.raises(StorageError, match="standard input cannot be read"):
        list(read("-", {}, kind=Kind.LINES, stdin=Broken(b"a\nb\n")))
