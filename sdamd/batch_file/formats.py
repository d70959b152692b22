"""The formats: from the lines of a file to the values of its rows.

Each row is its line and its values by field, or the sentence that says what is wrong with it.
"""

import csv
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TypeAlias

from sdamd.batch_file.lines import ROW_MAX_BYTES, Line, Lines
from sdamd.batch_file.rows import TOLD, by_field, field_name, short, twice
from sdamd.errors import BadRequest, unknown
from sdamd.request import Request

WHOLE_MAX_LETTERS = 64 * 1024 * 1024
"""The largest TOML file, which is read at once."""

Values: TypeAlias = Mapping[str, object] | str
Found: TypeAlias = tuple[int, Values]


def plain(lines: Lines) -> Iterator[Found]:
    """Every line that is not blank is a prompt."""
    for number, text, problem in lines:
        if problem is not None:
            yield number, problem
        elif text.strip():
            yield number, {"prompt": text.rstrip("\r\n")}


# -- JSON ----------------------------------------------------------------------------------------


def jsonl(lines: Lines) -> Iterator[Found]:
    """An object a line."""
    objects = Objects()
    for number, text, problem in lines:
        if problem is not None:
            yield number, problem
        elif text.strip():
            yield number, objects.one(text)


class Objects:
    """Reads JSON objects; what JSON leaves open is a problem: a key twice, NaN."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._pairs, parse_constant=self._constant
        )

    def one(self, text: str) -> Values:
        """The values of the object that a text is, or what is wrong with it."""
        try:
            values, end = self.next(text, _past_blanks(text, 0))
        except RecursionError:
            return _TOO_DEEP
        except json.JSONDecodeError as error:
            return f"it is not valid JSON at column {error.colno}: {error.msg}"
        except ValueError as error:
            return f"it is not valid JSON: {error}"
        if (at := _past_blanks(text, end)) < len(text):
            return f"it is not valid JSON at column {at + 1}: there is more behind its end"
        return values

    def next(self, text: str, at: int) -> tuple[Values, int]:
        """The values of the object at a place, or what is wrong with it, and where it ends.

        Raises:
            ValueError: it is not valid, or not yet whole.
            RecursionError: it is nested too deep.
        """
        self._problems.clear()
        value, end = self._decoder.raw_decode(text, at)
        return (self._problems[0] if self._problems else as_object(value)), end

    def _pairs(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) < len(pairs):
            name = short(twice([name for name, _ in pairs]))
            self._problems.append(f"{name!r} is there twice; allowed is once")
        return made

    def _constant(self, text: str) -> None:
        self._problems.append(f"it holds {text}, which is no number; allowed are finite ones")


_TOO_DEEP = "it is nested too deep; allowed is an object of fields"


def _past_blanks(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


def as_object(value: object) -> Values:
    """The values of an object by field, or what it is instead."""
    if isinstance(value, dict):
        return by_field(value)
    return f"it is {_kind_of(value)}; allowed is an object of fields"


def _kind_of(value: object) -> str:
    """What a value is in words; not the value, which may be deep or long."""
    match value:
        case None:
            return "null"
        case list():
            return "a list"
        case str():
            return "text"
        case _:
            return short(repr(value))


_BLANK = re.compile(r"[ \t\r\n]*")


def json_list(lines: Lines) -> Iterator[Found]:
    """The objects of one list, one at a time; behind a malformed one nothing can be told apart.

    Raises:
        BadRequest: it is no list.
    """
    text = _Growing(lines)
    if text.letter() != "[":
        raise BadRequest(f"{lines.where} is no list; allowed is [{{...}}, {{...}}]")
    text.skip(1)
    return _objects(text)


def _objects(text: "_Growing") -> Iterator[Found]:
    is_first = True
    while (letter := text.letter()) != "]":
        if not is_first:
            if letter != ",":
                yield text.line, _rest("',' or ']' is missing")
                return
            text.skip(1)
        is_first = False
        text.letter()
        line = text.line
        values, is_read = text.value()
        yield line, values
        if not is_read:
            return
    text.skip(1)
    if text.letter():
        yield text.line, _rest("there is more behind the end of the list")


def _rest(problem: str) -> str:
    return f"{problem}; the rest of the file cannot be read"


class _Growing:
    """A text of which there is as much as is needed, from the place that was reached on."""

    def __init__(self, lines: Lines) -> None:
        self._chunks = lines.chunks()
        self._objects = Objects()
        self._text = ""
        self._at = 0
        self.line = 1

    def letter(self) -> str:
        """The next letter that is not blank, which is gone to; nothing at the end."""
        while True:
            self.skip(_past_blanks(self._text, self._at) - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, letters: int) -> None:
        """Go on behind some letters."""
        self.line += self._text.count("\n", self._at, self._at + letters)
        self._at += letters

    def value(self) -> tuple[Values, bool]:
        """Read an object: its values or what is wrong with it, and whether its end was found."""
        if self.letter() != "{":
            return _rest("there is no object here; allowed is {...}"), False
        while True:
            tried = len(self._text) - self._at
            try:
                values, end = self._objects.next(self._text, self._at)
            except RecursionError:
                return _rest(_TOO_DEEP), False
            except ValueError as error:
                if tried > ROW_MAX_BYTES:
                    what = f"it is not valid JSON, or longer than {ROW_MAX_BYTES} letters"
                    return _rest(what), False
                # Tried again with twice the text, so the whole takes time as its length.
                if not self._grow(2 * tried):
                    said = getattr(error, "msg", error)
                    return _rest(f"it is not valid JSON: {said}"), False
                continue
            self.skip(end - self._at)
            return values, True

    def _grow(self, letters: int) -> bool:
        """Read on until there are so many letters, or to the end; False if it was there."""
        if not self._more():
            return False
        while len(self._text) - self._at < letters and self._more():
            pass
        return True

    def _more(self) -> bool:
        chunk = next(self._chunks, "")
        self._text = self._text[self._at :] + chunk
        self._at = 0
        return bool(chunk)


# -- CSV -----------------------------------------------------------------------------------------


def table(lines: Lines) -> Iterator[Found]:
    """The rows of CSV below its header.

    Raises:
        BadRequest: the header is none.
    """
    separator, header = _header(lines)
    return _records(lines, separator, header)


def _header(lines: Lines) -> tuple[str, list[str]]:
    """The separator and the names of the fields.

    The separator is the one that makes most field names of the header, so that nothing in a
    prompt decides.
    """
    known = {f.name for f in fields(Request)}
    for number, text, problem in lines:
        if problem is not None:
            raise BadRequest(f"{lines.where} line {number}: {problem}")
        line = text.strip("\r\n")
        if not line.strip(" ,;\t") or (len(line) == 5 and line.lower().startswith("sep=")):
            continue  # blank, or the line that Excel reads the separator from
        by_sign = {sign: [field_name(cell) for cell in _cut(line, sign)] for sign in ",;\t"}
        sign = max(by_sign, key=lambda sign: len(known & set(by_sign[sign])))
        if problems := _header_problems(by_sign[sign], known):
            place = f"{lines.where} line {number}"
            raise BadRequest(*(f"{place}: {problem}" for problem in problems[:TOLD]))
        return sign, by_sign[sign]
    raise BadRequest(f"{lines.where} has no header; allowed is a first line of field names")


def _cut(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return [line]  # which is no field name, and is told as such


def _header_problems(names: Sequence[str], known: set[str]) -> list[str]:
    problems = [
        unknown(name, sorted(known), "field") if name else "a column has no name"
        for name in names
        if name not in known
    ]
    return problems + [
        f"the column {name!r} is there twice; allowed is once"
        for name in sorted(known & set(names))
        if names.count(name) > 1
    ]


def _records(lines: Lines, separator: str, header: Sequence[str]) -> Iterator[Found]:
    while (record := _record(lines, separator)) is not None:
        number, cells = record
        if isinstance(cells, str):
            yield number, cells
        elif any(cell.strip() for cell in cells):
            if len(cells) == len(header):
                # An empty cell gives nothing: not every row of a table has every value.
                yield number, {n: c for n, c in zip(header, cells, strict=True) if c.strip()}
            else:
                yield (
                    number,
                    f"it has {len(cells)} cells; allowed are {len(header)}, as the header has "
                    f"(a cell with {separator!r} in it stands in double quotes)",
                )


def _record(lines: Lines, separator: str) -> tuple[int, list[str] | str] | None:
    """The next record, with the number of its first line; None at the end.

    A quote that is never closed spoils its own line and no more.
    """
    first = next(lines, None)
    if first is None:
        return None
    if first.problem is not None:
        return first.number, first.problem
    taken = [first]
    try:
        cells = next(csv.reader(_fed(first, lines, taken), delimiter=separator, strict=True), [])
    except csv.Error as error:
        lines.push(taken[1:])
        said = str(error)
        if said == "unexpected end of data":
            said = "a quote is opened and not closed"
        return first.number, f"it is not valid CSV: {said}"
    return first.number, cells


def _fed(first: Line, lines: Lines, taken: list[Line]) -> Iterator[str]:
    """The lines that the reader asks for, as long as a quote is open, each noted in `taken`."""
    yield first.text
    size = len(first.text)
    for line in lines:
        taken.append(line)
        size += len(line.text)
        if line.problem is not None or size > ROW_MAX_BYTES:
            return
        yield line.text


# -- TOML ----------------------------------------------------------------------------------------

_JOB = re.compile(r"^[ \t]*\[\[[ \t]*job[ \t]*\]\]", re.MULTILINE)


def toml(lines: Lines) -> tuple[Mapping[str, object], Iterator[Found]]:
    """The [defaults] and the rows of a whole file.

    Raises:
        BadRequest: it is too large or malformed, or has other tables.
    """
    text = _whole(lines)
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise BadRequest(f"{lines.where} is nested too deep; allowed are [[job]] tables") from error
    except ValueError as error:
        raise BadRequest(f"{lines.where} is not valid TOML: {short(str(error))}") from error
    problems = [
        f"{lines.where}: {unknown(name, ['job', 'defaults'], 'table')}"
        for name in tables
        if name not in {"job", "defaults"}
    ]
    own, jobs = tables.get("defaults", {}), tables.get("job", [])
    if not isinstance(own, dict):
        problems.append(f"{lines.where}: defaults is {_kind_of(own)}; allowed is [defaults]")
    if not isinstance(jobs, list):
        problems.append(f"{lines.where}: job is {_kind_of(jobs)}; allowed are tables [[job]]")
    if problems:
        raise BadRequest(*problems[:TOLD])
    defaults = by_field(own)
    if isinstance(defaults, str):
        raise BadRequest(f"{lines.where}: in [defaults] {defaults}")
    return defaults, zip(_starts(text, len(jobs)), map(as_object, jobs), strict=True)


def _whole(lines: Lines) -> str:
    parts: list[str] = []
    size = 0
    for chunk in lines.chunks():
        size += len(chunk)
        if size > WHOLE_MAX_LETTERS:
            raise BadRequest(
                f"{lines.where} is longer than {WHOLE_MAX_LETTERS} letters, which TOML may be; "
                "JSONL and CSV are read row by row"
            )
        parts.append(chunk)
    # TOML knows these two ends of a line and no others.
    return "".join(parts).replace("\r\n", "\n")


def _starts(text: str, count: int) -> Sequence[int]:
    """The line of each [[job]], or their numbers where they are written in another way."""
    numbers: list[int] = []
    line, behind = 1, 0
    for found in _JOB.finditer(text):
        line += text.count("\n", behind, found.start())
        behind = found.start()
        numbers.append(line)
    return numbers if len(numbers) == count else range(1, count + 1)
