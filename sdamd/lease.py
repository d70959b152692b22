"""Who works on a job, and whether that process still lives: what makes a claim of it a lease.

A process id alone comes again for another process, so the time of its start counts too, and the
boot of the machine, since ids and times begin anew with it.
"""

import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

BEAT_SECONDS: Final = 120.0
"""For how long a worker counts as alive whose process cannot be looked for from here: one of
another container or machine. It tells the queue of itself much more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process as nobody else can be it.

    `started` is in clock ticks since boot on Linux and in seconds since 1970 elsewhere; `boot`
    tells one boot of a kernel from the next; `space` is in which process ids mean the same.
    """

    pid: int
    started: str
    boot: str
    space: str
    host: str

    @classmethod
    def this(cls, root: Path = Path("/")) -> Self:
        """The process that asks."""
        return cls(
            pid=os.getpid(),
            started=started(os.getpid(), root),
            boot=_text(root / "proc/sys/kernel/random/boot_id"),
            space=_link(root / "proc/self/ns/pid"),
            host=platform.node(),
        )


def lives(
    worker: Process, beat: float, now: float, here: Process, started_of: Callable[[int], str]
) -> bool:
    """Whether a worker is at work still.

    `beat` is when it last said so, in seconds since 1970; `started_of` is `started`.
    """
    if (worker.boot, worker.space, worker.host) == (here.boot, here.space, here.host):
        return worker.started == started_of(worker.pid) != ""
    if was_cut_off(worker, here):
        return False
    return abs(now - beat) < BEAT_SECONDS


def was_cut_off(worker: Process, here: Process) -> bool:
    """Whether the machine itself went down under a worker."""
    return worker.host == here.host and worker.boot != here.boot


def started(pid: int, root: Path = Path("/")) -> str:
    """When a process began, as text to compare; empty when there is none, or only its remains."""
    if sys.platform == "linux":
        # Not psutil: its times move with the clock, and nobody may die of that.
        with suppress(OSError):
            stat = (root / "proc" / str(pid) / "stat").read_text(errors="replace")
            # Behind the name, which may hold anything: state, and 19 fields on the start.
            # Source: proc_pid_stat(5).
            after_name = stat.rpartition(")")[2].split()
            return "" if after_name[0] in "ZX" else after_name[19]
        return ""
    else:  # noqa: RET505  # so that mypy can check either system
        import psutil  # noqa: PLC0415  # type: ignore[import-untyped]  # only where /proc is not

        try:
            return f"{psutil.Process(pid).create_time():.3f}"
        except psutil.Error:
            return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
