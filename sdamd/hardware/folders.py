"""Whether the folders can be written that a run needs: ours, and MIOpen's caches."""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdamd.hardware.linux import read_text

# As /proc/mounts names them. MIOpen's databases take locks that these do not keep.
_REMOTE = re.compile(r"nfs4?|cifs|smb3?|9p|fuse\.sshfs|afs|ceph|lustre|beegfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that something writes to.

    `variable` is the environment variable that set it, or empty. `problem` says why it cannot be
    written; `remote` names its file system where that is on another machine. `free_bytes` is -1
    where it is not known.
    """

    what: str
    path: Path
    variable: str = ""
    problem: str = ""
    remote: str = ""
    free_bytes: int = -1

    @property
    def is_miopen(self) -> bool:
        """Whether it is one of MIOpen's caches."""
        return self.what.startswith("MIOpen")


def read_folders(environ: Mapping[str, str], home: Path | None = None) -> tuple[Folder, ...]:
    """Look at sdamd's data folder, the temporary one, and those of MIOpen; nothing is written."""
    found = [_look("temporary files", Path(tempfile.gettempdir()), "")]
    if home is not None:
        found.append(_look("sdamd's data", home, "SDAMD_HOME" if "SDAMD_HOME" in environ else ""))
    for what, variable, usual in (
        ("MIOpen's tuning database", "MIOPEN_USER_DB_PATH", ".config/miopen"),
        ("MIOpen's kernel cache", "MIOPEN_CUSTOM_CACHE_DIR", ".cache/miopen"),
    ):
        if environ.get(variable):
            found.append(_look(what, Path(environ[variable]), variable))
        elif environ.get("HOME"):
            found.append(_look(what, Path(environ["HOME"], usual), ""))
    return tuple(found)


def _look(what: str, path: Path, variable: str) -> Folder:
    path = path.absolute()
    there = next((p for p in (path, *path.parents) if p.exists()), path)
    free = -1
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        problem = str(error)
    else:
        problem = _problem(there)
    return Folder(
        what=what,
        path=path,
        variable=variable,
        problem=problem,
        remote=_remote(there),
        free_bytes=free,
    )


def _problem(there: Path) -> str:
    """Say why nothing can be made in the nearest folder that is there."""
    if not there.is_dir():
        return f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written by this user"
    return ""


def _remote(there: Path) -> str:
    """Return the file system that `there` is on, if it is one of another machine."""
    best, kind = "", ""
    for line in read_text(Path("/proc/mounts")).splitlines():
        _, place, system, *_ = (*line.split(" "), "", "")
        if len(place) > len(best) and there.is_relative_to(place.replace("\\040", " ")):
            best, kind = place, system
    return kind if _REMOTE.fullmatch(kind) else ""
