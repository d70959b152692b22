"""Reads what precedes sdamd's own arguments, has `.venv` made ready, and starts sdamd in it.

`start.py` is the door. Standard library only, as is all that it imports.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.build_venv import CHECK, VENV, kept_build, prepare, say, steps, venv_python
from scripts.machine import Machine, environment, look
from sdamd.errors import SdamdError, UserError

_ALLOWED = {
    "--platform": ("linux", "windows"),
    "--device": ("auto", "rocm", "directml", "cpu"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What stands before sdamd's own arguments; `rest` is theirs."""

    setup_only: bool = False
    dry_run: bool = False
    root: Path | None = None
    platform: str | None = None
    build: str | None = None
    device: str | None = None
    extras: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Set up if need be, then become sdamd; return the exit status where it could not."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Windows writes to files and pipes in a code page that few paths fit into.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _main(argv)
    except SdamdError as error:
        say(f"sdamd: {error}")
        return error.exit_status
    except BrokenPipeError:
        # The reader of --dry-run has seen enough; the flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        say("sdamd: interrupted; the next start goes on from here")
        return 130


def _main(argv: Sequence[str]) -> int:
    options = parse(argv)
    here = options.root is None and options.platform is None
    machine = look(
        options.root,
        options.platform,
        name=options.build,
        engine=options.device,
        kept=kept_build(VENV) if here else "",
    )
    if options.dry_run:
        print("\n".join(describe(machine, options)))
        return 0
    python = prepare(machine, options.extras)
    if options.setup_only:
        return 0
    environ, notes = environment(machine, os.environ)
    for note in notes:
        say(note)
    return launch([str(python), "-P", "-m", "sdamd", *options.rest], environ)


def parse(argv: Sequence[str]) -> Options:
    """Read the options that precede sdamd's own arguments.

    Raises:
        UserError: an option lacks its value or has one that is not allowed; all of them at once.
    """
    rest = list(argv)
    given: dict[str, str] = {}
    problems: list[str] = []
    while rest:
        name, equals, value = rest[0].partition("=")
        if name in {"--root", "--platform", "--build", "--device", "--extras"}:
            if not equals:
                rest.pop(0)
                value = rest[0] if rest else ""
            if not value:
                problems.append(f"{name} needs a value")
            given[name] = value
        elif rest[0] in {"--setup-only", "--dry-run"}:
            given[rest[0]] = "yes"
        else:
            break
        rest = rest[1:]
    problems += _problems(given)
    if problems:
        raise UserError("\n".join(problems))
    extras = given.get("--extras", "").split(",")
    return Options(
        setup_only="--setup-only" in given,
        dry_run="--dry-run" in given,
        root=Path(given["--root"]) if "--root" in given else None,
        platform=given.get("--platform"),
        build=given.get("--build"),
        device=given.get("--device"),
        extras=tuple(sorted({extra.strip() for extra in extras} - {""})),
        rest=tuple(rest),
    )


def _problems(given: Mapping[str, str]) -> list[str]:
    problems = []
    for name, allowed in _ALLOWED.items():
        if given.get(name) and given[name] not in allowed:
            problems.append(f"{name} is {given[name]}; allowed: {', '.join(allowed)}")
    if {"--build", "--device"} <= given.keys():
        problems.append("--build and --device both choose what is installed: give one of them")
    if given.get("--root") and not Path(given["--root"]).is_dir():
        problems.append(f"--root is {given['--root']}, which is not a folder")
    if not re.fullmatch(r"[\w, -]*", given.get("--extras", "")):
        problems.append(f"--extras is {given['--extras']}; allowed: names with commas between")
    if "--dry-run" not in given and {"--root", "--platform"} & given.keys():
        problems.append("--root and --platform describe another machine: they need --dry-run")
    return problems


def describe(machine: Machine, options: Options) -> Iterator[str]:
    """Yield the lines of `--dry-run`: the choice as comments, commands as a shell takes them."""
    detection, build, gpu = machine.detection, machine.build, machine.gpu
    windows = detection.platform == "windows"
    yield f"# platform: {detection.platform}"
    if gpu is None:
        yield "# gpu: none"
    else:
        gib = gpu.usable_bytes / 2**30
        yield f"# gpu: {gpu.name} ({gpu.arch or 'architecture unknown'}, {gib:.1f} GiB)"
    yield f"# build: {build.name}"
    yield f"# reason: {build.reason}"
    for note in detection.notes:
        yield f"# note: {note}"
    for command in steps(build, VENV, options.extras, detection.platform):
        yield _quoted(command, windows=windows)
    python = str(venv_python(VENV, detection.platform))
    yield _quoted([python, "-c", CHECK], windows=windows)
    environ, notes = environment(machine, {} if options.root else os.environ)
    reasons = {variable.name: variable.reason for variable in build.environment}
    for name, reason in reasons.items():
        yield f"# {name}: {reason}"
        value = environ[name]
        yield f"set {name}={value}" if windows else f"export {name}={shlex.quote(value)}"
    if machine.device:
        yield f"# SDAMD_DEVICE: {build.name} was chosen, and auto would not take it"
        value = environ["SDAMD_DEVICE"]
        yield f"{'set' if windows else 'export'} SDAMD_DEVICE={shlex.quote(value)}"
    for name, value in detection.mask.items():
        yield f"# the process that renders sees no other GPU: {name}={value}"
    for note in notes:
        yield f"# note: {note}"
    if not options.setup_only:
        yield _quoted([python, "-P", "-m", "sdamd", *options.rest], windows=windows)


def _quoted(command: Sequence[str], *, windows: bool) -> str:
    return " ".join(map(quoted_for_cmd, command)) if windows else shlex.join(command)


def quoted_for_cmd(word: str) -> str:
    """Quote also what is one word to a program and yet something of its own to cmd.exe."""
    quoted = subprocess.list2cmdline([word])
    return f'"{word}"' if quoted == word and re.search(r"[&|<>^()]", word) else quoted


def launch(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become the command; on Windows, which cannot, wait for it and return its exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform == "win32":
        return wait_for(command, environ)
    else:  # noqa: RET505 - so that mypy can check either system
        return os.execve(command[0], list(command), environ)  # noqa: S606 - no shell is wanted


def wait_for(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command to its end; Ctrl-C reaches it as well, and it ends in its own way."""
    process = subprocess.Popen(command, env=environ)
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()
