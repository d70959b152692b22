"""From rows to rows: the cells of axes, and the texts of templates."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from sdamd.batch_file.axes import Axis
from sdamd.batch_file.rows import Row, short
from sdamd.errors import BadRequest
from sdamd.request import SEED_MAX, Request
from sdamd.template import COUNTED, Choice, Mode, Template, Wildcards, is_template

ROW_PICTURES_MAX = 100_000
"""How many pictures the variations of one row may be, unless a limit says otherwise."""

_PROMPTS = ("prompt", "negative_prompt")
_TEMPLATES_KEPT = 64


def expand(
    rows: Iterable[Row],
    *,
    mode: Mode = Mode.RANDOM,
    wildcards: Wildcards,
    axes: Sequence[Axis] = (),
    limit: int | None = None,
) -> Iterator[Row]:
    """Make the rows of each cell of the axes and of each text of the templates.

    The prompts of what comes out are literal: no choice is left in them. The first axis changes
    slowest. All cells of a row have its seed, drawn once, so that they differ by the axes alone.
    Picture i of a template has seed + i, and at random its text is decided by that seed. In the
    combinatorial mode each combination comes `count` times, and those of the negative prompt
    change fastest.

    Args:
        rows: as `read` gives them; those with problems pass.
        mode: how the choices are drawn that do not say it.
        wildcards: what `__names__` mean.
        axes: of `--vary`.
        limit: of the pictures of each row; needed where its combinations are too many.
    """
    templates = _Templates(wildcards, mode)
    for row in rows:
        if row.request is None:
            yield row
            continue
        try:
            cells = _cells(row, row.request, axes, templates)
            left = _allowed(cells, limit, is_varied=bool(axes))
        except BadRequest as error:
            yield _bad(row, error)
            continue
        yield from _made(row, cells, left)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One request of a row: its labels, and the texts of its templates if it has any."""

    labels: tuple[str, ...]
    request: Request
    texts: "_Texts | None"

    def pictures(self) -> float:
        return self.request.count if self.texts is None else self.texts.pictures(self.request)


def _cells(
    row: Row, request: Request, axes: Sequence[Axis], templates: "_Templates"
) -> list[_Cell]:
    """The cells of a row, of which there are at most `axes.CELLS_MAX`.

    Raises:
        BadRequest: a template is wrong.
    """
    if axes and request.seed is None:
        request = replace(request, seed=_drawn_seed())
    labelled = (zip(axis.labels(), axis.values, strict=True) for axis in axes)
    cells: list[_Cell] = []
    for cell in product(*labelled):
        changed: dict[str, Any] = {
            axis.field: value for axis, (_, value) in zip(axes, cell, strict=True)
        }
        asked = replace(request, **changed) if changed else request
        texts = None if row.literal else templates.of(asked)
        cells.append(_Cell(labels=tuple(label for label, _ in cell), request=asked, texts=texts))
    return cells


def _allowed(cells: Sequence[_Cell], limit: int | None, *, is_varied: bool) -> int:
    """How many pictures are made of a row.

    Raises:
        BadRequest: they are too many, and no limit is given.
    """
    total = sum(cell.pictures() for cell in cells)
    if limit is not None:
        return limit
    if total <= ROW_PICTURES_MAX:
        return int(total)
    if total == math.inf:
        said = "without end, since something in it is drawn at random or in turn"
    else:
        said = f"{min(int(total), COUNTED)}{' or more' if total >= COUNTED else ''} pictures"
    what = "variations" if is_varied else "combinations"
    raise BadRequest(f"its {what} are {said}; allowed are {ROW_PICTURES_MAX}, or give a limit")


def _made(row: Row, cells: Sequence[_Cell], left: int) -> Iterator[Row]:
    for cell in cells:
        made = replace(row, literal=True, cell=cell.labels)
        if left <= 0:
            return
        if cell.texts is None:
            request = cell.request
            if request.count > left:
                request = replace(request, count=left)
            left -= request.count
            yield replace(made, request=request)
            continue
        try:
            for request in islice(cell.texts.requests(cell.request), left):
                left -= 1
                yield replace(made, request=request)
        except BadRequest as error:
            yield _bad(made, error)


def _bad(row: Row, error: BadRequest) -> Row:
    problems = tuple(f"{row.where}: {short(problem)}" for problem in error.problems)
    return replace(row, request=None, problems=problems)


def _drawn_seed() -> int:
    """A seed of four bytes, as `batch` draws them."""
    return int.from_bytes(os.urandom(4))


class _Templates:
    """Templates by their text, the last few of them, and the wildcards that they share."""

    def __init__(self, wildcards: Wildcards, mode: Mode) -> None:
        self._wildcards = wildcards
        self._mode = mode
        self._shared: dict[str, Choice] = {}
        self._kept: dict[str, Template] = {}

    def of(self, request: Request) -> "_Texts | None":
        """The texts of a request's prompts, or None where neither is a template.

        Raises:
            BadRequest: with what is wrong with either.
        """
        if self._mode is Mode.OFF:
            return None
        found: dict[str, Template] = {}
        counts: dict[str, int | None] = {}
        problems: list[str] = []
        for name in _PROMPTS:
            text = getattr(request, name)
            if not is_template(text):
                continue
            try:
                found[name] = self._template(text)
                counts[name] = found[name].count(self._mode)
            except BadRequest as error:
                problems += (f"{name}: {problem}" for problem in error.problems)
        if problems:
            raise BadRequest(*problems)
        return _Texts(found, counts, self._mode) if found else None

    def _template(self, text: str) -> Template:
        if text not in self._kept:
            if len(self._kept) >= _TEMPLATES_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[text] = Template(text, self._wildcards, self._shared)
        return self._kept[text]


class _Texts:
    """The texts that a request's templates become; templates and counts are by field."""

    def __init__(
        self, found: Mapping[str, Template], counts: Mapping[str, int | None], mode: Mode
    ) -> None:
        self._found = found
        self._counts = counts
        self._mode = mode

    def pictures(self, request: Request) -> float:
        """How many there are; infinite where nothing ends them."""
        if self._mode is Mode.RANDOM:
            return request.count
        ending = [count for count in self._counts.values() if count is not None]
        return min(COUNTED, math.prod(ending) * request.count) if ending else math.inf

    def requests(self, request: Request) -> Iterator[Request]:
        """One request for each picture, in which the prompts are literal and the seed is there.

        Raises:
            BadRequest: a text grows too long.
        """
        first = _drawn_seed() if request.seed is None else request.seed
        pictures = self.pictures(request)
        number = 0
        while number < pictures:
            seed = (first + number) % (SEED_MAX + 1)
            index = number if self._mode is Mode.RANDOM else number // request.count
            texts: dict[str, Any] = self._at(index, seed)
            yield replace(request, count=1, seed=seed, **texts)
            number += 1

    def _at(self, index: int, seed: int) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name in reversed(list(self._found)):
            own, count = index, self._counts[name]
            if count is not None and self._mode is Mode.COMBINATORIAL:
                index, own = divmod(index, count)
            texts[name] = self._found[name].make(own, seed, mode=self._mode, stream=name)
        return texts
