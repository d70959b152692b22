"""A progress line on a terminal: bar, rate and remaining time."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Counts steps over all pictures; draws on `stream` when that is a terminal, else nothing."""

    def __init__(
        self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._draws = self._stream.isatty()
        self._clock = clock
        self._total = max(1, total)
        self._began: float | None = None
        self._begun_at = 0.0
        self._drawn = 0.0
        self._length = 0
        self._letters = _letters(self._stream)

    def update(self, done: float, text: str) -> None:
        """Say that `done` of `total` steps are done.

        The rate counts from the first update, since loading the model is no step.
        """
        now = self._clock()
        if self._began is None:
            self._began, self._begun_at = now, done
        if self._draws and (now - self._drawn >= 0.1 or done >= self._total):
            self._drawn = now
            line = f"{self._bar(done)} {text}{self._pace(done, now - self._began)}"
            self._draw(line[: self._columns() - 1])

    def clear(self) -> None:
        """Take the line away, so that something else can be printed."""
        if self._draws and self._drawn:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()
            self._drawn = 0.0

    def _draw(self, line: str) -> None:
        """Write over the line before with blanks: Windows' console may print an escape code."""
        self._stream.write(f"\r{line.ljust(min(self._length, self._columns() - 1))}")
        self._stream.flush()
        self._length = len(line)

    def _bar(self, done: float) -> str:
        share = min(1.0, done / self._total)
        filled = round(20 * share)
        full, empty, _ = self._letters
        return f"{full * filled}{empty * (20 - filled)} {share:4.0%}"

    def _pace(self, done: float, seconds: float) -> str:
        made = done - self._begun_at
        if made <= 0 or seconds <= 0:
            return ""
        rate = made / seconds
        left = duration(max(0.0, self._total - done) / rate)
        pace = f"{rate:.2f} steps/s" if rate >= 1 else f"{1 / rate:.2f} s/step"
        separator = self._letters[2]
        return f" {separator} {pace} {separator} {left} left"

    def _columns(self) -> int:
        return shutil.get_terminal_size().columns


def _letters(stream: TextIO) -> tuple[str, str, str]:
    """The bar's full and empty parts and a separator, as far as the terminal can write them."""
    letters = ("█", "░", "·")
    try:
        "".join(letters).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#", ".", "-"
    return letters


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
