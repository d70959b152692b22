"""The lines of a file of any length, in memory of bounded size."""

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, Self

from sdamd.errors import BadRequest, StorageError

ROW_MAX_BYTES = 1024 * 1024
"""The longest row: two prompts of 64 KiB take at most 768 KiB as escaped JSON."""

_CHUNK = 64 * 1024
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")


class Line(NamedTuple):
    """A line with its ending, or what is wrong with it; numbers count from 1."""

    number: int
    text: str
    problem: str | None = None


class Lines:
    """The lines of a text file: UTF-8, or UTF-16 with its mark.

    A line that is too long or is no text comes with its problem, and reading goes on behind it.

    Args:
        where: the file in words.
        file: read from where it stands, and closed when the context ends.

    Raises:
        BadRequest: the file is empty, or its beginning is not that of a text.
        StorageError: it cannot be read.
    """

    def __init__(self, where: str, file: BinaryIO) -> None:
        self.where = where
        self._file = file
        self._back: deque[Line] = deque()
        start = self._read()
        if start.startswith(_UTF32):
            raise BadRequest(f"{where} is UTF-32 text; allowed are UTF-8 and UTF-16")
        self._encoding = _UTF16.get(start[:2], "utf-8")
        self._start = start[2:] if start[:2] in _UTF16 else start.removeprefix(codecs.BOM_UTF8)
        if len(start) < _CHUNK and not self._start.strip():
            raise BadRequest(f"{where} is empty; allowed is at least one row")
        if self._encoding == "utf-8" and b"\0" in start:
            raise BadRequest(f"{where} is no text, it holds NUL bytes; allowed is UTF-8 text")
        self._lines = self._split()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        return self._back.popleft() if self._back else next(self._lines)

    def push(self, lines: Sequence[Line]) -> None:
        """Put lines back, so that they come next."""
        self._back.extendleft(reversed(lines))

    def chunks(self) -> Iterator[str]:
        """The text in pieces, instead of its lines.

        Raises:
            BadRequest: it is no text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        for chunk in self._utf8():
            try:
                yield decoder.decode(chunk)
            except UnicodeDecodeError as error:
                raise BadRequest(f"{self.where}: {_not_utf8(error)}") from error
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise BadRequest(f"{self.where} ends within a letter") from error

    def _split(self) -> Iterator[Line]:
        number = 1
        rest = b""
        is_long = False
        for chunk in self._utf8():
            if is_long and b"\n" not in chunk:
                continue  # the rest of a line that is too long is read and left
            *whole, rest = (rest + chunk).split(b"\n")
            for content in whole:
                yield _line(number, content + b"\n", is_long=is_long)
                number, is_long = number + 1, False
            if len(rest) > ROW_MAX_BYTES:
                rest, is_long = b"", True
        if rest or is_long:
            yield _line(number, rest, is_long=is_long)

    def _utf8(self) -> Iterator[bytes]:
        """The bytes from the beginning on, as UTF-8 whatever the file is."""
        chunk, self._start = self._start, b""
        if self._encoding == "utf-8":
            while chunk:
                yield chunk
                chunk = self._read()
            return
        decoder = codecs.getincrementaldecoder(self._encoding)()
        try:
            while chunk:
                yield decoder.decode(chunk).encode("utf-8")
                chunk = self._read()
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise BadRequest(f"{self.where} is no UTF-16 text: {error.reason}") from error

    def _read(self) -> bytes:
        try:
            return self._file.read(_CHUNK)
        except OSError as error:
            raise StorageError(f"{self.where} cannot be read: {error.strerror}") from error


def _line(number: int, content: bytes, *, is_long: bool) -> Line:
    if is_long or len(content) > ROW_MAX_BYTES:
        what = f"it is longer than {ROW_MAX_BYTES} bytes, which a row may be"
        return Line(number, "", what)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return Line(number, "", _not_utf8(error))
    if "\0" in text:
        return Line(number, "", "it holds a NUL character; allowed is text without it")
    return Line(number, text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return (
        f"it is not UTF-8 text (byte 0x{byte:02X} at {error.start + 1}), most likely of an old "
        "code page such as Windows-1251 or 1252; save the file as UTF-8"
    )
