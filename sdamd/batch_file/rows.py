"""What a row asks for, and how it is made of loose values."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from sdamd import scheduler
from sdamd.errors import BadRequest
from sdamd.request import Request

TOLD = 20
"""How many of many problems are told."""

_LETTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one row asks for, or what is wrong with it: exactly one of the two is there.

    `line` is where the row begins, from 1; in a folder it is the number of the file. `where` says
    it in words. `literal`: its prompts are no templates. `cell` is what `--vary` says of it, a
    label for each axis.
    """

    line: int
    where: str
    request: Request | None = None
    problems: tuple[str, ...] = ()
    literal: bool = False
    cell: tuple[str, ...] = ()


def row_of(
    line: int, where: str, values: Mapping[str, object] | str, defaults: Mapping[str, object]
) -> Row:
    """A row of the values that were read for it, or of what was wrong in reading."""
    if isinstance(values, str):
        return bad_row(line, where, values)
    try:
        request = Request.from_dict({**defaults, **values})
    except BadRequest as error:
        return bad_row(line, where, *error.problems)
    if request.scheduler is not None and (problem := _scheduler_problem(request.scheduler)):
        return bad_row(line, where, problem)
    return Row(line=line, where=where, request=request)


def bad_row(line: int, where: str, *problems: str) -> Row:
    """A row with what is wrong with it, each told with its place."""
    return Row(
        line=line, where=where, problems=tuple(f"{where}: {short(text)}" for text in problems)
    )


def strict(rows: Iterable[Row]) -> Iterator[Row]:
    """Hand on the good rows; when all are read, refuse the whole if one was bad.

    So whoever takes them keeps none until the end.

    Raises:
        BadRequest: with the problems of the first bad rows, and how many more there are.
    """
    told: list[str] = []
    bad = 0
    for row in rows:
        if row.request is not None:
            yield row
            continue
        bad += 1
        if bad <= TOLD:
            told += row.problems
    if bad > TOLD:
        told.append(f"and {bad - TOLD} more rows")
    if told:
        raise BadRequest(*told)


@lru_cache(maxsize=256)
def field_name(name: str) -> str:
    """The name of a field as a request has it: `Guidance Scale` is `guidance_scale`."""
    return re.sub(r"[\s-]+", "_", name.strip()).casefold()


def by_field(values: Mapping[str, object]) -> dict[str, object] | str:
    """The values by the names of fields, or that one is there twice."""
    named = {field_name(name): value for name, value in values.items()}
    if len(named) == len(values):
        return named
    return f"{short(twice([field_name(name) for name in values]))} is there twice; allowed is once"


def twice(names: list[str]) -> str:
    """The first name that was there before."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError(names)


def short(text: str) -> str:
    """The text, or the beginning of a long one."""
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


@lru_cache(maxsize=256)
def _scheduler_problem(name: str) -> str | None:
    try:
        scheduler.resolve(name)
    except BadRequest as error:
        return str(error)
    return None
