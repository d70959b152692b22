"""Where an AVIF keeps its Exif block.

Source: ISO/IEC 14496-12 (the boxes `meta`, `iinf`, `infe`, `iloc`), and 23008-12 annex A: before
an Exif block stand four bytes that say where in it the TIFF header is.
"""

import io
from collections.abc import Iterator
from typing import BinaryIO, Final

from sdamd.errors import BadMetadata
from sdamd.metadata import TEXT_MAX_BYTES

_META_MAX_BYTES: Final = 4 * TEXT_MAX_BYTES
_EXIF_MAX_BYTES: Final = 8 * TEXT_MAX_BYTES
_MAX_ITEMS: Final = 10_000


def exif_block(file: BinaryIO) -> bytes:
    """The Exif block of an AVIF, or nothing.

    Raises:
        BadMetadata: the tables that tell where it is are cut short, or it is too large.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    for kind, end in _boxes(file, size):
        if kind == b"meta":
            length = end - file.tell()
            if length > _META_MAX_BYTES:
                raise BadMetadata(f"holds a record that is too large: {length} bytes")
            place = _place(file.read(length))
            if place is None:
                return b""
            start, length = place
            if length > _EXIF_MAX_BYTES:
                raise BadMetadata(f"holds a record that is too large: {length} bytes")
            file.seek(start)
            data = file.read(length)
            return data[4 + int.from_bytes(data[:4]) :]
        file.seek(end)
    raise BadMetadata("is damaged: its AVIF container has no list of what is in it")


def _boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """The kind of each box, and where it ends; the file stands at its content meanwhile."""
    while (start := file.tell()) + 8 <= size:
        header = file.read(8)
        length = int.from_bytes(header[:4])
        if length == 1:
            length = int.from_bytes(file.read(8))
        end = size if length == 0 else start + length
        if end < file.tell() or end > size:
            raise BadMetadata("is cut short or damaged: a part of it goes beyond its end")
        yield header[4:], end


class _Reader:
    """Numbers of a box one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, size: int) -> int:
        """The next number of so many bytes.

        Raises:
            BadMetadata: there are not so many left.
        """
        if self.at + size > len(self.data):
            raise BadMetadata("is cut short or damaged: its AVIF container ends within a table")
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at])


def _place(meta: bytes) -> tuple[int, int] | None:
    """Where the Exif block is, and how long, by the tables in `meta`."""
    file = io.BytesIO(meta)
    file.seek(4)  # version and flags
    item: int | None = None
    locations = b""
    for kind, end in _boxes(file, len(meta)):
        data = file.read(end - file.tell())
        if kind == b"iinf":
            item = _exif_item(data)
        elif kind == b"iloc":
            locations = data
    return None if item is None else _location(locations, item)


def _exif_item(data: bytes) -> int | None:
    """The number of the item that is an Exif block."""
    file = io.BytesIO(data)
    file.seek(6 if data[:1] == b"\0" else 8)  # version, flags, and the count
    for kind, end in _boxes(file, len(data)):
        entry = _Reader(file.read(end - file.tell()))
        version = entry.number(4) >> 24
        if kind == b"infe" and version >= 2:
            number = entry.number(2 if version == 2 else 4)
            entry.number(2)  # protection
            if entry.number(4).to_bytes(4) == b"Exif":
                return number
    return None


def _location(data: bytes, wanted: int) -> tuple[int, int] | None:
    """Where an item's first piece is, if it is in the file itself."""
    table = _Reader(data)
    version = table.number(4) >> 24
    sizes = table.number(2)
    offset, length, base, index = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    wide = 4 if version == 2 else 2
    for _ in range(min(table.number(wide), _MAX_ITEMS)):
        item = table.number(wide)
        method = table.number(2) & 15 if version else 0
        table.number(2)  # which file
        start = table.number(base)
        for piece in range(min(table.number(2), _MAX_ITEMS)):
            table.number(index if version else 0)
            place, size = start + table.number(offset), table.number(length)
            if item == wanted and piece == 0:
                return (place, size) if method == 0 else None
    return None
