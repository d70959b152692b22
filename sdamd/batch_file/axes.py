"""What `--vary` says: fields, and the values that each goes through."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from sdamd import scheduler
from sdamd.batch_file.rows import TOLD, field_name, short
from sdamd.errors import BadRequest, unknown
from sdamd.request import Request, type_of

AXIS_VALUES_MAX = 1000
CELLS_MAX = 10_000

_RANGE = re.compile(
    r"(?P<first>-?[0-9]*\.?[0-9]+)\s*(?:\.\.|-)\s*(?P<last>-?[0-9]*\.?[0-9]+)\s*"
    r"(?:\(\s*[+-]?(?P<step>[0-9]*\.?[0-9]+)\s*\)|\[\s*(?P<count>[0-9]{1,5})\s*\])?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A field that is varied, and its values."""

    field: str
    values: tuple[object, ...]

    def labels(self) -> Iterator[str]:
        """How each value is called on a contact sheet: `steps 20`."""
        return (f"{self.field.replace('_', ' ')} {value}" for value in self.values)


def parse_axes(words: Sequence[str]) -> tuple[Axis, ...]:
    """Read the words of `--vary`: `steps=10,20,30`, `scheduler=Euler a,DPM++ 2M`.

    Numbers may be ranges: `1-5`, `10..30(5)` in steps of 5, `1..2[5]` in five values. A value
    with a comma stands in double quotes: `prompt="a red house, fog","a red house"`.

    Raises:
        BadRequest: with all that is wrong: no field, no value, one out of its range, too many.
    """
    axes: list[Axis] = []
    problems: list[str] = []
    for word in words:
        try:
            axes.append(_axis(word))
        except BadRequest as error:
            problems += (f"--vary {short(word)!r}: {short(text)}" for text in error.problems)
    names = [axis.field for axis in axes]
    problems += (
        f"--vary gives {name} twice; allowed is once"
        for name in sorted(set(names))
        if names.count(name) > 1
    )
    cells = math.prod(len(axis.values) for axis in axes)
    if cells > CELLS_MAX:
        problems.append(f"--vary makes {cells} cells; allowed are {CELLS_MAX}")
    if problems:
        raise BadRequest(*problems)
    return tuple(axes)


def _axis(word: str) -> Axis:
    known = {f.name: f for f in fields(Request) if f.name != "count"}
    written, equals, text = word.partition("=")
    name = field_name(written)
    if not equals:
        raise BadRequest("allowed is FIELD=VALUE,VALUE")
    if name not in known:
        raise BadRequest(unknown(name, sorted(known), "field"))
    cells = _cells(text)
    if type_of(known[name]) in {int, float}:
        is_whole = type_of(known[name]) is int
        cells = [number for cell in cells for number in _numbers(cell, is_whole=is_whole)]
    if len(cells) > AXIS_VALUES_MAX:
        raise BadRequest(f"it has {len(cells)} values; allowed are {AXIS_VALUES_MAX}")
    values: list[object] = []
    problems: list[str] = []
    for cell in cells:
        try:
            values.append(_value(name, cell))
        except BadRequest as error:
            problems += error.problems
    if problems:
        raise BadRequest(*problems[:TOLD])
    return Axis(field=name, values=tuple(dict.fromkeys(values)))


def _value(name: str, cell: str) -> object:
    value = getattr(Request.from_dict({name: cell}), name)
    return scheduler.resolve(cell) if name == "scheduler" else value


def _cells(text: str) -> list[str]:
    """The values between the commas; one in quotes may hold commas."""
    try:
        cells = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise BadRequest(f"a double quote is in the wrong place ({error})") from error
    if not cells or not all(cell.strip() for cell in cells):
        raise BadRequest("a value is missing; allowed is FIELD=VALUE,VALUE")
    return [cell.strip() for cell in cells]


def _numbers(cell: str, *, is_whole: bool) -> list[str]:
    """The numbers of a range, both its ends with them, or the cell itself."""
    found = _RANGE.fullmatch(cell)
    if found is None:
        return [cell]
    first, last = float(found["first"]), float(found["last"])
    if found["count"]:
        count = int(found["count"])
        step = (last - first) / max(1, count - 1)
    else:
        step = math.copysign(float(found["step"] or 1), last - first)
        if not step:
            raise BadRequest(f"{cell!r} has a step of 0; allowed is one above 0")
        ratio = (last - first) / step
        # The hundredth is for 0.1 to 0.9 by 0.2, whose last step rounds to just below.
        count = math.floor(ratio + 0.01) + 1 if ratio < AXIS_VALUES_MAX else AXIS_VALUES_MAX + 1
    if not 1 <= count <= AXIS_VALUES_MAX:
        raise BadRequest(f"{cell!r} has too many or no values; allowed are 1 to {AXIS_VALUES_MAX}")
    numbers = (first + step * index for index in range(count))
    return [str(round(n)) if is_whole else f"{n:.10g}" for n in numbers]
