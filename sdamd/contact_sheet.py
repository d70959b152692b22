"""Contact sheets: the pictures of `--vary` side by side, each below the values that made it.

The first axis runs across, the second down, and each value of a further one is a sheet of its
own under a title. One axis alone fills line after line. What does not fit a sheet goes on on the
next one, with its labels. A sheet is made from the files of the pictures, of which one is open
at a time, and is on the disk before the next is begun: memory is that of a sheet and a picture,
however many there are.
"""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from sdamd.errors import StorageError

SHEET_SIDE = 4096
"""The longest side of a sheet in pixels: 48 MiB while it is made, and every viewer opens it."""

THUMBNAIL = 384
"""The longest side of a picture on a sheet."""

_GAP = 8
_FONT_SIZE = 18
_LINE = 24
_LABEL_LINES = 3
_PAPER = (255, 255, 255)
_INK = (20, 20, 20)
_FAILED = (232, 232, 232)

# Pillow's own font has Latin letters only; these have those of the languages of prompts, where
# they are installed: Noto on Linux, YaHei and Segoe on Windows.
_FONTS = ("NotoSansCJK-Regular.ttc", "msyh.ttc", "segoeui.ttf", "DejaVuSans.ttf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A picture and its label on each axis; `path` is None where it failed."""

    labels: tuple[str, ...]
    path: Path | None


def write(cells: Iterable[Cell], folder: Path, stem: str = "contact-sheet") -> Iterator[Path]:
    """Write the sheets of a matrix as PNG files, and yield the path of each when it is there.

    Args:
        cells: in the order in which `batch_file.expand` makes them: the first axis slowest.
            Pictures with the same labels stand one after the other.
        folder: where the sheets go; it must be there.
        stem: their names are `stem-1.png` and so on; a sheet of that name is replaced.

    Raises:
        StorageError: a sheet cannot be written.
    """
    listed = list(cells)  # labels and paths only
    if not listed:
        return
    number = 0
    for title, sheet in _sheets(listed):
        for page in _pages(title, sheet):
            number += 1
            path = folder / f"{stem}-{number}.png"
            _save(page.drawn(), path)
            yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """What fits one sheet: the pictures line by line, with None where there is none."""

    title: str
    across: Sequence[str]
    down: Sequence[str]
    lines: Sequence[Sequence[Cell | None]]
    captions: bool

    def drawn(self) -> Image.Image:
        width, height = _cell_size(self._cells())
        left = 0 if not any(self.down) else THUMBNAIL // 2
        top = (_LINE + _GAP if self.title else 0) + (_text_height() if any(self.across) else 0)
        height += _text_height() if self.captions else 0
        columns = max(map(len, self.lines))
        size = (
            left + columns * (width + _GAP) + _GAP,
            top + len(self.lines) * (height + _GAP) + _GAP,
        )
        sheet = Image.new("RGB", size, _PAPER)
        draw = ImageDraw.Draw(sheet)
        text = self.title + "".join((*self.across, *self.down))
        text += "".join(
            label for line in self.lines for cell in line if cell for label in cell.labels
        )
        font = _font(text)
        if self.title:
            _write(draw, (_GAP, _GAP // 2), size[0] - 2 * _GAP, self.title, font, lines=1)
        for column, label in enumerate(self.across):
            at = (left + _GAP + column * (width + _GAP), top - _text_height())
            _write(draw, at, width, label, font)
        for row, line in enumerate(self.lines):
            y = top + _GAP + row * (height + _GAP)
            if any(self.down):
                _write(draw, (_GAP, y), left - 2 * _GAP, self.down[row], font, lines=8)
            for column, cell in enumerate(line):
                if cell is None:
                    continue
                x = left + _GAP + column * (width + _GAP)
                if self.captions:
                    _write(draw, (x, y), width, ", ".join(cell.labels), font)
                    _place(sheet, cell, (x, y + _text_height()), (width, height - _text_height()))
                else:
                    _place(sheet, cell, (x, y), (width, height))
        return sheet

    def _cells(self) -> list[Cell]:
        return [cell for line in self.lines for cell in line if cell]


def _sheets(cells: Sequence[Cell]) -> Iterator[tuple[str, Sequence[Cell]]]:
    """The cells of each value of the third and further axes, with those values as the title."""
    in_order: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        in_order.setdefault(cell.labels[2:], []).append(cell)
    for further, found in in_order.items():
        yield ", ".join(further), found


def _pages(title: str, cells: Sequence[Cell]) -> Iterator[_Page]:
    per_line = max(1, (SHEET_SIDE - THUMBNAIL // 2) // (THUMBNAIL + _GAP))
    per_page = max(1, (SHEET_SIDE - 4 * _text_height()) // (THUMBNAIL + _GAP + _text_height()))
    if len(cells[0].labels) < 2:
        lines = [cells[i : i + per_line] for i in range(0, len(cells), per_line)]
        for start in range(0, len(lines), per_page):
            page = lines[start : start + per_page]
            yield _Page(title=title, across=(), down=(), lines=page, captions=True)
        return
    columns = [
        (label, list(group)) for label, group in groupby(cells, key=lambda cell: cell.labels[0])
    ]
    # Several pictures of a cell stand below each other.
    down = [cell.labels[1] for cell in max((group for _, group in columns), key=len)]
    for first in range(0, len(columns), per_line):
        for start in range(0, len(down), per_page):
            across = columns[first : first + per_line]
            rows = range(start, min(start + per_page, len(down)))
            yield _Page(
                title=title,
                across=[label for label, _ in across],
                down=[down[row] for row in rows],
                lines=[
                    [group[row] if row < len(group) else None for _, group in across]
                    for row in rows
                ],
                captions=False,
            )


def _cell_size(cells: Iterable[Cell]) -> tuple[int, int]:
    """The smallest room in which each picture of a page fits; only headers are read."""
    sizes = [size for cell in cells if (size := _size(cell))]
    if not sizes:
        return THUMBNAIL, THUMBNAIL
    return max(width for width, _ in sizes), max(height for _, height in sizes)


def _size(cell: Cell) -> tuple[int, int] | None:
    if cell.path is None:
        return None
    try:
        with Image.open(cell.path) as picture:
            scale = min(1.0, THUMBNAIL / max(picture.size))
            return max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    except (OSError, ValueError, Image.DecompressionBombError):
        return None  # it is shown as missing


def _place(sheet: Image.Image, cell: Cell, at: tuple[int, int], room: tuple[int, int]) -> None:
    """Put a picture in the middle of its room, or say that there is none."""
    said = "failed"
    if cell.path is not None:
        try:
            with Image.open(cell.path) as picture:
                small = ImageOps.contain(picture.convert("RGB"), _size(cell) or room)
        except (OSError, ValueError, Image.DecompressionBombError):
            said = f"{cell.path.name} cannot be read"
        else:
            x = at[0] + (room[0] - small.width) // 2
            sheet.paste(small, (x, at[1] + (room[1] - small.height) // 2))
            return
    draw = ImageDraw.Draw(sheet)
    draw.rectangle((*at, at[0] + room[0] - 1, at[1] + room[1] - 1), fill=_FAILED)
    _write(draw, (at[0] + _GAP, at[1] + _GAP), room[0] - 2 * _GAP, said, _font(said))


def _text_height() -> int:
    return _LABEL_LINES * _LINE + _GAP // 2


def _write(
    draw: ImageDraw.ImageDraw,
    at: tuple[int, int],
    width: int,
    text: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    *,
    lines: int = _LABEL_LINES,
) -> None:
    """Write a text in so many lines at most; the end of a longer one is left out, with dots."""
    wrapped = _wrapped(" ".join(text.split()), width, font, lines)
    for number, line in enumerate(wrapped):
        draw.text((at[0], at[1] + number * _LINE), line, fill=_INK, font=font)


def _wrapped(
    text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, lines: int
) -> list[str]:
    """Cut a text into lines that fit, between words where there are any."""
    wrapped: list[str] = []
    # No line holds more, and measuring takes time as the length.
    rest = text[: lines * width]
    while rest and len(wrapped) < lines:
        taken = _fitting(rest, width, font)
        if taken < len(rest) and (blank := rest.rfind(" ", 1, taken + 1)) > 0:
            taken = blank
        if taken < len(rest) and len(wrapped) == lines - 1:
            wrapped.append(rest[: max(1, _fitting(rest, width, font) - 2)].rstrip() + "...")
            break
        wrapped.append(rest[:taken].rstrip())
        rest = rest[taken:].lstrip()
    return wrapped


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    """How many letters of a text fit a width; at least one, so that it ends."""
    low, high = 1, len(text)
    while low < high:
        middle = math.ceil((low + high) / 2)
        if font.getlength(text[:middle]) <= width:
            low = middle
        else:
            high = middle - 1
    return low


def _font(text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's font, or for letters that it lacks the first one that is installed."""
    if any(ord(letter) > 0x17F for letter in text):
        for name in _FONTS:
            try:
                return ImageFont.truetype(name, _FONT_SIZE)
            except OSError:
                continue
    return ImageFont.load_default(_FONT_SIZE)


def _save(sheet: Image.Image, path: Path) -> None:
    """Write a sheet whole or not at all."""
    content = io.BytesIO()
    sheet.save(content, "PNG", compress_level=4)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content.getbuffer())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"the contact sheet {path} cannot be written: {error.strerror}"
        ) from error
