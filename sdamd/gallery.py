"""The outputs folder: pictures as PNG bytes with their records, saved whole or not at all.

How a picture gets its name without ever replacing another:

1. The folder is locked against other processes that save into it; the lock goes with the process.
2. The next number is one more than the highest that a name in the folder carries or that the
   lock's own file remembers, so a deleted picture's number does not come again.
3. The bytes go to a temporary file in the same folder and on to the disk.
4. That file gets its final name by an operation that fails where the name exists: a hard link
   (POSIX) or a rename (Windows). Where a file system has no hard links (exFAT), the name is
   reserved by an exclusive create and the reservation replaced.

Step 4 alone keeps pictures from being replaced, also where locks do not work (some network
drives); step 1 keeps the numbers apart.
"""

import errno
import io
import logging
import os
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import BinaryIO, TypeAlias

from PIL import ImageStat
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo

from sdamd.errors import BadMetadata, StorageError
from sdamd.filename import NAME_BYTES, Pattern, token_values
from sdamd.interchange import container, records
from sdamd.interchange.reading import Reading
from sdamd.metadata import JSON_KEY, PARAMETERS_KEY, Record, from_json, to_json, to_parameters
from sdamd.request import Request

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

log = logging.getLogger(__name__)

_EXTENSION = ".png"

# Measured on 512-px pictures with Pillow 13 (zlib-ng): on smooth ones level 4 takes a third of
# the time of Pillow's default 6 for 2 % more bytes; on noisy ones the two are the same.
_COMPRESS_LEVEL = 4

JOB_KEY = "sdamd:job"
"""The text that holds the id of a queue's job; no two files have the same."""

_HEADER_BYTES = 33  # signature and IHDR, which every PNG begins with
_JOB_ID_BYTES = 64

_LOCK_NAME = ".sdamd-number"
_LOCK_SECONDS = 10.0
_TEMPORARY = ".sdamd-"
_TEMPORARY_END = ".tmp"

# Windows without the long-path setting: 260 letters with the final NUL.
# Source: Maximum Path Length Limitation (learn.microsoft.com).
_WINDOWS_PATH = 259
_SHORTEST_NAME = 32

# What Windows answers while another program has the file open: ERROR_ACCESS_DENIED and
# ERROR_SHARING_VIOLATION. Source: winerror.h.
_IN_USE = (5, 32)
_RENAME_TRIES = 20
_RENAME_SECONDS = 0.05

_FREE_BYTES = 16 * 1024 * 1024

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "there is no permission to do so",
    errno.EPERM: "there is no permission to do so",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a part of the path is a file, not a folder",
    errno.ENOENT: "there is no such folder",
    errno.EFBIG: "the file is larger than the file system or a limit allows",
}

# Given by file systems that lack an operation: no hard links, no locks, no fsync of a folder.
_UNSUPPORTED = {
    errno.EPERM,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOLCK,
    errno.EMLINK,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """The number of a picture, and the last one of those that it shares its numbering with."""

    number: int
    last: int


Numbers: TypeAlias = Callable[[Path, int], Number]
"""Asked with a picture's folder and the first number that is free there, while nobody else saves
into it: the pictures of a batch keep the order of the batch whatever order they are saved in."""


def encode(image: Image, record: Record) -> bytes:
    """Write a picture as PNG with its record in two texts, our JSON and `parameters`.

    Raises:
        BadMetadata: the record is longer than what can be read again.
    """
    texts = PngInfo()
    # Latin-1 text becomes a tEXt chunk, which every tool reads; other text an iTXt chunk.
    texts.add_text(PARAMETERS_KEY, to_parameters(record))
    texts.add_text(JSON_KEY, to_json(record))
    file = io.BytesIO()
    image.save(file, "PNG", pnginfo=texts, compress_level=_COMPRESS_LEVEL)
    return file.getvalue()


def with_job_id(png: bytes, job_id: str) -> bytes:
    """Write the id of a queue's job into a PNG, as its first text, where it is found at once."""
    chunk = b"tEXt" + JOB_KEY.encode("latin-1") + b"\0" + job_id.encode("ascii")
    length, checksum = len(chunk) - 4, zlib.crc32(chunk)
    text = length.to_bytes(4) + chunk + checksum.to_bytes(4)
    return png[:_HEADER_BYTES] + text + png[_HEADER_BYTES:]


def job_ids(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every picture of a queue's job in a folder and those below it, with the job's id.

    Nothing but the first bytes of each file is read. What killed processes left half-written goes.

    Raises:
        StorageError: a folder cannot be read.
    """
    start = b"tEXt" + JOB_KEY.encode("latin-1") + b"\0"
    try:
        for path, _, names in os.walk(folder, onerror=_raise):
            place = Path(path)
            if _LOCK_NAME in names:
                with _locked(place) as lock:
                    if lock:
                        _remove_leftovers(place)
            for name in sorted(names):
                if not name.endswith(_EXTENSION) or name.startswith(_TEMPORARY):
                    continue
                try:
                    with (place / name).open("rb") as file:
                        head = file.read(_HEADER_BYTES + 4 + len(start) + _JOB_ID_BYTES)
                except FileNotFoundError:
                    continue  # somebody has just taken it away
                length = int.from_bytes(head[_HEADER_BYTES : _HEADER_BYTES + 4])
                text = head[_HEADER_BYTES + 4 :][: length + 4]
                if text.startswith(start):
                    yield place / name, text[len(start) :].decode("latin-1")
    except OSError as error:
        raise _storage_error(error, f"{error.filename or folder} cannot be read") from error


def _raise(error: OSError) -> None:
    raise error


def check_image(image: Image) -> str | None:
    """Say why a picture cannot be the model's true output, or nothing.

    A failed decoding gives one colour throughout, most often black. The faintest gradient of a
    real picture differs by more than half a level of 255 on some channel.
    """
    statistics = ImageStat.Stat(image)
    # Not `stddev`: rounding can make the variance of one colour negative, which has no root.
    if max(statistics.var) >= 0.25:
        return None
    colour = [round(level) for level in statistics.mean]
    if max(colour) == 0:
        return "the picture is black throughout"
    return f"the picture is one colour throughout: {', '.join(map(str, colour))} of 255"


def read_record(path: Path) -> Record:
    """Read the exact record that sdamd wrote into a picture.

    Raises:
        BadMetadata: no PNG, a damaged one, or one without such a record.
        StorageError: the file cannot be read.
    """
    texts = read_texts(path)
    if JSON_KEY not in texts:
        raise BadMetadata(f"{path} holds no record by sdamd")
    try:
        return from_json(texts[JSON_KEY])
    except BadMetadata as error:
        raise BadMetadata(f"{path}: {error}") from error


def read(path: Path) -> Reading:
    """Read the record in a picture of any tool, or in a text file beside one.

    Our own record is exact; what is not understood of another tool's is told in the reading.

    Raises:
        BadMetadata: it is no picture, a damaged one, or one without a record that can be read.
        StorageError: the file cannot be read.
    """
    texts = read_texts(path)
    try:
        return records.read(texts)
    except BadMetadata as error:
        raise BadMetadata(f"{path}: {error}") from error


def request_from_png(path: Path) -> Request:
    """The request that makes a picture again, whichever tool and kind of file it is of.

    Raises:
        BadMetadata: as `read` does, or a value in the record is malformed or out of its range.
        StorageError: the file cannot be read.
    """
    reading = read(path)
    try:
        return reading.request()
    except BadMetadata as error:
        raise BadMetadata(f"{path}: {error}") from error


def read_texts(path: Path) -> dict[str, str]:
    """Read the texts of a picture; its pixels are decoded only where a PNG has no record else.

    So it takes no memory for the picture, however large its header says that it is.

    Raises:
        BadMetadata: it is neither picture nor text, cut short, or a text is damaged or too large.
        StorageError: the file cannot be read.
    """
    failed = f"{path} cannot be read"
    _check_path(path, failed)
    try:
        return container.read_texts(path)
    except OSError as error:
        raise _storage_error(error, failed, missing="there is no such file") from error
    except BadMetadata as error:
        raise BadMetadata(f"{path} {error}") from error


def check_folder(folder: Path, *, free_bytes: int = _FREE_BYTES) -> None:
    """Make the outputs folder and prove that pictures can be saved there, before any is made.

    Nothing is left in it; what a killed process left half-written in it is removed.

    Raises:
        StorageError: it cannot be made or written, or the disk has less than `free_bytes` free.
    """
    failed = f"pictures cannot be saved in {folder}"
    _check_path(folder, failed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _name_budget(folder)
        disk = shutil.disk_usage(folder)
        if disk.total and disk.free < free_bytes:  # some network drives tell no sizes
            raise StorageError(
                f"{failed}: the disk has {disk.free / 2**20:.1f} MiB free; needed are at least "
                f"{free_bytes / 2**20:.1f} MiB"
            )
        with _temporary(folder, b"sdamd"):
            pass
        if (folder / _LOCK_NAME).exists():
            with _locked(folder) as lock:
                if lock:
                    _remove_leftovers(folder)
    except OSError as error:
        raise _storage_error(error, failed) from error


def save(
    png: bytes,
    folder: Path,
    pattern: str,
    record: Record,
    *,
    numbers: Numbers | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> Path:
    """Save a picture under the name that `pattern` gives it, and return its path.

    The file is there whole and on the disk, or not at all; no file is ever replaced. `now` is
    asked when the name is made, not when the picture was asked for. Folders that the pattern
    names are made. Without `numbers` the picture gets the next number of its folder.

    Raises:
        BadRequest: the pattern is wrong.
        StorageError: the disk is full, the folder cannot be written, or its path is too long.
    """
    parsed = Pattern.parse(pattern)
    failed = f"the picture cannot be saved in {folder}"
    _check_path(folder, failed)
    try:
        values = token_values(record.job, checkpoint=record.checkpoint_name, number=0, now=now())
        target = _subfolder(folder, parsed.folder_names(values))
        with _locked(target) as lock, _temporary(target, png) as temporary:
            path = _publish(temporary, target, parsed, record, lock, numbers, now)
        _sync_folder(target)
    except OSError as error:
        raise _storage_error(error, failed) from error
    return path


def _publish(
    temporary: Path,
    target: Path,
    pattern: Pattern,
    record: Record,
    lock: BinaryIO | None,
    numbers: Numbers | None,
    now: Callable[[], datetime],
) -> Path:
    """Give the finished file its name: the first free one of those that it may have."""
    names = {entry.name for entry in os.scandir(target)}
    budget = _name_budget(target) - len(_EXTENSION)
    stems = (name.removesuffix(_EXTENSION) for name in names if name.endswith(_EXTENSION))
    free = max(_remembered(lock), pattern.highest_number(stems)) + 1
    given = None if numbers is None else numbers(target, free)

    def stem(number: int, suffix: str = "") -> str:
        values = token_values(
            record.job, checkpoint=record.checkpoint_name, number=number, now=now()
        )
        return pattern.stem(values, suffix=suffix, budget=budget)

    tries = _by_next_number(stem, free) if given is None else _by_own_number(stem, given.number)
    for number, one in tries:
        name = one + _EXTENSION
        if name not in names:
            try:
                _move_to_new(temporary, target / name)
            except FileExistsError:
                names.add(name)  # of a process that saves without the lock, or in other case
            else:
                _remember(lock, max(number, free - 1, 0 if given is None else given.last))
                return target / name
    raise AssertionError  # the names do not end


def _by_next_number(stem: Callable[..., str], free: int) -> Iterator[tuple[int, str]]:
    """The stems that a picture may have whose number is the first that makes a free name."""
    for number in count(free):
        name = stem(number)
        yield number, name
        if f"{number:05d}" not in name:
            # The next number would not make another name of it.
            yield number, stem(number, f"-{number:05d}")


def _by_own_number(stem: Callable[..., str], number: int) -> Iterator[tuple[int, str]]:
    """The stems that a picture may have whose number is given."""
    name = stem(number)
    yield number, name
    if f"{number:05d}" not in name:
        yield number, stem(number, f"-{number:05d}")
    for again in count(2):
        yield number, stem(number, f"-{again}")


def _move_to_new(temporary: Path, path: Path) -> None:
    """Rename a file to a name that is free.

    Raises:
        FileExistsError: the name is taken; both files are as they were.
    """
    if sys.platform == "win32":
        rename_patiently(temporary, path)  # fails there where the name exists
    else:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _move_to_reserved(temporary, path)


def rename_patiently(
    temporary: Path,
    path: Path,
    *,
    rename: Callable[[Path, Path], object] = os.rename,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Rename, also while a virus scanner or an indexer reads the new file for a moment.

    Windows refuses to rename a file that somebody else has open.

    Raises:
        OSError: it fails for another reason, or for longer than a second.
    """
    for _ in range(_RENAME_TRIES):
        try:
            rename(temporary, path)
        except PermissionError as error:
            if getattr(error, "winerror", None) not in _IN_USE:
                raise
            sleep(_RENAME_SECONDS)
        else:
            return
    rename(temporary, path)


def _move_to_reserved(temporary: Path, path: Path) -> None:
    """Rename as `_move_to_new` does, on a file system without hard links."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        temporary.replace(path)
    except BaseException:
        path.unlink()  # only the empty reservation can be there
        raise


@contextmanager
def _temporary(folder: Path, content: bytes) -> Iterator[Path]:
    """A file in `folder` with `content`, already on the disk; gone at the end under this name."""
    path = folder / f"{_TEMPORARY}{secrets.token_hex(8)}{_TEMPORARY_END}"
    # Not tempfile: its files are readable by their owner alone, whatever the umask says.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[BinaryIO | None]:
    """Hold the folder's lock; give its file, which holds the last number, or None without one.

    A lock is of the open file and goes with it, so a killed process leaves none. Where locks do
    not work or somebody holds one too long, saving goes on without.
    """
    flags = os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(folder / _LOCK_NAME, flags, 0o666)
    except OSError as error:
        # Another user's, or a link or folder. Whether the folder can be written, the picture's
        # own file will show.
        if error.errno not in {errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR}:
            raise
        yield None
        return
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        yield file if _wait_for_lock(file) else None


def _wait_for_lock(file: BinaryIO) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            if sys.platform == "win32":
                # Beyond the end of the file, since others could not read locked bytes.
                file.seek(1024)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            if time.monotonic() > deadline:
                log.warning("another process holds %s; saving without the lock", file.name)
                return False
            time.sleep(0.005)
        else:
            return True


def _remembered(lock: BinaryIO | None) -> int:
    """The last number given in this folder; 0 where none is remembered."""
    if lock is None:
        return 0
    lock.seek(0)
    text = lock.read(32).strip()
    return int(text) if text.isdigit() and len(text) <= 9 else 0


def _remember(lock: BinaryIO | None, number: int) -> None:
    if lock is None:
        return
    try:
        lock.seek(0)
        lock.write(b"%d\n" % number)
        lock.truncate()
    except OSError:
        # The picture is saved by now. The names in the folder still tell its number.
        log.warning("the number %d could not be noted in %s", number, lock.name)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left; called with the lock held, so nobody is writing."""
    for entry in os.scandir(folder):
        if entry.name.startswith(_TEMPORARY) and entry.name.endswith(_TEMPORARY_END):
            with suppress(OSError):
                Path(entry).unlink()


def _subfolder(folder: Path, names: tuple[str, ...]) -> Path:
    """Make the folders that a pattern names.

    The output folder itself is not made here: one that was deleted or unplugged since
    `check_folder` must not come again as an empty one on another disk.

    Raises:
        OSError: the output folder is not there, or a folder cannot be made.
        StorageError: one of them is a link to somewhere else.
    """
    if not folder.is_dir():
        code = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise OSError(code, os.strerror(code))
    target = folder
    root = folder.resolve()
    for name in names:
        target /= name
        target.mkdir(exist_ok=True)
        if not target.resolve().is_relative_to(root):
            raise StorageError(
                f"the picture cannot be saved in {target}: it leads out of {folder}; "
                "to save on another disk, set that as the output folder"
            )
    return target


def _name_budget(folder: Path) -> int:
    """How many bytes a file's name may have in this folder.

    Raises:
        StorageError: the folder's own path leaves too little.
    """
    if sys.platform == "win32":
        room = windows_room(str(folder.absolute()))
    else:
        taken = len(os.fsencode(folder.absolute()))
        room = os.pathconf(folder, "PC_PATH_MAX") - taken - 2  # a slash and the final NUL
        # Less than 255 on encrypted folders (eCryptfs: 143).
        room = min(room, os.pathconf(folder, "PC_NAME_MAX"))
    if room < _SHORTEST_NAME:
        raise StorageError(
            f"pictures cannot be saved in {folder}: its path is so long that it leaves {room} "
            f"letters for a file's name; needed are at least {_SHORTEST_NAME}"
        )
    return min(NAME_BYTES, room)


def windows_room(folder: str) -> int:
    """How many UTF-16 units Windows leaves for a name in a folder of this path."""
    taken = len(folder.encode("utf-16-le", "surrogatepass")) // 2
    return _WINDOWS_PATH - taken - 1  # a backslash


def _sync_folder(folder: Path) -> None:
    """Bring the folder's list of names to the disk; Windows does so by itself."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)


def _check_path(path: Path, failed: str) -> None:
    """Raise StorageError for a path that no system call can take."""
    try:
        if b"\0" not in os.fsencode(path):
            return
    except UnicodeEncodeError:
        pass  # a lone surrogate
    raise StorageError(f"{failed}: the path holds a letter that no path may hold")


def _storage_error(
    error: OSError, failed: str, *, missing: str = _REASONS[errno.ENOENT]
) -> StorageError:
    """Say a system's error in a sentence."""
    if error.errno == errno.ENOENT:
        return StorageError(f"{failed}: {missing}")
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return StorageError(f"{failed}: {reason}")
