"""Makes `.venv` what a machine needs: torch alone first, then sdamd, then a check of both.

Standard library only: it runs before anything is installed. The commands are data (`steps`), so
that `--dry-run` prints exactly what a real run does.
"""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from scripts.machine import Machine
from sdamd.errors import HardwareError, SdamdError, StorageError
from sdamd.hardware.runtime import Build, Engine, wrong_torch

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = "sdamd-setup.json"
LOCK = "sdamd-setup.lock"
LOG = "sdamd-setup.log"
CONSTRAINT = "sdamd-torch.txt"

# No torch.cuda here: on a broken driver even asking whether a GPU is available kills the process.
CHECK = "import json, torch; print(json.dumps([torch.__version__, torch.version.hip]))"
VERSION = "from importlib.metadata import version; print(version('torch'))"

_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|getaddrinfo failed|"
    r"Network is unreachable|Connection refused|Connection reset|ProxyError|IncompleteRead|"
    r"Name or service not known|No route to host|Connection broken|"
    # Windows says these in the person's language: the numbers stay.
    r"WinError 100(51|53|54|60|61|65)\b|Errno 1100[1-4]\b"
)
_DISK_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|not enough space on the disk|Errno (28|122)\b|"
    r"WinError (39|112|1295)\b"
)
_IN_USE = (5, 32)
"""What Windows answers where a program still uses the file. Source: winerror.h."""
_IN_USE_HINT = "if sdamd is still open, close it and start again"

# Why Windows does not load torch's libraries, and what helps. Source: winerror.h.
_NOT_LOADED = {
    r"WinError 126\b": "install Microsoft's Visual C++ Redistributable 2015-2022 (x64)",
    r"WinError (1260|4551)\b": "Windows' Smart App Control or a policy blocks it, and ROCm for "
    "Windows needs Smart App Control off; `--device directml` before the command does without",
}
_LONG_PATHS = "Windows Long Path support"


class Run(Protocol):
    """Starts a process, waits for it, and captures its output or lets it through to stderr."""

    def __call__(
        self, argv: Sequence[str], *, environ: Mapping[str, str], capture: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv`; with `capture` both its outputs are in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What `.venv` was set up for; kept in it as JSON.

    `complete` is False from before the first change until after the last check. `adopted`: a
    person made this environment, so that it is never emptied. `by_hand`: a person chose the
    build, so that it stays where nothing else is asked for.
    """

    complete: bool = False
    adopted: bool = False
    by_hand: bool = False
    root: str = ""
    python: str = ""
    engine: str = ""
    build: str = ""
    packages: tuple[str, ...] = ()
    pyproject: str = ""
    extras: tuple[str, ...] = ()

    def same_base(self, other: "Stamp") -> bool:
        """Whether both stand on the same Python and torch, in the same place."""
        return (self.root, self.python, self.build, self.packages) == (
            other.root,
            other.python,
            other.build,
            other.packages,
        )

    def serves(self, wanted: "Stamp") -> bool:
        """Whether an environment with this stamp can be used for `wanted` as it is."""
        return (
            self.complete
            and self.same_base(wanted)
            and self.pyproject == wanted.pyproject
            and set(wanted.extras) <= set(self.extras)
        )


def say(text: str) -> None:
    """Tell the person; stdout is kept for results."""
    print(text, file=sys.stderr, flush=True)


def steps(
    build: Build, venv: Path, extras: Sequence[str], platform: str
) -> tuple[list[str], list[str], list[str]]:
    """Return the commands: make the environment, install torch alone, install sdamd."""
    # The interpreter below any environment: the one that runs this may be in the folder to fill.
    base = getattr(sys, "_base_executable", None) or sys.executable
    pip = [str(venv_python(venv, platform)), "-m", "pip", "install"]
    index = ["--index-url", build.index] if build.index else []
    target = str(ROOT) + (f"[{','.join(extras)}]" if extras else "")
    return (
        [base, "-m", "venv", str(venv)],
        [*pip, *index, *build.packages],
        [*pip, "-c", str(venv / CONSTRAINT), "-e", target, *build.extra_packages],
    )


def venv_python(venv: Path, platform: str) -> Path:
    """Return where the interpreter of an environment is."""
    return venv / "Scripts" / "python.exe" if platform == "windows" else venv / "bin" / "python"


def run(
    argv: Sequence[str], *, environ: Mapping[str, str], capture: bool
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end; its output goes to stderr, or into the result with `capture`."""
    sys.stderr.flush()
    return subprocess.run(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else sys.stderr,
        stderr=subprocess.PIPE if capture else None,
        text=True,
        errors="replace",
        check=False,
    )


def prepare(
    machine: Machine,
    extras: Sequence[str],
    *,
    venv: Path = VENV,
    environ: Mapping[str, str] = os.environ,
    run: Run = run,
) -> Path:
    """Make the environment ready, unless it is, and return its interpreter.

    Raises:
        HardwareError: it cannot be done here; the message says why and what helps.
        StorageError: the disk is full, or the folder cannot be written or is not ours.
    """
    setup = SetUp(machine=machine, venv=venv, environ=environ, run=run)
    try:
        wanted = wanted_stamp(machine.build, extras, by_hand=machine.by_hand)
        if setup.is_done(wanted):
            return setup.python
        setup.refuse_what_is_no_environment()
        venv.mkdir(exist_ok=True)
        with locked(venv / LOCK):
            # Another start may have done it while this one waited.
            if not setup.is_done(wanted):
                setup.do(wanted)
    except OSError as error:
        raise _storage_error(error, venv) from error
    return setup.python


def wanted_stamp(build: Build, extras: Sequence[str], *, by_hand: bool = False) -> Stamp:
    """Return what the stamp must say for `build` under this Python and pyproject.toml."""
    return Stamp(
        complete=True,
        by_hand=by_hand,
        root=str(ROOT),
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        engine=build.engine.value,
        build=build.name,
        packages=(*build.packages, *build.extra_packages),
        pyproject=f"{zlib.crc32((ROOT / 'pyproject.toml').read_bytes()):08x}",
        extras=tuple(extras),
    )


def read_stamp(venv: Path) -> Stamp:
    """Return the stamp of an environment; an empty one where there is none that can be read."""
    try:
        values = json.loads((venv / STAMP).read_text(encoding="utf-8"))
        values["packages"], values["extras"] = tuple(values["packages"]), tuple(values["extras"])
        return Stamp(**values)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return Stamp()


def kept_build(venv: Path) -> str:
    """Return the build that a person chose for an environment, or an empty text."""
    found = read_stamp(venv)
    return found.build if found.by_hand else ""


def write_stamp(venv: Path, stamp: Stamp) -> None:
    """Write the stamp whole or not at all."""
    partial = venv / f"{STAMP}.partial"
    partial.write_text(json.dumps(asdict(stamp), indent=1), encoding="utf-8")
    partial.replace(venv / STAMP)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of one environment; the system frees it when the process ends, however."""
    with path.open("a+") as file:
        if not _try_lock(file):
            say(f"another start is setting up {path.parent}; waiting for it")
            while not _try_lock(file):
                time.sleep(0.1)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EAGAIN, errno.EDEADLK}:
            return False
        raise
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """One environment and how it comes to be what the machine needs."""

    machine: Machine
    venv: Path
    environ: Mapping[str, str]
    run: Run

    @property
    def python(self) -> Path:
        """Where its interpreter is, or will be."""
        return venv_python(self.venv, self.machine.detection.platform)

    def is_done(self, wanted: Stamp) -> bool:
        """Whether there is nothing to do."""
        found = read_stamp(self.venv)
        if not found.complete or not self.python.exists():
            return False
        if found.serves(wanted):
            return True
        if self.machine.by_hand or not self._lost_its_gpu(found, wanted):
            return False
        # A driver that does not load today must not cost the gigabytes of another torch.
        say(
            f"no AMD GPU is visible now; {self.venv} stays as it was set up for {found.build} "
            "(`doctor` looks for the fault, `--build cpu` before the command gives up on it)"
        )
        return True

    def _lost_its_gpu(self, found: Stamp, wanted: Stamp) -> bool:
        return (
            found.engine in {Engine.ROCM, Engine.DIRECTML}
            and wanted.engine == Engine.CPU
            and not self.machine.detection.visible
            and (found.root, found.python, found.pyproject)
            == (wanted.root, wanted.python, wanted.pyproject)
            and set(wanted.extras) <= set(found.extras)
        )

    def refuse_what_is_no_environment(self) -> None:
        """Raise StorageError for a `.venv` with other things in it: they may be dear to someone."""
        if not self.venv.exists():
            return
        names = {path.name for path in self.venv.iterdir()}
        if names and not names & {"pyvenv.cfg", STAMP, LOCK}:
            raise StorageError(
                f"{self.venv} is not a virtual environment, so it is left alone; move it away"
            )

    def do(self, wanted: Stamp) -> None:
        """Bring the environment to `wanted`; what an earlier attempt left behind is redone."""
        self._announce()
        found = read_stamp(self.venv)
        adopted = found.adopted or self._is_of_a_person()
        keep = (adopted or (found.complete and found.same_base(wanted))) and self._works(wanted)
        if keep:
            wanted = replace(wanted, extras=tuple(sorted({*found.extras, *wanted.extras})))
        make, torch, package = steps(
            self.machine.build, self.venv, wanted.extras, self.machine.detection.platform
        )
        # What was chosen by hand is kept, for the start that goes on after an interruption.
        chosen = wanted.build if wanted.by_hand else ""
        write_stamp(
            self.venv,
            Stamp(adopted=adopted and keep, by_hand=wanted.by_hand, build=chosen),
        )
        if not keep:
            self._make(make)
        try:
            self._install(torch)
            self._constrain_torch()
            self._install(package)
        except SdamdError:
            if keep and found.complete:
                # pip changes nothing before it has everything, so the old state still holds.
                write_stamp(self.venv, found)
            raise
        self._check()
        write_stamp(self.venv, replace(wanted, adopted=adopted and keep))

    def _announce(self) -> None:
        say(f"setting up {self.venv} ({self.machine.build.name}: {self.machine.build.reason})")
        for note in self.machine.detection.notes:
            say(f"note: {note}")

    def _is_of_a_person(self) -> bool:
        return (self.venv / "pyvenv.cfg").exists() and not (self.venv / STAMP).exists()

    def _works(self, wanted: Stamp) -> bool:
        """Whether its interpreter runs and has pip.

        Raises:
            StorageError: a person made it, for another Python.
        """
        version = self._output("-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        if version and version != wanted.python:
            raise StorageError(
                f"{self.venv} was made by hand for Python {version} and this is Python "
                f"{wanted.python}: start with the other Python, or remove that folder"
            )
        return bool(version) and bool(
            self._output("-m", "pip", "--version") or self._output("-m", "ensurepip")
        )

    def _output(self, *arguments: str) -> str:
        """Return what the environment's interpreter prints, or nothing where it fails."""
        try:
            done = self.run([str(self.python), *arguments], environ=self.environ, capture=True)
        except OSError:
            return ""
        return "" if done.returncode else done.stdout.strip()

    def _make(self, command: Sequence[str]) -> None:
        self._clear()
        done = self.run(command, environ=self.environ, capture=True)
        if done.returncode == 0:
            return
        output = done.stdout + done.stderr
        if "ensurepip" in output or "No module named venv" in output:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise HardwareError(
                f"this Python {version} cannot make virtual environments, since its venv or "
                f"ensurepip module is missing; on Debian and Ubuntu: sudo apt install "
                f"python{version}-venv"
            )
        if _DISK_FULL.search(output):
            raise StorageError(f"the disk that holds {self.venv} is full")
        raise HardwareError(f"{shlex.join(command)} failed: {_last_line(output)}")

    def _clear(self) -> None:
        """Empty the folder but for the stamp, which says until the end that it is ours."""
        for path in self.venv.iterdir():
            if path.name in {STAMP, LOCK}:
                continue
            if path.is_dir() and not path.is_symlink():
                _remove_tree(path)
            else:
                path.unlink()

    def _install(self, command: Sequence[str]) -> None:
        """Run one pip command, with a log of all that it did."""
        log = self.venv / LOG
        log.unlink(missing_ok=True)
        say("+ " + shlex.join(command))
        # Through the environment, so that the command stays what a person would type.
        settings = {
            "PIP_LOG": str(log),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PIP_USER": "0",
        }
        done = self.run(command, environ={**self.environ, **settings}, capture=False)
        if done.returncode != 0:
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            raise pip_error(text, log)

    def _constrain_torch(self) -> None:
        """Pin the torch that is there, so that no other package brings its own."""
        build = self.machine.build
        version = self._output("-c", VERSION)
        problem = wrong_torch(build, version=version or "not installed", hip=build.expect)
        if problem is not None:
            raise HardwareError(problem)
        (self.venv / CONSTRAINT).write_text(f"torch=={version}\n", encoding="utf-8")

    def _check(self) -> None:
        """Import torch in a child, which may die of it, and compare it with what was chosen."""
        done = self.run([str(self.python), "-c", CHECK], environ=self.environ, capture=True)
        if done.returncode < 0:
            raise HardwareError(f"importing torch ended with signal {-done.returncode}")
        if done.returncode > 255:
            raise HardwareError(f"importing torch ended with 0x{done.returncode:08X}")
        if done.returncode != 0:
            raise HardwareError(f"torch cannot be imported: {_import_problem(done.stderr)}")
        version, hip = json.loads(_last_line(done.stdout))
        problem = wrong_torch(self.machine.build, version=version, hip=hip)
        if problem is not None:
            raise HardwareError(f"{problem}; the next start installs it anew")


def pip_error(text: str, log: Path) -> SdamdError:
    """Return what pip's log `text` amounts to, in one sentence."""
    errors = re.findall(r"^(?:\S+ )?ERROR: (.+)$", text, re.MULTILINE)
    last = errors[-1].strip() if errors and errors[-1].strip() != "Exception:" else _last_line(text)
    if _DISK_FULL.search(text):
        return StorageError(f"the disk is full: {last} (whole log: {log})")
    if _LONG_PATHS in text:
        return StorageError(
            f"a path grew longer than Windows takes ({last}): move sdamd to a folder with a short "
            f"path, or enable Windows' long paths (whole log: {log})"
        )
    if any(f"[WinError {number}]" in text for number in _IN_USE):
        return StorageError(f"a file cannot be replaced: {last}; {_IN_USE_HINT} (whole log: {log})")
    if _NETWORK.search(text):
        return HardwareError(f"pip cannot reach its index, is there a network? {last} ({log})")
    return HardwareError(f"pip failed: {last} (whole log: {log})")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"


def _import_problem(text: str) -> str:
    advice = [help_ for sign, help_ in _NOT_LOADED.items() if re.search(sign, text)]
    return "; ".join([_last_line(text), *advice])


def _remove_tree(folder: Path) -> None:
    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=unlock_and_retry)
    else:
        shutil.rmtree(folder, onerror=lambda do, path, how: unlock_and_retry(do, path, how[1]))


def unlock_and_retry(remove: Callable[[str], object], path: str, error: BaseException) -> None:
    """Remove what `rmtree` could not for being read-only, which Windows asks of the file itself.

    Raises:
        OSError: that was not why.
    """
    if not isinstance(error, PermissionError) or Path(path).lstat().st_mode & stat.S_IWRITE:
        raise error
    Path(path).chmod(stat.S_IWRITE)
    remove(path)


def _storage_error(error: OSError, venv: Path) -> StorageError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"the disk that holds {venv} is full")
    hint = f"; {_IN_USE_HINT}" if getattr(error, "winerror", None) in _IN_USE else ""
    return StorageError(f"{error.filename or venv}: {error.strerror or error}{hint}")
