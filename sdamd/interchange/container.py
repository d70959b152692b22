"""A picture's file to the texts in it, by what the file is and not by its name.

PNG, JPEG, WebP and AVIF; a text file stands for itself, as tools write it beside a picture. Only
where a PNG has no record in its chunks are its pixels looked at, for a hidden one.
"""

from pathlib import Path
from typing import BinaryIO, Final

from sdamd.errors import BadMetadata
from sdamd.interchange import avif, exif, png
from sdamd.metadata import PARAMETERS_KEY, TEXT_MAX_BYTES

HIDDEN_KEY: Final = "hidden"
"""The key of a text that was hidden in the pixels."""

BESIDE_KEY: Final = "beside"
"""The key of a text of a file of its own, beside the picture."""

RECORD_KEYS: Final = frozenset({
    "sdamd", PARAMETERS_KEY, "prompt", "workflow", "invokeai_metadata", "sd-metadata", "Dream",
    "Comment", exif.COMMENT_KEY, "fooocus_scheme",
})  # fmt: skip
"""The keys that tools keep records under."""

_READ: Final = "read are PNG, JPEG, WebP, AVIF, and texts in .txt and .json"


def read_texts(path: Path) -> dict[str, str]:
    """Read the texts of a file.

    Raises:
        OSError: the file cannot be read.
        BadMetadata: with a sentence that goes on from the file's name.
    """
    if path.exists() and not path.is_file():
        raise BadMetadata("is not a file")
    with path.open("rb") as file:
        start = file.read(16)
        if start.startswith(png.SIGNATURE):
            texts = _in_png(path, file)
        elif start.startswith(b"\xff\xd8\xff"):
            texts = exif.read_texts(exif.in_jpeg(file))
        elif start.startswith(b"RIFF") and start[8:12] == b"WEBP":
            texts = exif.read_texts(exif.in_webp(file))
        elif start[4:12] in {b"ftypavif", b"ftypavis"}:
            texts = exif.read_texts(avif.exif_block(file))
        else:
            return _as_text(path, file, start)
    if not RECORD_KEYS & set(texts) and (beside := _beside(path)) is not None:
        texts[BESIDE_KEY] = beside
    return texts


def _in_png(path: Path, file: BinaryIO) -> dict[str, str]:
    texts, block = png.read_texts(file)
    if block:
        # A comment in Exif goes before the texts, but only where there is one.
        texts |= exif.read_texts(block)
    if not RECORD_KEYS & set(texts):
        from sdamd.interchange import hidden  # noqa: PLC0415  # it needs Pillow

        if text := hidden.read_file(path):
            texts[HIDDEN_KEY] = text
    return texts


_TEXT_SUFFIXES: Final = (".txt", ".json")
"""A text of any other name may be half a download or a page of the web."""


def _as_text(path: Path, file: BinaryIO, start: bytes) -> dict[str, str]:
    """A file of text: a record beside a picture, or a graph saved as JSON."""
    file.seek(0)
    data = file.read(TEXT_MAX_BYTES + 1)
    if path.suffix.lower() not in _TEXT_SUFFIXES or b"\0" in start or not data.strip():
        raise BadMetadata(f"is neither a picture nor a text of a record; {_READ}")
    if len(data) > TEXT_MAX_BYTES:
        raise BadMetadata(
            f"is a text of more than {TEXT_MAX_BYTES} bytes; allowed are at most so many"
        )
    try:
        return {BESIDE_KEY: data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        raise BadMetadata(f"is no UTF-8 text (byte {error.start}); {_READ}") from error


def _beside(path: Path) -> str | None:
    """The text beside a picture (`x.txt` for `x.png`), if it is a record and no caption."""
    file = path.with_suffix(".txt")
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        data = opened.read(TEXT_MAX_BYTES + 1)
    if len(data) > TEXT_MAX_BYTES or b"Steps:" not in data:
        return None
    return data.decode("utf-8-sig", "replace")
