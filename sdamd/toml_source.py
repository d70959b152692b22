"""TOML with places: `tomllib` gives the values, this says where in the text a key stands."""

import re
import tomllib
from dataclasses import dataclass
from typing import Any, Final

from sdamd.errors import BadRequest

_HEADER: Final = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?")
_NAME: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_KEY: Final = re.compile(rf"(\s*)({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")
_QUOTES: Final = re.compile(r'"""|\'\'\'')


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A parsed TOML text that knows where its keys stand.

    `name` is what messages call it: a file's name. `values` is what `tomllib` read.
    """

    name: str
    values: dict[str, Any]
    places: dict[tuple[str, ...], tuple[int, int]]

    def at(self, *path: str) -> str:
        """`portrait.toml, line 3, column 1`: the place of a key, or of what it is in."""
        for length in range(len(path), 0, -1):
            if place := self.places.get(path[:length]):
                return f"{self.name}, line {place[0]}, column {place[1]}"
        return f"{self.name}, line 1, column 1"


def parse(data: bytes, name: str, max_bytes: int) -> Source:
    """Read a file's bytes.

    Raises:
        BadRequest: too large, not UTF-8, or not TOML; with line and column.
    """
    if len(data) > max_bytes:
        raise BadRequest(f"{name} is {len(data)} bytes; allowed at most {max_bytes}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        byte = data[error.start]
        raise BadRequest(
            f"{name}, line {line}, column {column}: byte 0x{byte:02x} is not UTF-8; "
            "allowed is text in UTF-8"
        ) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{name} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise BadRequest(f"{name} is not valid TOML: nested too deep") from error
    return Source(name=name, values=values, places=_places(text))


def _places(text: str) -> dict[tuple[str, ...], tuple[int, int]]:
    """Where each key stands; only for texts that `tomllib` has accepted.

    Keys of inline tables have the place of their table; of arrays of tables the last one stands.
    """
    places: dict[tuple[str, ...], tuple[int, int]] = {}
    table: tuple[str, ...] = ()
    inside = ""  # the quotes of a text over several lines
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if inside:
            if inside in line:
                inside = ""
            continue
        if header := _HEADER.match(line):
            table = _parts(header[2])
            if header[1] == "[[":
                index = counts[table] = counts.get(table, -1) + 1
                table = (*table, str(index))
            places.setdefault(table, (number, len(line) - len(line.lstrip()) + 1))
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[2]))
            for length in range(len(table) + 1, len(path) + 1):
                places.setdefault(path[:length], (number, len(key[1]) + 1))
            opened = _QUOTES.findall(line)
            if len(opened) % 2:
                inside = opened[-1]
    return places


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
