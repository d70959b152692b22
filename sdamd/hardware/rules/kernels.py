"""Rules about kernels: architectures, overrides, masks, crashes, wrong numbers."""

import re

from sdamd.hardware.gpu import ARCHITECTURES, Gpu, decode_target
from sdamd.hardware.rules.rule import (
    FAULT,
    Case,
    Rule,
    Rung,
    Seen,
    Sees,
    Severity,
    Stage,
    export,
    native_build,
    pip_install,
    said,
    stand_in,
    unset,
)
from sdamd.hardware.visibility import VARIABLES, masks_in_force

_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
_NO_KERNEL = (
    r"hipErrorNoBinaryForGpu|invalid device function|no kernel image is available"
    r"|device kernel image is invalid|HSA_STATUS_ERROR_INVALID_ISA"
)
_RDNA2 = frozenset({"gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"})
_RDNA3 = frozenset({"gfx1101", "gfx1102", "gfx1103"})
_RDNA35 = frozenset({"gfx1150", "gfx1151"})


def _lacks_kernels(family: frozenset[str]) -> Sees:
    """Make the predicate for one family whose sibling's kernels could stand in."""

    def sees(case: Case) -> Seen | None:
        arch, line = case.arch, said(case, _NO_KERNEL)
        if arch not in family or not _is_missing(case, arch, line=line):
            return None
        known = ARCHITECTURES[arch]
        has = f"the GPU is {arch}, and torch has kernels for {_names(case.archs)}"
        values = {"fix": _way_to_kernels(case, arch), "arch": arch, "override": known.override}
        if line:
            return Seen(reading=f"{line} (the GPU is {arch})", values=values)
        return case.of_torch(has, values)

    return sees


def _is_missing(case: Case, arch: str, *, line: str) -> bool:
    """Whether torch lacks kernels for the target: it says so, or its list does."""
    archs = case.archs
    if archs is not None and arch in archs:
        return False
    gpu, environ = case.preferred, case.survey.environ
    own = f"{_OVERRIDE}_{gpu.node}" if gpu is not None else _OVERRIDE
    if environ.get(own, environ.get(_OVERRIDE)) == ARCHITECTURES[arch].override != "":
        return False
    return bool(line) or (archs is not None and gpu is not None and gpu.arch == arch)


def _way_to_kernels(case: Case, arch: str) -> str:
    """The override where the wheel's own kernels can stand in, else a wheel that has them."""
    if case.on_windows:
        return "sdamd generate PROMPT --device directml"
    native = native_build(case, arch)
    if native is not None and (arch in _RDNA35 or case.survey.installed.by_device):
        return pip_install(case, native)
    known = ARCHITECTURES[arch].override
    value = stand_in(arch, case.archs) if case.archs is not None else known
    if value:
        return export(case, HSA_OVERRIDE_GFX_VERSION=value)
    return pip_install(case, native)


def _names(archs: frozenset[str] | None) -> str:
    return ", ".join(sorted(archs or ()))


def _other_gpu(case: Case) -> Seen | None:
    found = case.survey.detection
    line = said(case, _NO_KERNEL)
    if not line or found.preferred is None or len({gpu.arch for gpu in found.visible}) < 2:
        return None
    name = "HIP_VISIBLE_DEVICES" if case.on_windows else "ROCR_VISIBLE_DEVICES"
    mask = dict(found.mask) or {name: str(found.preferred.index)}
    listed = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.arch})" for gpu in found.visible)
    return Seen(
        reading=f"{line} (GPUs: {listed})",
        values={"fix": export(case, **mask), "gpu": found.preferred.name},
    )


def _kernels_missing(case: Case) -> Seen | None:
    """What rules 15 to 18 do not cover."""
    arch, line = case.arch, said(case, _NO_KERNEL)
    archs, gpu = case.archs, case.preferred
    if not line and (archs is None or gpu is None or gpu.arch in archs):
        return None
    if _other_gpu(case) or any(_lacks_kernels(f)(case) for f in (_RDNA2, _RDNA3, _RDNA35)):
        return None
    if not line and gpu is not None and stand_in(gpu.arch, archs or frozenset()):
        return None  # it runs a sibling's kernels
    why, fix = _why_missing(case, arch)
    values = {"why": why, "fix": fix}
    if line:
        return Seen(reading=line, values=values)
    return case.of_torch(f"the GPU is {arch}, and torch has kernels for {_names(archs)}", values)


def _why_missing(case: Case, arch: str) -> tuple[str, str]:
    known = ARCHITECTURES.get(arch)
    if case.on_windows:
        return "this build of torch cannot drive it", "sdamd generate PROMPT --device directml"
    if not arch:
        why = "torch has no kernels for the GPU that it ran on, and no GPU is here to tell which"
        return why, "sdamd doctor (on the machine that the text is from)"
    if case.archs is not None and arch in case.archs:
        why = f"the installed torch has kernels for {arch}, so it ran on another GPU, or posed"
        return why, "sdamd doctor --selftest"
    if known is not None and not known.rocm:
        why = f"no ROCm build of torch has kernels for {arch}"
        return why, "sdamd generate PROMPT --device cpu"
    why = f"this build of torch has no kernels for {arch}, and no sibling's fit it"
    return why, pip_install(case, native_build(case, arch))


def _stale_override(case: Case) -> Seen | None:
    environ, gpu = case.survey.environ, case.survey.detection.preferred
    names = [n for n in environ if re.fullmatch(rf"{_OVERRIDE}(_[0-9]{{1,4}})?", n)]
    if case.on_windows and names:
        reading = f"{names[0]}={environ[names[0]]} is set, which Windows' ROCm does not read"
        return Seen(reading=reading, values=_dropping(case, names), severity=Severity.WARNING)
    name = f"{_OVERRIDE}_{gpu.node}" if gpu and f"{_OVERRIDE}_{gpu.node}" in names else _OVERRIDE
    if gpu is None or name not in environ:
        return None
    why = _why_stale(case, gpu, environ[name])
    if not why:
        return None
    reading = f"{name}={environ[name]}, and {gpu.name} is {gpu.arch}"
    return Seen(reading=reading, values=_dropping(case, [name]) | {"why": why})


def _dropping(case: Case, names: list[str]) -> dict[str, str]:
    return {"fix": unset(case, *names), "why": "it is not read under Windows"}


def _why_stale(case: Case, gpu: Gpu, value: str) -> str:
    """Why this override harms this GPU; empty where it may be what makes it work."""
    parts = re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,3})\.([0-9]{1,3})", value)
    known = gpu.architecture
    if parts is None:
        return "it is not a version like 10.3.0"
    major, minor, stepping = (int(part) for part in parts.groups())
    forced = decode_target(major * 10000 + minor * 100 + stepping)
    if gpu.arch and gpu.arch[:-2] != f"gfx{major}":
        return f"it makes the GPU run code for {forced or value}, which is another generation"
    if case.archs is not None and gpu.arch in case.archs:
        return f"the installed torch has kernels for {gpu.arch} itself"
    if known is not None and not known.override:
        return f"no sibling's kernels run on {gpu.arch}"
    return ""


def _no_tensile(case: Case) -> Seen | None:
    line = said(case, r"TensileLibrary[^\n]{0,20}\.dat[^\n]{0,200}")
    match = re.search(r"GPU arch\s*:\s*(gfx[0-9a-f]{3,4})", case.text)
    if not line or not re.search(r"Cannot read|Illegal seek|No such file", case.text):
        return None
    arch = match[1] if match else (case.survey.gpu.arch if case.survey.gpu else "")
    there = frozenset(re.findall(r"TensileLibrary_lazy_(gfx[0-9a-f]{3,4})", case.text))
    lists = f" (it has {_names(there)})" if there else ""
    value = stand_in(arch, there)
    if case.archs is not None and arch in case.archs:
        fix = f"sdamd doctor --selftest (the torch of this Python has kernels for {arch} itself)"
    elif value and not case.on_windows:
        fix = export(case, HSA_OVERRIDE_GFX_VERSION=value)
    elif case.on_windows:
        fix = "sdamd generate PROMPT --device directml"
    else:
        fix = pip_install(case, native_build(case, arch))
    return Seen(reading=f"{line}{lists}", values={"fix": fix, "arch": arch or "this GPU"})


def _double_mask(case: Case) -> Seen | None:
    found, masks = case.survey.detection, masks_in_force(case.survey.environ)
    # Only the first that is set counts within a layer, but all of them would have to go.
    above = [n for n in VARIABLES if n in case.survey.environ and n != next(iter(masks), None)]
    if len(masks) < 2 or not found.gpus or any(_hides_all(text) for text in masks.values()):
        return None
    left = f"together leave {len(found.visible)} of {len(found.gpus)} GPUs"
    return Seen(
        reading=f"{_shown(masks)} {left}",
        values={"fix": unset(case, *above)},
        severity=None if not found.visible else Severity.WARNING,
    )


def _shown(masks: dict[str, str]) -> str:
    return " and ".join(f"{name}={value}" for name, value in masks.items())


def _hides_all(text: str) -> bool:
    return text.strip() in {"", "-1"}


def _all_hidden(case: Case) -> Seen | None:
    found, masks = case.survey.detection, masks_in_force(case.survey.environ)
    if not found.gpus or not masks:
        return None
    hiding = {name: text for name, text in masks.items() if _hides_all(text)}
    if hiding and not found.visible:
        why = "An empty mask, or one of -1, hides every GPU"
        return Seen(
            reading=f"{_shown(hiding)} hides all {len(found.gpus)} GPUs",
            values={"fix": unset(case, *hiding), "why": why},
        )
    asked = len(set(next(iter(masks.values())).split(",")))
    if len(masks) > 1 or len(found.visible) >= asked:
        return None
    there = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in found.gpus)
    why = "It names a GPU that is not there, and what stands after that name is not read"
    return Seen(
        reading=f"{_shown(masks)}, and the GPUs are {there}",
        values={"fix": unset(case, *masks), "why": why},
        severity=None if not found.visible else Severity.WARNING,
    )


def _crashes(case: Case) -> Seen | None:
    survey = case.survey
    for who, child in (("torch", survey.probe), ("the self-test", survey.selftest)):
        if child is not None and (child.ended.crashed or child.ended.status is None):
            return Seen(reading=f"the child that ran {who} {child.ended.how}")
    line = said(case, r"access violation|segmentation fault|SIGSEGV|SIGABRT|core dumped")
    about = said(case, r"is_available|torch[\\/.]cuda|amdhip64|c10_hip|hipInit|hipGetDevice")
    return Seen(reading=line) if line and about else None


def _unsupported(case: Case) -> Seen | None:
    found = case.survey.detection
    if case.on_windows or found.preferred is not None or not found.visible:
        return None
    return Seen(reading=found.reason)


def _wrong_numbers(case: Case) -> Seen | None:
    test = case.survey.selftest
    if test is None or test.ended.crashed or test.ended.status is None:
        return None
    if test.failed:
        wrong = "; ".join(f"{check.name}: {check.reading}" for check in test.failed)
        why = (
            "The same computation was made on the device and on the CPU in float32, and they "
            "differ by more than rounding, so pictures would be wrong"
        )
        return Seen(reading=f"on {test.device or 'the device'}: {wrong}", values={"why": why})
    if not test.checks or test.ended.status != 0:
        why = "Nothing could be computed for comparison, so it is not known what a picture would be"
        return Seen(
            reading=f"the self-test could not be run: the child {test.ended.how}",
            values={"why": why},
        )
    return None


RULES = (
    Rule(number=15, name="no-kernels-rdna2", stage=Stage.ARCH, severity=FAULT, rung=Rung.KERNELS,
         sees=_lacks_kernels(_RDNA2),
         cause="Of RDNA 2 this torch has kernels for gfx1030 alone, which {arch} can run if it "
         "poses as that. The variable must be there before torch is: in the terminal or starter "
         "that sdamd runs from, not in .bashrc.",
         fix="{fix}", source="ROCm/ROCm#2536; A1111#5067; SwarmUI#592"),
    Rule(number=16, name="no-kernels-rdna3", stage=Stage.ARCH, severity=FAULT, rung=Rung.KERNELS,
         sees=_lacks_kernels(_RDNA3),
         cause="Of RDNA 3 this torch has kernels for gfx1100 alone, which {arch} can run if it "
         "poses as that (AMD's own index has builds that need no such thing).",
         fix="{fix}", source="unsloth#9829; A1111#14462"),
    Rule(number=17, name="no-kernels-rdna35", stage=Stage.ARCH, severity=FAULT, rung=Rung.KERNELS,
         sees=_lacks_kernels(_RDNA35),
         cause="This torch has no kernels for {arch}, and AMD's own index has builds with them; "
         "until then HSA_OVERRIDE_GFX_VERSION={override} lets it run those of gfx1100.",
         fix="{fix}", source="pytorch#164346"),
    Rule(number=18, name="wrong-gpu", stage=Stage.CHOICE, severity=FAULT, rung=Rung.RUNTIME,
         sees=_other_gpu,
         cause="There are GPUs of different architectures, and HIP began with one that this torch "
         "has no kernels for; hide all but {gpu} before the program starts.",
         fix="{fix}", source="ROCm/ROCm#3401; TheRock#3392"),
    Rule(number=19, name="stale-override", stage=Stage.VARIABLES, severity=FAULT,
         rung=Rung.KERNELS, sees=_stale_override,
         cause="The override is left from an old guide: {why}. Take it out of ~/.bashrc, "
         "~/.profile and /etc/environment as well.",
         fix="{fix}", source="A1111#14182"),
    Rule(number=20, name="no-rocblas-kernels", stage=Stage.ARCH, severity=FAULT, rung=Rung.KERNELS,
         sees=_no_tensile,
         cause="rocBLAS has no matrix kernels for {arch} in its library folder, and ends the "
         "process when it is asked for one.",
         fix="{fix}", source="ROCm/ROCm#2719; rocBLAS#1339; FramePack-ZLUDA#4"),
    Rule(number=21, name="two-masks", stage=Stage.VARIABLES, severity=FAULT, rung=Rung.RUNTIME,
         sees=_double_mask,
         cause="Each mask counts in what the one below leaves: ROCR filters and numbers anew from "
         "0, HIP counts in that. Set one only.",
         fix="{fix}", source="SwarmUI#565; laifs-container-recipes#13"),
    Rule(number=22, name="mask-hides-gpu", stage=Stage.VARIABLES, severity=FAULT,
         rung=Rung.RUNTIME, sees=_all_hidden,
         cause="{why}.", fix="{fix}", source="SwarmUI#565; ROCm documentation, GPU isolation"),
    Rule(number=24, name="native-crash", stage=Stage.RUN, severity=FAULT, rung=Rung.KERNELS,
         sees=_crashes,
         cause="Native code of the driver or of torch crashed, which no program can catch; sdamd "
         "asks torch in a child for that reason, and the CPU does not need that code.",
         fix="sdamd generate PROMPT --device cpu (until driver or torch are updated)",
         source="krita-ai-diffusion#2509"),
    Rule(number=46, name="no-kernels", stage=Stage.ARCH, severity=FAULT, rung=Rung.KERNELS,
         sees=_kernels_missing,
         cause="Kernels are compiled for each architecture: {why}.",
         fix="{fix}", source="ROCm/rocm-cli's catalogue of errors; pytorch#164346"),
    Rule(number=47, name="unsupported-architecture", stage=Stage.ARCH, severity=FAULT,
         rung=Rung.KERNELS, sees=_unsupported,
         cause="Kernels are compiled for each architecture, and nobody publishes them for this one "
         "any more; an override would run wrong code. Under Windows DirectML drives it.",
         fix="sdamd generate PROMPT --device cpu",
         source="ROCm/ROCm#2232; TheRock, SUPPORTED_GPUS"),
    Rule(number=50, name="wrong-numbers", stage=Stage.RUN, severity=FAULT, rung=Rung.KERNELS,
         sees=_wrong_numbers,
         cause="{why}.",
         fix="sdamd generate PROMPT --device cpu (and try another build: "
         "python3 scripts/start.py --dry-run lists them)",
         source="robertrosenbusch/gfx803_rocm#43; pytorch#194498"),
)  # fmt: skip
