"""The ladder from the PCI bus to kernels that compute: where it breaks, why, and what helps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sdamd.errors import HardwareError
from sdamd.hardware.device import choose_device
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.rules import RULES
from sdamd.hardware.rules.rule import Case, Finding, Rule, Rung, Severity, judge
from sdamd.hardware.survey import Survey
from sdamd.hardware.torch_probe import ask_torch, run_selftest

_GIB = 2**30

_MOST_TEXT = 200_000

_NOTHING = "nothing to look at without an AMD GPU"

Answer = tuple[bool | None, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rung: whether it holds (None: not known, or not looked at), and what was read."""

    rung: Rung
    ok: bool | None
    reading: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is the matter with one machine.

    `recognised` are the findings about the pasted text, `findings` those about the machine.
    `explaining`: a text was pasted, so `recognised` is the answer. `selected` is the GPU that
    sdamd takes, None where it takes the CPU, and `reason` says why.
    """

    survey: Survey
    selected: Gpu | None
    reason: str
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    recognised: tuple[Finding, ...] = ()
    explaining: bool = False

    @property
    def faulty(self) -> bool:
        """Whether something must be put right before the GPU computes."""
        about = self.recognised if self.explaining else self.findings
        return any(finding.severity is Severity.FAULT for finding in about)

    @property
    def verdict(self) -> str:
        """One line."""
        red = next((step for step in self.steps if step.ok is False), None)
        faults = [f for f in self.findings if f.severity is Severity.FAULT]
        if red or faults:
            return f"Fault: {red.reading if red else faults[0].reading}"
        if not self.survey.has_amd:
            return f"No fault: {self.survey.detection.reason}, so sdamd draws on the CPU"
        if self.selected is None:
            return f"No fault, but sdamd draws on the CPU: {self.reason}"
        name, test = self.selected.name, self.survey.selftest
        if test is not None and test.checks:
            return f"Healthy: {name} computes, and its numbers are right"
        unknown = [str(step.rung) for step in self.steps if step.ok is None]
        return f"No fault found: sdamd draws on {name} (not known yet: {', '.join(unknown)})"

    def to_dict(self) -> dict[str, object]:
        """Return the machine-readable form, for `--json`."""
        found, test = self.survey.detection, self.survey.selftest
        return {
            "platform": found.platform,
            "place": str(self.survey.place),
            "verdict": self.verdict,
            "gpus": [gpu.to_dict() for gpu in found.gpus],
            "selected": None if self.selected is None else self.selected.index,
            "mask": dict(found.mask),
            "reason": self.reason,
            "notes": list(found.notes),
            "rungs": [
                {"name": str(step.rung), "ok": step.ok, "reading": step.reading}
                for step in self.steps
            ],
            "findings": [finding.to_dict() for finding in (*self.recognised, *self.findings)],
            "recognised": [finding.rule for finding in self.recognised],
            "selftest": None if test is None else test.to_dict(),
        }


def diagnose(survey: Survey, text: str = "") -> Diagnosis:
    """Judge a machine, and a text that somebody pasted, if there is one: the end of a long one."""
    text = text[-_MOST_TEXT:]
    case = Case(survey=survey)
    findings = _apply(RULES, case)
    recognised: tuple[Finding, ...] = ()
    if text.strip():
        plain = set(findings)
        with_text = _apply(RULES, replace(case, text=text))
        recognised = tuple(finding for finding in with_text if finding not in plain)
    selected, reason = _select(survey)
    return Diagnosis(
        survey=survey,
        selected=selected,
        reason=reason,
        steps=_climb(case, findings),
        findings=findings,
        recognised=recognised,
        explaining=bool(text.strip()),
    )


def ask(
    survey: Survey,
    environment: Callable[[], Mapping[str, str]],
    *,
    probe: bool = False,
    selftest: bool = False,
) -> Survey:
    """Ask torch in children with this environment, where that is wanted or nothing else tells.

    A torch whose files do not name a version is asked in any case; without torch nobody is.
    """
    torch = survey.installed.torch
    if torch is None or not (probe or selftest or not torch.version):
        return survey
    environ = environment()
    survey = replace(survey, probe=ask_torch(environ))
    if selftest and survey.probe is not None and survey.probe.answered:
        # Without a card of AMD's the CPU is what draws, and so what is tried.
        device = "cuda" if Case(survey=survey).preferred is not None else "cpu"
        survey = replace(survey, selftest=run_selftest(device, environ))
    return survey


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what a person reads: the verdict, the GPUs, the ladder, and what to do."""
    if diagnosis.explaining:
        yield from _explained(diagnosis)
        return
    yield f"{diagnosis.verdict}."
    yield from _gpu_lines(diagnosis)
    yield ""
    marks = {True: "ok", False: "FAIL", None: "-"}
    for step in diagnosis.steps:
        if step.reading == _NOTHING:
            continue
        # The reading of a red rung is the first line's, and stands below with what to do.
        reading = "broken here; see below" if step.ok is False else step.reading
        yield f"  {marks[step.ok]:5} {step.rung:8} {reading}"
    for remark in diagnosis.survey.detection.remarks:
        yield f"  note: {remark}"
    yield from _finding_lines(diagnosis.findings)
    test = diagnosis.survey.selftest
    if test is not None and test.checks:
        yield ""
        yield f"Self-test on {test.device}:"
        for check in test.checks:
            yield f"  {'ok' if check.ok else 'FAIL':5} {check.name}: {check.reading}"


def _explained(diagnosis: Diagnosis) -> Iterator[str]:
    count = len(diagnosis.recognised)
    if count:
        yield f"This text is known: {'one rule matches' if count == 1 else f'{count} rules match'}."
        yield from _finding_lines(diagnosis.recognised)
    else:
        yield "No rule knows this text."
        yield "  sdamd doctor --report writes a file to attach to a bug report; add the text to it."
    yield ""
    yield f"This machine: {diagnosis.verdict}."
    yield from _finding_lines(f for f in diagnosis.findings if f.severity is not Severity.INFO)


def _gpu_lines(diagnosis: Diagnosis) -> Iterator[str]:
    found = diagnosis.survey.detection
    if not found.gpus:
        return
    yield ""
    for gpu in found.gpus:
        mark = "*" if gpu == diagnosis.selected else " "
        size = f"{gpu.vram_bytes / _GIB:.1f} GiB" if gpu.vram_bytes else "memory unknown"
        shared = f" and {gpu.gtt_bytes / _GIB:.1f} GiB of RAM" if gpu.gtt_bytes else ""
        arch = gpu.arch or "architecture unknown"
        yield f"{mark} {gpu.index}: {gpu.name}, {arch}, {size}{shared}"
    yield f"  {diagnosis.reason}"
    for name, value in found.mask.items():
        yield f"  sdamd sets {name}={value} for itself, which hides the others"


def _finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    for number, finding in enumerate(findings, 1):
        yield ""
        yield f"{number}. {finding.severity}: {finding.reading}"
        yield f"   why:    {finding.cause}"
        yield f"   fix:    {finding.fix}"
        yield f"   source: {finding.source} (rule {finding.rule})"


def _apply(rules: Iterable[Rule], case: Case) -> tuple[Finding, ...]:
    """Judge by every rule; findings in the order of the stages."""
    judged = [(rule.stage, judge(rule, case)) for rule in rules]
    return tuple(
        finding for _, finding in sorted(judged, key=lambda pair: pair[0]) if finding is not None
    )


def _select(survey: Survey) -> tuple[Gpu | None, str]:
    try:
        device = choose_device(survey.detection, "auto", survey.installed.python)
    except HardwareError as error:
        return None, str(error)
    return device.gpu, device.reason or survey.detection.reason


# -- the ladder --------------------------------------------------------------------------------


def _climb(case: Case, findings: Iterable[Finding]) -> tuple[Step, ...]:
    """Go up until a rung breaks: one is red where a fault says that it cannot hold."""
    steps: list[Step] = []
    broken = ""
    for rung, look in _LADDERS.get(case.survey.platform, _LINUX).items():
        faults = (f for f in findings if f.rung is rung and f.severity is Severity.FAULT)
        fault = next(faults, None)
        if broken:
            steps.append(Step(rung=rung, ok=None, reading=f"not looked at: {broken} comes first"))
        elif fault is not None:
            steps.append(Step(rung=rung, ok=False, reading=fault.reading))
            broken = str(rung)
        else:
            ok, reading = look(case)
            steps.append(Step(rung=rung, ok=ok, reading=reading))
    return tuple(steps)


def _pci(case: Case) -> Answer:
    survey = case.survey
    names = [f"{gpu.name} at {gpu.pci}" for gpu in survey.pci]
    found = (*survey.detection.gpus, *survey.detection.unlisted)
    names = names or [f"{gpu.name} at {gpu.pci}" if gpu.pci else gpu.name for gpu in found]
    if names:
        return True, ", ".join(names)
    return None, f"{survey.detection.reason}, so the CPU computes"


def _driver(case: Case) -> Answer:
    survey = case.survey
    kernel = f"kernel {survey.kernel or 'of unknown version'}"
    drivers = {gpu.driver for gpu in survey.detection.gpus if gpu.driver}
    if drivers or survey.driver_loaded or survey.detection.gpus:
        return True, f"{', '.join(sorted(drivers)) or 'amdgpu'}, {kernel}"
    return None, _nothing(survey) or f"it is not known whether amdgpu is loaded; {kernel}"


def _kfd(case: Case) -> Answer:
    survey = case.survey
    count = len(survey.detection.gpus)
    if not count:
        return None, _nothing(survey) or "the kernel's compute driver lists no GPU"
    shown = f"lists {count} GPU{'' if count == 1 else 's'}"
    if not survey.kfd.present:
        return None, f"{shown}; /dev/kfd was not recorded"
    return True, f"{shown}; /dev/kfd is there"


def _rights(case: Case) -> Answer:
    survey = case.survey
    if not survey.has_amd:
        return None, _nothing(survey)
    files = (survey.kfd, *survey.renders)
    names = ", ".join(file.path for file in files)
    if all(file.may_open for file in files):
        return True, f"this process may open {names}"
    if not survey.devices_known:
        return None, "not known: the recording has no device files"
    return None, f"not known from a recording: whether its process may open {names}"


def _runtime(case: Case) -> Answer:
    survey = case.survey
    if not survey.has_amd:
        return None, _nothing(survey)
    if survey.platform == "windows":
        version = survey.installed.packages.get("onnxruntime-directml")
        if version:
            return True, f"onnxruntime-directml {version}"
        return None, "not known: the packages of that Windows were not recorded"
    system = f"; ROCm {survey.rocm} is installed beside it" if survey.rocm else ""
    if survey.detection.preferred is None:
        return None, survey.detection.reason
    return True, f"torch brings its own ROCm{system}; no variable hides the GPU"


def _torch(case: Case) -> Answer:
    installed, probe = case.survey.installed, case.survey.probe
    if not installed.known or installed.torch is None:
        return None, "not known: this Python is not that machine's"
    if probe is not None and probe.answered:
        built = f"ROCm {probe.hip}" if probe.hip else f"CUDA {probe.cuda}"
        built = built if probe.hip or probe.cuda else "the CPU alone"
        return True, f"torch {probe.version} answers: built for {built}, {_devices(case)}"
    torch = installed.torch
    if installed.borrowed:
        return None, f"not recorded; this Python has torch {torch.version}, {torch.kind}"
    return True, f"torch {torch.version} is {torch.kind} ({installed.executable})"


def _devices(case: Case) -> str:
    probe = case.survey.probe
    listed = ", ".join(
        f"{device.name} ({device.gfx}, {device.memory_bytes / _GIB:.1f} GiB)"
        for device in (probe.devices if probe else ())
    )
    return f"it sees {listed}" if listed else "it sees no GPU"


def _kernels(case: Case) -> Answer:
    survey = case.survey
    test, gpu = survey.selftest, survey.detection.preferred
    if test is not None and test.checks:
        count = len(test.checks)
        return True, f"{count} computations on {test.device} agree with the CPU in float32"
    if gpu is None or not survey.has_amd:
        return None, "not tried; the CPU needs none" if gpu is None else _nothing(survey)
    archs = None if survey.installed.borrowed and survey.probe is None else case.archs
    if archs is None or survey.platform == "windows":
        return None, "not tried; --selftest does"
    has = f"torch has kernels for {gpu.arch}" if gpu.arch in archs else (
        f"torch has kernels for a sibling of {gpu.arch}")  # fmt: skip
    return None, f"{has}; not tried, --selftest does"


def _adapter_driver(case: Case) -> Answer:
    gpu = case.survey.gpu
    if gpu is None:
        return None, _nothing(case.survey)
    if gpu.driver:
        return True, f"version {gpu.driver}"
    return None, "not known: the registry does not tell its version"


def _windows_host(case: Case) -> Answer:
    if case.survey.detection.gpus:
        return True, "Windows' driver answers through /dev/dxg"
    return None, "it is Windows' own; nothing to load here"


def _nothing(survey: Survey) -> str:
    return "" if survey.has_amd else _NOTHING


Ladder = Mapping[Rung, Callable[[Case], Answer]]

_LINUX: Ladder = {
    Rung.PCI: _pci,
    Rung.DRIVER: _driver,
    Rung.KFD: _kfd,
    Rung.RIGHTS: _rights,
    Rung.RUNTIME: _runtime,
    Rung.TORCH: _torch,
    Rung.KERNELS: _kernels,
}
# Without the rungs that WSL and Windows do not have.
_LADDERS: Mapping[str, Ladder] = {
    "wsl": {
        Rung.PCI: _pci,
        Rung.DRIVER: _windows_host,
        Rung.RUNTIME: _runtime,
        Rung.TORCH: _torch,
        Rung.KERNELS: _kernels,
    },
    "windows": {
        Rung.PCI: _pci,
        Rung.DRIVER: _adapter_driver,
        Rung.RUNTIME: _runtime,
        Rung.TORCH: _torch,
        Rung.KERNELS: _kernels,
    },
}
