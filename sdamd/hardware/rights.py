"""Who may open the device files that ROCm needs, and by which group."""

import errno
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sdamd.hardware.linux import Access, read_text

Open = Callable[[Path], str]
"""Opens a device file for reading and writing, closes it, and returns why that failed."""

_READ_WRITE = 0o6


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The groups of a process and of its user; no names of people are kept.

    `ids` are those that the running process has (None: not known), and `root` says that it is
    root's; `listed` are those that /etc/group gives its user, which count from the next login on.
    `names` are all groups of /etc/group by number; None where it cannot be read.
    """

    ids: frozenset[int] | None = None
    root: bool = False
    listed: frozenset[int] = frozenset()
    names: Mapping[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFile:
    """A device file, its group's number and name, and whether this process may use it.

    `may_open` is None where that cannot be known, as on most recorded machines. `error` is the
    errno's name (`EACCES`, `ENOMEM`) where it was tried and failed.
    """

    path: str
    present: bool = False
    group: int | None = None
    group_name: str = ""
    may_open: bool | None = None
    error: str = ""


def try_open(path: Path) -> str:
    """Open for reading and writing; return the errno's name, or nothing where it went well."""
    try:
        os.close(os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0)))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a device file is asked: by this process (`live`), or by the numbers of a recording."""

    live: bool
    membership: Membership = field(default_factory=Membership)
    access: Access = os.access
    opens: Open = try_open


def read_membership(root: Path, environ: Mapping[str, str]) -> Membership:
    """Read the groups of this process, or those that were recorded below `root`."""
    status = read_text(root / "proc/self/status")
    uid = _numbers(status, "Uid")[:1]
    gids = _numbers(status, "Gid") + _numbers(status, "Groups")
    rows = [line.split(":") for line in read_text(root / "etc/group").splitlines()]
    groups = {int(row[2]): row for row in rows if len(row) == 4 and _is_id(row[2])}
    user = _user_name(root, uid[0] if uid else None) or environ.get("USER", "")
    return Membership(
        ids=frozenset(gids) if gids else None,
        root=uid == [0],
        listed=frozenset(gid for gid, row in groups.items() if user and user in row[3].split(",")),
        names={gid: row[0] for gid, row in groups.items()} or None,
    )


def read_device_file(root: Path, name: str, asking: Asking) -> DeviceFile:
    """Read `dev/kfd` or another file below `root`.

    A recorded file may hold what `stat -c '%a %u %g'` said of the real one, since copies lose it.
    """
    path = root / name
    shown = f"/{name}"
    try:
        stat = path.stat()
    except OSError:
        return DeviceFile(path=shown)
    mode, group = stat.st_mode, stat.st_gid
    may: bool | None
    if asking.live:
        may, error = _try(path, asking)
    else:
        recorded = re.fullmatch(r"([0-7]{3,4}) [0-9]{1,9} ([0-9]{1,9})", read_text(path))
        if recorded:
            mode, group = int(recorded[1], 8), int(recorded[2])
        may, error = _judge(path, mode, group, asking), ""
    names = asking.membership.names or {}
    return DeviceFile(
        path=shown,
        present=True,
        group=group,
        group_name=names.get(group, ""),
        may_open=may,
        error=error,
    )


def _try(path: Path, asking: Asking) -> tuple[bool, str]:
    if not asking.access(path, os.R_OK | os.W_OK):
        return False, "EACCES"
    error = asking.opens(path)
    return not error, error


def _judge(path: Path, mode: int, group: int, asking: Asking) -> bool | None:
    """By the numbers of a recording; device files belong to root, so its owner does not count."""
    ids = asking.membership.ids
    if ids is None:
        # A copy that everybody may read has lost its mode; one that is closed was meant to be.
        closed = not mode & _READ_WRITE and not asking.access(path, os.R_OK | os.W_OK)
        return False if closed else None
    bits = mode >> 3 if group in ids else mode
    if bits & _READ_WRITE == _READ_WRITE:
        return True
    # What root may do in a container is not written in its files.
    return None if asking.membership.root else False


def _numbers(status: str, key: str) -> list[int]:
    match = re.search(rf"(?m)^{key}:([\s0-9]*)$", status)
    return [int(text) for text in match[1].split() if _is_id(text)] if match else []


def _is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,10}", text) is not None


def _user_name(root: Path, uid: int | None) -> str:
    rows = (line.split(":") for line in read_text(root / "etc/passwd").splitlines())
    return next((row[0] for row in rows if len(row) > 2 and row[2] == str(uid)), "")
