"""A machine, and what stands in for `venv`, `pip` and the interpreter that they make."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts import build_venv
from scripts.machine import Machine
from sdamd.hardware.detect import Detection
from sdamd.hardware.gpu import Gpu, Kind
from sdamd.hardware.runtime import Engine, choose_build

PYTHON = sys.version_info[:2]
RADEON = Gpu(
    index=0, name="Radeon RX 7900 XTX", arch="gfx1100", vram_bytes=2**34, kind=Kind.DISCRETE
)
FRESH = ["venv", "install torch", "torch version", "install sdamd", "check"]


class FakeRun:
    """Stands in for `venv`, `pip` and the interpreter that they make."""

    def __init__(
        self, torch: str = "2.13.0+cpu", hip: str | None = None, *, platform: str = "linux"
    ) -> None:
        self.platform = platform
        self.torch = torch
        self.hip = hip
        self.commands: list[list[str]] = []
        self.environs: list[Mapping[str, str]] = []
        self.fail: dict[str, tuple[int, str]] = {}
        self.before: Callable[[str], None] = lambda kind: None

    def __call__(
        self, argv: Sequence[str], *, environ: Mapping[str, str], capture: bool
    ) -> subprocess.CompletedProcess[str]:
        kind = kind_of(argv)
        self.commands.append(list(argv))
        self.environs.append(environ)
        self.before(kind)
        status, text = self.fail.get(kind, (0, ""))
        if kind == "venv" and status == 0:
            make_environment(Path(argv[-1]), self.platform)
        if status and "PIP_LOG" in environ:
            Path(environ["PIP_LOG"]).write_text(text, encoding="utf-8")
        out = "" if status else self.answer(kind)
        return subprocess.CompletedProcess(list(argv), status, out, text if status else "")

    def answer(self, kind: str) -> str:
        return {
            "python version": ".".join(map(str, PYTHON)),
            "pip version": "pip 25",
            "torch version": self.torch,
            "check": json.dumps([self.torch, self.hip]),
        }.get(kind, "")

    @property
    def kinds(self) -> list[str]:
        return [kind_of(command) for command in self.commands]


def kind_of(argv: Sequence[str]) -> str:
    line = " ".join(argv)
    for part, kind in {
        "-m venv": "venv",
        "pip install -c": "install sdamd",
        "pip install": "install torch",
        "pip --version": "pip version",
        "-m ensurepip": "ensurepip",
        "sys.version_info": "python version",
        build_venv.VERSION: "torch version",
        build_venv.CHECK: "check",
    }.items():
        if part in line:
            return kind
    raise AssertionError(line)


def make_environment(venv: Path, platform: str = "linux") -> None:
    python = build_venv.venv_python(venv, platform)
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch()
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\n")


def machine_with(
    gpu: Gpu | None, *, platform: str = "linux", engine: Engine | None = None
) -> Machine:
    """A machine with this GPU, or without one; with `engine` a person chose the build."""
    return Machine(
        detection=Detection(
            platform=platform, visible=() if gpu is None else (gpu,), reason="a test", mask={}
        ),
        gpu=gpu,
        build=choose_build(gpu, platform, PYTHON, engine=engine),
        by_hand=engine is not None,
    )


WITHOUT_GPU = machine_with(None)
WITH_RADEON = machine_with(RADEON)


def prepare(
    venv: Path,
    run: build_venv.Run,
    *extras: str,
    machine: Machine = WITHOUT_GPU,
    environ: Mapping[str, str] | None = None,
) -> Path:
    return build_venv.prepare(machine, extras, venv=venv, environ=environ or {}, run=run)
