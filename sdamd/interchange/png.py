"""The texts in a PNG's chunks, without its pixels.

Source: Portable Network Graphics (W3C, third edition), 11.3.3 Textual information.
"""

import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from sdamd.errors import BadMetadata
from sdamd.metadata import TEXT_MAX_BYTES

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"

# A chunk's text may be compressed; what it grows to is limited by TEXT_MAX_BYTES.
_CHUNK_MAX_BYTES: Final = 2 * TEXT_MAX_BYTES
_TEXTS_MAX_BYTES: Final = 8 * TEXT_MAX_BYTES

_WANTED: Final = (b"tEXt", b"zTXt", b"iTXt", b"eXIf")


def read_texts(file: BinaryIO) -> tuple[dict[str, str], bytes]:
    """Read the texts of a PNG, before or after its pixels, and its Exif block (or nothing).

    So it takes no memory for the picture, however large its header says that it is.

    Raises:
        BadMetadata: with a sentence that goes on from the file's name: it is cut short, or a
            text is damaged or too large.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(len(SIGNATURE))
    texts: dict[str, str] = {}
    exif = b""
    for kind, data in _chunks(file, size):
        if kind == b"eXIf":
            exif = data
        else:
            key, text = _read_text(kind, data)
            texts[key] = text
    return texts, exif


def _chunks(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the data of each text chunk; the other chunks are passed over."""
    total = 0
    while True:
        header = file.read(8)
        length, kind = int.from_bytes(header[:4]), header[4:]
        end = file.tell() + length + 4
        if len(header) < 8 or end > size:
            raise BadMetadata(f"is cut short or damaged: it ends early, at {size} bytes")
        if kind == b"IEND":
            return
        if kind in _WANTED:
            total += length
            if length > _CHUNK_MAX_BYTES or total > _TEXTS_MAX_BYTES:
                raise BadMetadata(f"holds a record that is too large: {total} bytes")
            data = file.read(length)
            if int.from_bytes(file.read(4)) != zlib.crc32(kind + data):
                raise BadMetadata("is damaged: the checksum of its record is wrong")
            yield kind, data
        file.seek(end)


def _read_text(kind: bytes, data: bytes) -> tuple[str, str]:
    """Read one text chunk: its key and its text."""
    key, _, rest = data.partition(b"\0")
    if kind == b"tEXt":
        return key.decode("latin-1"), rest.decode("latin-1")
    if kind == b"zTXt":
        return key.decode("latin-1"), inflated(rest[1:]).decode("latin-1")
    is_compressed = rest[:1] == b"\1"
    # After the two flags: the language, the key in that language, the text.
    _, _, text = rest[2:].partition(b"\0")[2].partition(b"\0")
    return key.decode("latin-1"), (inflated(text) if is_compressed else text).decode(
        "utf-8", "replace"
    )


def inflated(data: bytes, window: int = zlib.MAX_WBITS) -> bytes:
    """Unpack a text; `window` as of `zlib.decompressobj`, plus 16 for gzip.

    Raises:
        BadMetadata: it is damaged, or grows beyond what is read.
    """
    unpacker = zlib.decompressobj(window)
    try:
        text = unpacker.decompress(data, TEXT_MAX_BYTES + 1)
    except zlib.error as error:
        raise BadMetadata(f"is damaged: its record cannot be unpacked ({error})") from error
    if len(text) > TEXT_MAX_BYTES:
        raise BadMetadata(
            f"holds a record that is too large: over {TEXT_MAX_BYTES} bytes when unpacked"
        )
    return text
