"""What a child process writes to stderr: passed on, and the end of it kept for when it dies."""

import os
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from sdamd.errors import StorageError

_FILE_BYTES: Final = 2**20
_LAST_LINES: Final = 3
_LAST_LETTERS: Final = 400


class LastWords:
    """What a child writes to stderr, passed on as it comes, and the end of it kept.

    Drivers write there why they end a process, past Python. A file and not a pipe, so that
    nothing is lost with the child and nobody has to read in time. It has no name once the child
    has opened it, where the system allows that.
    """

    def __init__(self) -> None:
        try:
            descriptor, name = tempfile.mkstemp(prefix="sdamd-worker-", suffix=".log")
        except OSError as error:
            raise StorageError(f"no temporary file can be made: {error.strerror}") from error
        self.path = Path(name)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)

    @property
    def last(self) -> str:
        """The last lines, as one."""
        return " | ".join(self._lines)[-_LAST_LETTERS:]

    def pass_on(self) -> None:
        """Write what has come since to this process' stderr."""
        new = self._file.read()
        if not new:
            return
        with suppress(OSError):  # there may be no stderr, as under pythonw
            os.write(2, new)
        lines = (line.strip() for line in new.decode("utf-8", "replace").splitlines())
        self._lines.extend(line for line in lines if line.strip("^~ "))  # marks in tracebacks
        if self._file.tell() > _FILE_BYTES:  # the child appends, so it goes on from 0
            self._file.truncate(0)
            self._file.seek(0)

    def close(self) -> None:
        """Pass on the rest; the file goes."""
        self.pass_on()
        self._file.close()
        self.path.unlink(missing_ok=True)

    @staticmethod
    def speak_to(path: Path) -> None:
        """Let this process, the child, write there; stdout too, which is for results alone."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 2)
        os.dup2(2, 1)  # drivers print where they like
        os.close(descriptor)
        if os.name == "posix":
            path.unlink()
