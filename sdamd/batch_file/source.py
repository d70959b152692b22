"""Opens a source, and reads its rows one at a time."""

import os
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import BinaryIO

from sdamd.batch_file.formats import Found, Objects, json_list, jsonl, plain, table, toml
from sdamd.batch_file.lines import Line, Lines
from sdamd.batch_file.rows import Row, bad_row, row_of
from sdamd.errors import BadRequest, StorageError, UserError
from sdamd.request import Request

_IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_WITH_RECORDS = (".jpeg", ".jpg", ".png", ".webp")


class Kind(StrEnum):
    """What a source is; the last two are folders."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    TOML = "toml"
    LINES = "lines"
    IMAGES = "images"
    RECORDS = "records"


_FOLDERS = (Kind.IMAGES, Kind.RECORDS)

_KIND_OF = {
    ".jsonl": Kind.JSONL,
    ".ndjson": Kind.JSONL,
    ".json": Kind.JSON,
    ".csv": Kind.CSV,
    ".tsv": Kind.CSV,
    ".toml": Kind.TOML,
    ".txt": Kind.LINES,
}

_READERS = {Kind.JSONL: jsonl, Kind.JSON: json_list, Kind.CSV: table, Kind.LINES: plain}


def read(
    source: str,
    defaults: Mapping[str, object],
    *,
    kind: Kind | None = None,
    output: Path | None = None,
    stdin: BinaryIO | None = None,
) -> Iterator[Row]:
    """Read the rows of a source, one at a time.

    Args:
        source: the path of a file or folder, or `-`.
        defaults: loose values of request fields that hold for every row that does not give them;
            for RECORDS they replace what the record says.
        kind: what the source is; by its suffix if None.
        output: the folder that pictures are saved in, which must not be the source.
        stdin: what `-` stands for.

    Raises:
        BadRequest: the source is none, is empty, is no text, or its header is wrong; also while
            reading, if it turns out to be no text or to hold no row.
        StorageError: it cannot be read.
    """
    if source == "-":
        if stdin is None:
            raise BadRequest("the batch is '-', but there is no standard input")
        return _file("standard input", stdin, kind, defaults)
    path = Path(source)
    if output is not None and _is_same(path, output):
        raise BadRequest(f"the batch {source} is also where pictures are saved; allowed is another")
    try:
        if path.is_dir():
            return _folder(path, kind or Kind.IMAGES, defaults)
        file = path.open("rb")
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        said = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"the batch {source!r} cannot be read: {said}") from error
    try:
        return _file(str(path), file, kind or _kind_of(path), defaults)
    except BaseException:
        file.close()
        raise


def _kind_of(path: Path) -> Kind:
    kind = _KIND_OF.get(path.suffix.lower())
    if kind is None:
        raise BadRequest(
            f"the batch {path} is of no known kind; allowed are folders and files "
            f"{' '.join(_KIND_OF)}, or a given format: {', '.join(Kind)}"
        )
    return kind


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except (OSError, ValueError):
        return False


def _file(
    where: str, file: BinaryIO, kind: Kind | None, defaults: Mapping[str, object]
) -> Iterator[Row]:
    """Read the beginning of a file, so that what is wrong with the whole is told now."""
    if kind in _FOLDERS:
        raise BadRequest(f"{where} is no folder; allowed for {kind} is a folder")
    lines = Lines(where, file)
    if kind is None:
        kind = Kind.JSONL if _begins_with_object(lines) else Kind.LINES
    if kind is Kind.TOML:
        own, found = toml(lines)
        defaults = {**own, **defaults}
    else:
        found = _READERS[kind](lines)
    return _rows(lines, found, defaults)


def _rows(lines: Lines, found: Iterator[Found], defaults: Mapping[str, object]) -> Iterator[Row]:
    is_any = False
    with lines:
        for line, values in found:
            is_any = True
            yield row_of(line, f"{lines.where} line {line}", values, defaults)
    if not is_any:
        raise BadRequest(f"{lines.where} holds no row; allowed is at least one")


def _begins_with_object(lines: Lines) -> bool:
    """Whether the first line that is not blank is a JSON object; all lines will come again."""
    seen: list[Line] = []
    for line in lines:
        seen.append(line)
        if line.problem is not None or line.text.strip():
            break
    lines.push(seen)
    return bool(seen) and isinstance(Objects().one(seen[-1].text), dict)


# -- folders -------------------------------------------------------------------------------------


def _folder(folder: Path, kind: Kind, defaults: Mapping[str, object]) -> Iterator[Row]:
    """The pictures that are directly in a folder, in the order of their names.

    The names are read now, so that pictures saved later do not join.
    """
    if kind not in _FOLDERS:
        raise BadRequest(f"the batch {folder} is a folder; allowed for {kind} is a file")
    suffixes = _IMAGES if kind is Kind.IMAGES else _WITH_RECORDS
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.lower().endswith(suffixes) and e.is_file()]
    if not names:
        raise BadRequest(f"the batch {folder} holds no picture; allowed are {' '.join(suffixes)}")
    made = partial(_init_image if kind is Kind.IMAGES else _from_record, defaults=defaults)
    ordered = enumerate(sorted(names, key=_by_number), start=1)
    return (made(folder / name, number) for number, name in ordered)


def _by_number(name: str) -> tuple[list[tuple[int, str]], str]:
    """Sort `2.png` before `10.png`."""
    pieces = re.split(r"([0-9]+)", name.casefold())
    return [(int(p[:18]), "") if p.isascii() and p.isdigit() else (-1, p) for p in pieces], name


def _init_image(path: Path, number: int, defaults: Mapping[str, object]) -> Row:
    return row_of(number, str(path), {"init_image": str(path)}, defaults)


def _from_record(path: Path, number: int, defaults: Mapping[str, object]) -> Row:
    """The request that makes a picture again."""
    from sdamd import gallery  # noqa: PLC0415  # Pillow takes as long as all of `--help`

    try:
        request = gallery.request_from_png(path)
        if defaults:
            request = Request.from_dict({**request.to_dict(), **defaults})
    except BadRequest as error:
        return bad_row(number, str(path), *error.problems)
    except (UserError, StorageError) as error:
        return bad_row(number, str(path), str(error).removeprefix(f"{path}: "))
    return Row(line=number, where=str(path), request=request, literal=True)
