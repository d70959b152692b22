"""A record hidden in the lowest bits of a picture's pixels ("stealth"), as Forge and NovelAI do.

The bits go down the columns, from left to right: of alpha alone, or of red, green and blue. A
word of 15 letters tells which, then come 32 bits with the length in bits, then UTF-8 text, which
is packed by gzip where the word ends in `comp`.
"""

import zlib
from typing import Final

from PIL import Image

from sdamd.errors import BadMetadata
from sdamd.interchange.png import inflated
from sdamd.metadata import TEXT_MAX_BYTES

_MAX_PIXELS: Final = 2**25
"""Larger pictures are not searched: their pixels take more than 128 MiB."""

_WORDS: Final = {
    "alpha": (b"stealth_pnginfo", b"stealth_pngcomp"),
    "colours": (b"stealth_rgbinfo", b"stealth_rgbcomp"),
}
_WORD_BYTES: Final = 15
_HEADER_BYTES: Final = _WORD_BYTES + 4
_LOWEST_BIT: Final = [0, 255] * 128


def read(image: Image.Image) -> str | None:
    """The hidden text of a picture, or nothing.

    Raises:
        BadMetadata: with a sentence that goes on from the file's name: there is one, but it is
            damaged or too long.
    """
    if image.width * image.height > _MAX_PIXELS:
        return None
    image.load()
    alpha = image.getchannel("A") if image.mode == "RGBA" else None
    if alpha and (text := _read(alpha, "alpha")) is not None:
        return text
    if image.mode in {"RGB", "RGBA"}:
        return _read(image.convert("RGB"), "colours")
    return None


def read_file(path: object) -> str | None:
    """As `read`, for a PNG file; pictures that are too large or broken have no hidden text.

    Raises:
        BadMetadata: as `read` does.
    """
    from PIL.PngImagePlugin import PngImageFile  # noqa: PLC0415  # only here are pixels needed

    try:
        # Not Image.open, which refuses large pictures before anybody looks at their size.
        with PngImageFile(path) as image:  # type: ignore[arg-type]
            return read(image)
    except (SyntaxError, ValueError, OSError, zlib.error):
        return None  # Pillow's words for no whole picture; the file itself was read before


def _read(image: Image.Image, where: str) -> str | None:
    plain, packed = _WORDS[where]
    columns = image.transpose(Image.Transpose.TRANSPOSE).tobytes()
    header = _bits(columns[: _HEADER_BYTES * 8])
    word = header[:_WORD_BYTES]
    if word not in (plain, packed):
        return None
    length = int.from_bytes(header[_WORD_BYTES:_HEADER_BYTES])
    room = len(columns) // 8 - _HEADER_BYTES
    if length % 8 or length // 8 > min(room, 2 * TEXT_MAX_BYTES):
        raise BadMetadata(
            f"holds a hidden record that is damaged: {length} bits long in a picture with room "
            f"for {room * 8}"
        )
    start = _HEADER_BYTES * 8
    data = _bits(columns[start : start + length])
    if word == packed:
        data = inflated(data, 16 + zlib.MAX_WBITS)
    return data.decode("utf-8", "replace")


def _bits(values: bytes) -> bytes:
    """The lowest bit of each byte, eight to a byte, the first one highest."""
    if not values:
        return b""
    row = Image.frombytes("L", (len(values), 1), values)
    return row.point(_LOWEST_BIT, "1").tobytes()
