"""Runs a child that may crash or hang, and says how it ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The statuses with which Windows ends a process. Source: ntstatus.h.
_WINDOWS_FAULTS = {
    0xC0000005: "an access violation",
    0xC000001D: "an illegal instruction",
    0xC00000FD: "a stack overflow",
    0xC0000135: "a missing DLL",
    0xC0000142: "a DLL that could not start",
    0xC0000374: "a damaged heap",
    0xC0000409: "a failed security check",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended: `status` as `subprocess` has it (-6: SIGABRT), None if it was too slow."""

    status: int | None
    seconds: float = 0.0
    out: str = ""
    err: str = ""

    @property
    def crashed(self) -> bool:
        """Whether native code ended it, so that no exception tells why."""
        return self.status is not None and (self.status < 0 or self.status in _WINDOWS_FAULTS)

    @property
    def how(self) -> str:
        """How it ended, with the last that it said."""
        last = next((line.strip() for line in reversed(self.err.splitlines()) if line.strip()), "")
        said = f"; the last that it said: {last[:200]}" if last else ""
        if self.status is None:
            return f"did not answer in {self.seconds:.0f} s{said}"
        if self.status < 0:
            return f"was ended by {_signal_name(-self.status)} (exit {self.status}){said}"
        if self.status in _WINDOWS_FAULTS:
            return f"was ended by {_WINDOWS_FAULTS[self.status]} (0x{self.status:08X}){said}"
        return f"ended with status {self.status}{said}"


def run_module(
    module: str, *arguments: str, environ: Mapping[str, str], seconds: float, python: str = ""
) -> Ended:
    """Run `python -m module` with this Python's path, in `environ`, for at most `seconds`."""
    # The child must find sdamd where this process did, also in a clone that is not installed.
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (environ.get("PYTHONPATH", ""), home)))
    command = [python or sys.executable, "-m", module, *arguments]
    return run(command, environ={**environ, "PYTHONPATH": path}, seconds=seconds)


def run(command: Sequence[str], *, environ: Mapping[str, str], seconds: float) -> Ended:
    """Run a command; a child that cannot be started counts as ended with status 127."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return Ended(status=None, seconds=seconds, out=_text(error.stdout), err=_text(error.stderr))
    except OSError as error:
        return Ended(status=127, err=str(error))
    return Ended(
        status=done.returncode,
        seconds=time.monotonic() - started,
        out=done.stdout,
        err=done.stderr,
    )


def _text(output: str | bytes | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
