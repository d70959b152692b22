"""The texts in an Exif block, and where JPEG and WebP keep it.

Sources: Exif 2.32 (CIPA DC-008) for the tags and the eight bytes before a comment; TIFF 6.0 for
the directories; ITU-T T.81 annex B for JPEG's segments; RFC 9649 for WebP's chunks.
"""

import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, Final

from sdamd.errors import BadMetadata
from sdamd.metadata import TEXT_MAX_BYTES

COMMENT_KEY: Final = "UserComment"

_DESCRIPTION, _MAKE, _MODEL, _SOFTWARE = 0x010E, 0x010F, 0x0110, 0x0131
_EXIF_DIRECTORY, _MAKER_NOTE, _USER_COMMENT = 0x8769, 0x927C, 0x9286
_NAMES: Final = {
    _DESCRIPTION: "ImageDescription",
    _MAKE: "Make",
    _MODEL: "Model",
    _SOFTWARE: "Software",
    _MAKER_NOTE: "MakerNote",
    _USER_COMMENT: COMMENT_KEY,
}
_MAX_ENTRIES: Final = 1000
_SIZES: Final = {1: 1, 2: 1, 7: 1}  # byte, text, undefined: what texts are kept in

# ComfyUI writes `prompt:{...}` and `workflow:{...}` into the tags from Model downwards.
_KEYED: Final = re.compile(r"\s*(prompt|workflow):\s*(?=\{)", re.IGNORECASE)


def read_texts(data: bytes) -> dict[str, str]:
    """The texts of an Exif block, by their tags' names; a damaged block gives what it has."""
    data = data.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None or len(data) < 8:
        return {}
    texts: dict[str, str] = {}
    (first,) = struct.unpack_from(f"{order}I", data, 4)
    for tag, value in _entries(data, first, order):
        text = decode_comment(value) if tag == _USER_COMMENT else _plain(value)
        if keyed := _KEYED.match(text):
            texts[keyed[1].lower()] = text[keyed.end() :]
        elif tag in _NAMES and text:
            texts[_NAMES[tag]] = text
    return texts


def _entries(data: bytes, offset: int, order: str) -> Iterator[tuple[int, bytes]]:
    """The tags with bytes in them, of the first directory and the one for Exif in it."""
    waiting, seen = [offset], set[int]()
    while waiting:
        offset = waiting.pop()
        if offset in seen or offset + 2 > len(data):
            continue
        seen.add(offset)
        (count,) = struct.unpack_from(f"{order}H", data, offset)
        for number in range(min(count, _MAX_ENTRIES)):
            at = offset + 2 + 12 * number
            if at + 12 > len(data):
                break
            tag, kind, length, value = struct.unpack_from(f"{order}HHII", data, at)
            if tag == _EXIF_DIRECTORY:
                waiting.append(value)
            elif kind in _SIZES:
                start = at + 8 if length <= 4 else value
                yield tag, data[start : start + min(length, 2 * TEXT_MAX_BYTES)]


def _plain(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "replace")


def decode_comment(value: bytes) -> str:
    """The text of a UserComment, in any of the ways that programs write it.

    Eight bytes tell the code; some leave them out. `UNICODE` is UTF-16 in either order of bytes,
    whatever the order of the block, and now and then UTF-8.
    """
    code, text = value[:8], value[8:]
    if code == b"UNICODE\0":
        return _utf16(text)
    if code in {b"ASCII\0\0\0", b"\0" * 8}:
        return text.rstrip(b"\0").decode("utf-8", "replace")
    if code == b"JIS\0\0\0\0\0":
        return text.rstrip(b"\0").decode("iso2022_jp", "replace")
    return value.rstrip(b"\0").decode("utf-8", "replace")


def _utf16(text: bytes) -> str:
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return text.decode("utf-16", "replace").rstrip("\0")
    # Latin letters have a zero byte, and which one tells the order.
    high, low = text[::2].count(0), text[1::2].count(0)
    if high == low == 0 and (b"Steps:" in text or text.lstrip()[:1] == b"{"):
        return text.decode("utf-8", "replace")  # what no UTF-16 text has in it
    order = "utf-16-le" if low > high else "utf-16-be"
    return text.decode(order, "replace").rstrip("\0")


# -- files ---------------------------------------------------------------------------------------

_BEFORE_PIXELS: Final = 0xDA  # start of scan
_END: Final = 0xD9
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD9)})


def in_jpeg(file: BinaryIO) -> bytes:
    """The Exif block of a JPEG, or nothing.

    Raises:
        BadMetadata: the file ends within a segment.
    """
    file.seek(2)
    while True:
        mark = file.read(2)
        while mark[1:] == b"\xff":  # fill bytes
            mark = b"\xff" + file.read(1)
        if len(mark) < 2:
            raise BadMetadata("is cut short or damaged: it ends before its pixels")
        if mark[0] != 0xFF or mark[1] in {_BEFORE_PIXELS, _END}:
            return b""
        if mark[1] in _WITHOUT_LENGTH:
            continue
        length = int.from_bytes(file.read(2))
        if mark[1] == 0xE1 and length >= 8:
            data = file.read(length - 2)
            if data.startswith(b"Exif\0\0"):
                return data
        else:
            file.seek(max(0, length - 2), 1)


def in_webp(file: BinaryIO) -> bytes:
    """The Exif block of a WebP, or nothing.

    Raises:
        BadMetadata: the block is longer than any record.
    """
    file.seek(12)
    while len(header := file.read(8)) == 8:
        length = int.from_bytes(header[4:], "little")
        if header[:4] == b"EXIF":
            if length > 8 * TEXT_MAX_BYTES:
                raise BadMetadata(f"holds a record that is too large: {length} bytes")
            return file.read(length)
        file.seek(length + length % 2, 1)
    return b""
