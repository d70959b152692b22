"""Every check of the project, in the environment that `py` makes. `test.py` is the door."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.build_venv import ROOT, VENV, kept_build, prepare, run, say
from scripts.machine import environment, look
from sdamd.errors import SdamdError

# The oracle of the scheduler tests. Without its dependencies, which would replace torch.
K_DIFFUSION = "k-diffusion==0.1.1.post1"
# A file's tests stay together, for what they share is made once.
PROCESSES = ("-n", "2", "--dist", "loadfile")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main(argv: Sequence[str]) -> int:
    """Set up, run the checks, and return 0 if all of them passed."""
    arguments = [argument for argument in argv if argument != "--fast"]
    if len(arguments) < len(argv):
        arguments += ["-m", "not slow"]
    try:
        machine = look(kept=kept_build(VENV))
        python = prepare(machine, ("dev",))
    except SdamdError as error:
        say(f"sdamd: {error}")
        return error.exit_status
    environ, notes = environment(machine, os.environ)
    for note in notes:
        say(note)
    install_oracle(python, environ)
    install_browser()
    # Two processes share the cores; threads of torch beside them would only wait for each other.
    return run_all(checks(python, arguments), {"OMP_NUM_THREADS": "1", **environ})


def checks(python: Path, pytest_arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the checks by name, in order; the one whose output must come last is last."""
    module = [str(python), "-m"]
    lint_imports = shutil.which("lint-imports", path=str(python.parent)) or "lint-imports"
    return {
        "ruff check": [*module, "ruff", "check"],
        "ruff format": [*module, "ruff", "format", "--check"],
        "mypy": [*module, "mypy"],
        "lint-imports": [lint_imports],
        "pytest": [*module, "pytest", *PROCESSES, *pytest_arguments],
    }


def run_all(commands: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
    """Run every command in the repository, report before the last one, and return 0 or 1."""
    *first, last = commands
    failed = [name for name in first if not _passes(name, commands[name], environ)]
    print(f"\n{len(first) - len(failed)} of {len(first)} passed before {last}", flush=True)
    passed = _passes(last, commands[last], environ, quiet=not failed)
    if failed:
        names = ", ".join([*failed, *([] if passed else [last])])
        print(f"failed: {names}", flush=True)
    return 0 if passed and not failed else 1


def _passes(
    name: str, command: Sequence[str], environ: Mapping[str, str], *, quiet: bool = False
) -> bool:
    print(f"\n--- {name}", flush=True)
    began = time.monotonic()
    try:
        status = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    except OSError as error:
        print(error)
        status = 127
    if not quiet:
        word = "passed" if status == 0 else f"FAILED with status {status}"
        print(f"--- {name} {word} in {time.monotonic() - began:.1f} s", flush=True)
    return status == 0


def install_oracle(python: Path, environ: Mapping[str, str]) -> None:
    """Install k-diffusion alone; the tests that need it say so when it is not there."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", K_DIFFUSION]
    if run(command, environ=environ, capture=False).returncode != 0:
        say(f"{K_DIFFUSION} could not be installed; the tests against it will be skipped")


def install_browser() -> None:
    """Install Debian's Chromium for the UI test where no browser is and this may be done."""
    if any(shutil.which(name) for name in BROWSERS):
        return
    if not (shutil.which("apt-get") and Path("/etc/debian_version").exists() and _is_root()):
        say("no Chromium was found; the tests of the UI in a browser will be skipped")
        return
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium"],
    ):
        if run(command, environ=environ, capture=False).returncode != 0:
            say(f"{' '.join(command)} failed; the tests of the UI will be skipped")
            return


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0
