"""Styles: prompts with a place for words, as other tools keep them.

AUTOMATIC1111's `styles.csv` is read and written; Fooocus's lists, SD.Next's files and InvokeAI's
templates (CSV or JSON) are read. A file that is not UTF-8 is read all the same, with a warning,
and never written unasked.
"""

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sdamd.errors import BadMetadata
from sdamd.interchange import json_text
from sdamd.request import PROMPT_MAX_BYTES

PLACE: Final = "{prompt}"
"""Where the words go; a style without it is appended after a comma."""

MAX_BYTES: Final = 16 * 1024 * 1024
"""The longest file that is read; the largest collections have a few megabytes."""

# What Windows wrote such files in; the last one takes any byte.
_OLD_CODES: Final = ("cp1252", "gb18030", "latin-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A style: its name, and its texts, in which `{prompt}` stands for what is asked for."""

    name: str
    prompt: str = ""
    negative_prompt: str = ""

    def apply(self, prompt: str, negative_prompt: str) -> tuple[str, str]:
        """The two prompts in this style."""
        return _joined(self.prompt, prompt), _joined(self.negative_prompt, negative_prompt)


def _joined(style: str, words: str) -> str:
    if PLACE in style:
        return style.replace(PLACE, words)
    return ", ".join(part for part in (words, style) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Styles:
    """What a file of styles holds, and what in it was not understood, a sentence each."""

    styles: tuple[Style, ...]
    problems: tuple[str, ...] = ()


def read(data: bytes) -> Styles:
    """Read a file of styles, of any of the kinds, by what is in it.

    Raises:
        BadMetadata: it is too large, or not of such a kind.
    """
    if len(data) > MAX_BYTES:
        raise BadMetadata(f"the styles are {len(data)} bytes; allowed are at most {MAX_BYTES}")
    text, problems = _decoded(data)
    found = _from_json(text) if text.lstrip()[:1] in {"[", "{"} else _from_csv(text)
    return Styles(styles=found.styles, problems=(*problems, *found.problems))


def _decoded(data: bytes) -> tuple[str, list[str]]:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace"), []  # what Excel calls Unicode text
    try:
        return data.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        first = error.start
    for code in _OLD_CODES:
        try:
            text = data.decode(code)
        except UnicodeDecodeError:
            continue
        line = data.count(b"\n", 0, first) + 1
        return text, [f"line {line} is not UTF-8; the file is read as {code}, letters may be wrong"]
    raise AssertionError  # latin-1 reads any bytes


# -- styles.csv, and InvokeAI's templates as CSV -------------------------------------------------

_NAMES: Final = {
    "name": "name",
    "prompt": "prompt",
    "text": "prompt",  # before 2023
    "positive_prompt": "prompt",
    "negative_prompt": "negative_prompt",
}


def _from_csv(text: str) -> Styles:
    """Rows `name,prompt,negative_prompt`; a header names the columns."""
    problems: list[str] = []
    styles: list[Style] = []
    reader = csv.reader(io.StringIO(text.replace("\0", "\N{REPLACEMENT CHARACTER}"), newline=""))
    columns: list[str] | None = None
    try:
        for row in reader:
            if not any(cell.strip() for cell in row) or row[0].lstrip().startswith("#"):
                continue
            if columns is None:
                columns = [_NAMES.get(cell.strip().casefold(), "") for cell in row]
                if "name" not in columns:
                    raise BadMetadata(
                        "the styles have no header; expected is name,prompt,negative_prompt"
                    )
                continue
            styles += _row(columns, row, reader.line_num, problems)
    except csv.Error as error:
        problems.append(f"line {reader.line_num}: {error}; what follows is not read")
    return Styles(styles=tuple(styles), problems=tuple(problems))


def _row(columns: list[str], row: list[str], line: int, problems: list[str]) -> Iterable[Style]:
    values = {name: cell for name, cell in zip(columns, row, strict=False) if name}
    if more := [cell for cell in row[len(columns) :] if cell.strip()]:
        problems.append(f"line {line} has more cells than the header: {', '.join(more)[:200]}")
    name = values.get("name", "").strip()
    if name.startswith("----"):
        return  # a line across the menu
    texts = {
        key: values.get(key, "").replace("\r\n", "\n") for key in ("prompt", "negative_prompt")
    }
    if problem := _problem(name, *texts.values()):
        problems.append(f"line {line}: {problem}")
        return
    yield Style(name=name, **texts)


def _problem(name: str, *texts: str) -> str | None:
    if not name:
        return "a style without a name"
    too_long = [len(t.encode("utf-8", "surrogatepass")) for t in texts]
    if max(too_long, default=0) > PROMPT_MAX_BYTES:
        return (
            f"style {name[:60]!r} has a text of {max(too_long)} bytes; allowed at most "
            f"{PROMPT_MAX_BYTES}"
        )
    return None


def write_csv(styles: Iterable[Style]) -> bytes:
    """Write `styles.csv` as AUTOMATIC1111 does: with a byte order mark, which Excel needs."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(("name", "prompt", "negative_prompt"))
    writer.writerows((s.name, s.prompt, s.negative_prompt) for s in styles)
    return file.getvalue().encode("utf-8-sig", "replace")


# -- Fooocus, SD.Next, InvokeAI as JSON ----------------------------------------------------------

_STYLE_KEYS: Final = {
    "name": "name",
    "prompt": "prompt",
    "positive_prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "negative": "negative_prompt",
}


def _from_json(text: str) -> Styles:
    values = json_text.load(text, "the file of styles")
    problems: list[str] = []
    styles: list[Style] = []
    for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
        if not isinstance(value, dict):
            problems.append(f"style {number} is {str(value)[:60]!r}; expected is an object")
            continue
        style, others = _from_object(value)
        name = style.name or f"number {number}"
        if problem := _problem(style.name, style.prompt, style.negative_prompt):
            problems.append(f"style {number}: {problem}")
        else:
            styles.append(style)
        problems += [f"style {name[:60]!r}: {other} is not used" for other in others]
    return Styles(styles=tuple(styles), problems=tuple(problems))


def _from_object(value: dict[str, Any]) -> tuple[Style, list[str]]:
    """A style, and what else its object says."""
    preset = value.get("preset_data")
    if isinstance(preset, dict):  # InvokeAI's own export
        value = {"name": value.get("name", ""), **preset}
    texts = {"name": "", "prompt": "", "negative_prompt": ""}
    others = []
    for key, given in value.items():
        field = _STYLE_KEYS.get(str(key))
        if field and isinstance(given, str):
            texts[field] = given
        elif given not in (None, "", [], {}):
            shown = given if isinstance(given, str) else json.dumps(given)
            others.append(f"{key}: {shown[:200]}")
    return Style(**texts), others
