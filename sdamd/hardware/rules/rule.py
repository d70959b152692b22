"""The rules of `doctor`: what was read, why that is so, and the one thing to do about it.

Rules 1 to 44 are the table of public bug reports that sdamd was made after; those above are ours.
A rule is a row of data and a small predicate over a `Case`: the readings of one machine, and a text
that somebody pasted. Cause and fix may hold {names}, which the predicate fills in.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from sdamd.errors import HardwareError
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import PYTORCH_ROCM64, Build, Engine, candidates, override_for
from sdamd.hardware.survey import Survey

_ARCH = re.compile(r"\bgfx([0-9]{3,4}|9[0-9][a-f])\b")


class Severity(StrEnum):
    """A fault keeps the GPU from working; a warning will bite; the rest is good to know."""

    FAULT = "fault"
    WARNING = "warning"
    INFO = "info"


FAULT, WARNING, INFO = Severity.FAULT, Severity.WARNING, Severity.INFO


class Stage(IntEnum):
    """In this order findings are shown: what comes first may be why the rest is so."""

    PLACE = 1
    HARDWARE = 2
    RIGHTS = 3
    CHOICE = 4
    ARCH = 5
    BUILD = 6
    VARIABLES = 7
    MEMORY = 8
    RUN = 9
    FILES = 10


class Rung(StrEnum):
    """The ladder from the metal up; each stands on the one before."""

    PCI = "pci"
    DRIVER = "driver"
    KFD = "kfd"
    RIGHTS = "rights"
    RUNTIME = "runtime"
    TORCH = "torch"
    KERNELS = "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the rules look at. `text` is empty where nothing was pasted."""

    survey: Survey
    text: str = ""

    @property
    def on_windows(self) -> bool:
        """Whether commands are for Windows."""
        return self.survey.platform == "windows"

    @property
    def in_wsl(self) -> bool:
        """Whether the machine, or the one that the text is from, is Windows' Linux."""
        return self.survey.platform == "wsl" or "microsoft-standard-WSL" in self.text

    @property
    def on_bare_linux(self) -> bool:
        """Whether the kernel is this user's to look after."""
        return (
            self.survey.platform == "linux"
            and not self.in_wsl
            and not self.survey.place.is_container
        )

    @property
    def preferred(self) -> Gpu | None:
        """The GPU here that a ROCm build of torch would run on, if there is one."""
        gpu = self.survey.detection.preferred
        return gpu if gpu is not None and self.builds(gpu) else None

    @property
    def arch(self) -> str:
        """The gfx target that this is about: the one in the text, else that of the GPU here."""
        match = _ARCH.search(self.text)
        if match:
            return match[0]
        return self.survey.gpu.arch if self.survey.gpu else ""

    @property
    def archs(self) -> frozenset[str] | None:
        """The targets that the installed ROCm build of torch has kernels for, if that is known."""
        probe, torch = self.survey.probe, self.survey.installed.torch
        if probe is not None and any(arch.startswith("gfx") for arch in probe.archs):
            return probe.archs
        return torch.archs if torch is not None and torch.hip else None

    @property
    def hip(self) -> str | None:
        """The ROCm that the installed torch is built for."""
        probe, torch = self.survey.probe, self.survey.installed.torch
        if probe is not None and probe.answered:
            return probe.hip
        return torch.hip if torch is not None else None

    def of_torch(self, reading: str, values: Mapping[str, str]) -> "Seen":
        """What was seen of the installed torch; it is no fault of a machine that never had it."""
        if not self.survey.installed.borrowed:
            return Seen(reading=reading, values=values)
        note = "the recording names no torch, so this Python's is judged"
        return Seen(reading=f"{reading} ({note})", values=values, severity=Severity.WARNING)

    def builds(self, gpu: Gpu | None = None) -> tuple[Build, ...]:
        """The ROCm builds that could run on the GPU here, the first choice first."""
        gpu = gpu or self.survey.gpu
        if gpu is None or self.on_windows:  # where DirectML goes first, with a torch for the CPU
            return ()
        try:
            found = candidates(gpu, self.survey.platform, self.survey.installed.python)
        except HardwareError:
            return ()
        return tuple(build for build in found if build.engine is Engine.ROCM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """That a rule fires: on which reading, and what fills the {names} of its sentences."""

    reading: str
    values: Mapping[str, str] = field(default_factory=dict)
    severity: Severity | None = None


Sees = Callable[[Case], Seen | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. `rung` is the step of the ladder that cannot hold while this is so, if one is."""

    number: int
    name: str
    stage: Stage
    severity: Severity
    sees: Sees
    cause: str
    fix: str
    source: str
    rung: Rung | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that fired, in words."""

    rule: int
    name: str
    severity: Severity
    reading: str
    cause: str
    fix: str
    source: str
    rung: Rung | None = None

    def to_dict(self) -> dict[str, str | int]:
        """Return the machine-readable form, for `--json`."""
        return {
            "rule": self.rule,
            "name": self.name,
            "severity": str(self.severity),
            "reading": self.reading,
            "cause": self.cause,
            "fix": self.fix,
            "source": self.source,
        }


def judge(rule: Rule, case: Case) -> Finding | None:
    """Apply one rule."""
    seen = rule.sees(case)
    if seen is None:
        return None
    return Finding(
        rule=rule.number,
        name=rule.name,
        severity=seen.severity or rule.severity,
        reading=seen.reading,
        cause=rule.cause.format_map(seen.values),
        fix=rule.fix.format_map(seen.values),
        source=rule.source,
        rung=rule.rung,
    )


# -- what predicates and fixes are made of ----------------------------------------------------


def said(case: Case, pattern: str, *, dotall: bool = False) -> str:
    """Return the line of the pasted text that the pattern is in, shortened; empty without one."""
    if not case.text:  # also spares the compiling of the pattern
        return ""
    flags = re.IGNORECASE | (re.DOTALL if dotall else re.NOFLAG)
    match = re.search(pattern, case.text, flags)
    if match is None:
        return ""
    start = case.text.rfind("\n", 0, match.start()) + 1
    line = case.text[start:].split("\n", 1)[0].strip()
    if len(line) > 160:  # what matters may stand far from its start
        line = case.text[match.start() : match.start() + 160].split("\n", 1)[0].strip()
    return "".join(c if c.isprintable() else " " for c in line)


def logged(case: Case, pattern: str) -> str:
    """Return the last line of the kernel's log that the pattern is in, shortened."""
    lines = (case.survey.dmesg or "").splitlines()
    return next((x.strip()[:160] for x in reversed(lines) if re.search(pattern, x)), "")


def text(pattern: str, *, dotall: bool = False) -> Sees:
    """Make the predicate that only looks for a pattern in the pasted text."""

    def sees(case: Case) -> Seen | None:
        line = said(case, pattern, dotall=dotall)
        return Seen(reading=line) if line else None

    return sees


def export(case: Case, **variables: str) -> str:
    """Write the command that sets variables in the shell that sdamd is started from."""
    if case.on_windows:
        return " && ".join(f'set "{name}={value}"' for name, value in variables.items())
    return "export " + " ".join(f"{name}={value}" for name, value in variables.items())


def unset(case: Case, *names: str) -> str:
    """Write the command that takes variables away."""
    if case.on_windows:
        return " && ".join(f'set "{name}="' for name in names)
    return f"unset {' '.join(names)}"


def pip_install(case: Case, build: Build | None) -> str:
    """Write the command that puts this build of torch into this Python, and nothing else.

    Without a build, as where the GPU is not here, it is the one with the longest record.
    """
    python = shlex.quote(case.survey.installed.executable)
    packages: tuple[str, ...] = (f"torch=={PYTORCH_ROCM64.torch}",)
    index = PYTORCH_ROCM64.index
    if build is not None and build.index is not None:
        packages, index = build.packages, build.index
    quoted = " ".join(shlex.quote(package) for package in packages)
    return f"{python} -m pip install --force-reinstall {quoted} --index-url {index}"


def native_build(case: Case, arch: str) -> Build | None:
    """Return the first build with kernels of its own for the GPU here, if it is of `arch`."""
    gpu = case.survey.gpu
    if gpu is None or gpu.arch != arch:
        return None
    override = "HSA_OVERRIDE_GFX_VERSION"
    return next((b for b in case.builds() if all(v.name != override for v in b.environment)), None)


def stand_in(arch: str, archs: frozenset[str]) -> str | None:
    """Return the override that lets `arch` run kernels of `archs`; None where none is right."""
    try:
        return override_for(arch, archs)
    except HardwareError:
        return None
