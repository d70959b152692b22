import codecs
import os
import sys
from pathlib import Path

import pytest

from sdamd.errors import BadRequest
from sdamd.template import Template, Wildcards
from sdamd.template.wildcards import FILE_MAX_BYTES


def lines(folder: Path, pattern: str) -> list[tuple[str, float]]:
    found = Wildcards(folder).find(pattern)
    return [(line.text, line.weight) for lines in found.values() for line in lines]


def problem(folder: Path, pattern: str) -> str:
    with pytest.raises(BadRequest) as caught:
        Wildcards(folder).find(pattern)
    return str(caught.value)


def test_a_text_file_has_an_option_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf# colours\r\nred\r\n\r\n  3::blue # x\r\n")
    assert lines(tmp_path, "a") == [("red", 1), ("3::blue # x", 1)]


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_a_text_file_may_be_utf16(tmp_path: Path, mark: bytes) -> None:
    encoding = "utf-16-le" if mark == codecs.BOM_UTF16_LE else "utf-16-be"
    (tmp_path / "a.txt").write_bytes(mark + "синий\n红".encode(encoding))
    assert lines(tmp_path, "a") == [("синий", 1), ("红", 1)]


@pytest.mark.report("E24")
def test_names_are_the_same_in_every_spelling(tmp_path: Path) -> None:
    folder = tmp_path / "žluťoučký"
    folder.mkdir()
    (folder / "Cafe\u0301.txt").write_text("x", encoding="utf-8")
    assert lines(tmp_path, "žluťoučký/caf\u00e9") == [("x", 1)]


YAML = """\
cloth:
  - 3::hat
  - {text: cap, weight: 0.5}
  - no
  - 1.00
nest:
  deep: [x, "2::y"]
  junk: 5
  one: just one
  none:
"""


def test_yaml_holds_lists_by_their_keys_and_every_scalar_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "any.yaml").write_text(YAML)
    wildcards = Wildcards(tmp_path)
    assert wildcards.names() == ["sub/cloth", "sub/nest/deep", "sub/nest/one"]
    assert lines(tmp_path, "sub/cloth") == [("hat", 3), ("cap", 0.5), ("no", 1), ("1.00", 1)]
    assert lines(tmp_path, "sub/nest/*") == [("x", 1), ("y", 2), ("just one", 1)]


def test_json_holds_lists_by_their_keys(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"a": {"b": ["2::x", 5, {"content": "y", "weight": 2}]}}')
    (tmp_path / "top.json").write_text('["p", "q"]')
    assert Wildcards(tmp_path).names() == ["a/b", "top"]
    assert lines(tmp_path, "a/b") == [("x", 2), ("5", 1), ("y", 2)]


def test_a_line_of_weight_3_comes_three_times_and_one_below_1_once(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("cloth: ['3::hat', '0.5::cap', '0::shoe', '2::{a|b}']\n")
    template = Template("__cloth__", Wildcards(tmp_path))
    assert template.count() == 8
    assert list(template.combinations()) == ["hat"] * 3 + ["cap"] + ["a", "b"] * 2


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "..\\secret", "sub/../../secret", "C:/secret", "link", ""]
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "wildcards"
    folder.mkdir()
    (folder / "a.txt").write_text("x")
    (tmp_path / "secret.txt").write_text("secret")
    if sys.platform != "win32":
        (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
        (folder / "sub").symlink_to(tmp_path)
    assert "is not known" in problem(folder, name)
    assert Wildcards(folder).names() == ["a"]


def test_a_missing_name_comes_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "colours.txt").write_text("x")
    assert "'colors' is not known; the nearest: colours" in problem(tmp_path, "colors")
    assert "holds none" in problem(tmp_path / "nowhere", "colours")
    assert "is not known" in problem(tmp_path, "z*")


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.yaml").write_text("a: [y]")
    assert "'a' is in two files" in problem(tmp_path, "a")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "café".encode("cp1252"), "a.txt line 1 is not UTF-8 text"),
        ("a.txt", b"ok\nx\0y", "holds a NUL character"),
        ("a.txt", b"\xff\xfex", "is not UTF-16 text"),
        ("a.yaml", b"a: [x", "a.yaml: not valid YAML: line "),
        ("a.yaml", b"b: &x [1]\na: *x", "line 2 has an alias"),
        ("a.yaml", b"a: [x]\na: [y]", "line 2: the key 'a' is there twice"),
        ("a.yaml", b"a: [x]\n---\nb: [y]", "second document"),
        ("a.yaml", b"a: " + b"[" * 40 + b"]" * 40, "line 1 is nested deeper than"),
        ("a.yaml", b"a: " + b"[" * 5000, "not valid YAML: line 1"),
        ("a.yaml", b"? [x]\n: y", "a key that is no text"),
        (
            "a.yaml",
            b"a: ['9999999::x']",
            "a weight of 'a' is '9999999'; allowed",
        ),
        ("a.json", b'{"a": ["x"], "a": ["y"]}', "the key 'a' is there twice"),
        ("a.json", b'{"a": [NaN]}', "NaN is no JSON"),
        ("a.json", b'{"a": ' + b"[" * 100_000, "nested deeper than"),
        ("a.json", b'{"a": ["x",]}', "not valid JSON"),
        ("a.json", b'{"a": [{"text": "x", "weight": -1}]}', "a weight of 'a' is '-1'"),
    ],
)
def test_a_damaged_file_is_told_to_who_asks_for_what_it_holds(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("x")
    assert said in problem(tmp_path, "a")
    assert lines(tmp_path, "good") == [("x", 1)]


def test_a_file_too_large_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        os.truncate(file.fileno(), FILE_MAX_BYTES * 100)  # a hole: it takes no disk
    assert f"larger than {FILE_MAX_BYTES} bytes" in problem(tmp_path, "a")


def test_files_are_not_read_before_they_are_needed(tmp_path: Path) -> None:
    wildcards = Wildcards(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    assert list(Template("__a__", wildcards).combinations()) == ["x"]
