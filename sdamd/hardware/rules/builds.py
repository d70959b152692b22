"""Rules about what is installed: builds of torch and of onnxruntime."""

from sdamd.hardware.rules.rights import blocked_file
from sdamd.hardware.rules.rule import FAULT, Case, Rule, Rung, Seen, Stage, pip_install, said
from sdamd.hardware.runtime import PYTHONS

_NO_DEVICE = (
    r"No HIP GPUs are available|no CUDA GPUs are available|hipErrorNoDevice|no ROCm-capable device"
    r"|ROCm agents detected: \[\]|is_available\(\)[^\n]{0,12}\bFalse|CUDA/ROCm available: False"
)


def _cpu_wheel(case: Case) -> Seen | None:
    torch, gpu = case.survey.installed.torch, case.preferred
    if torch is None or gpu is None or not torch.version or case.hip or torch.cuda:
        return None
    if case.survey.probe is not None and case.survey.probe.cuda:
        return None
    return case.of_torch(
        f"torch {torch.version} in {case.survey.installed.executable} is {torch.kind}, "
        f"and the GPU is {gpu.name}",
        {"fix": pip_install(case, case.builds(gpu)[0])},
    )


def _cuda_wheel(case: Case) -> Seen | None:
    torch, gpu = case.survey.installed.torch, case.preferred
    fix = {"fix": pip_install(case, next(iter(case.builds()), None))}
    if case.on_windows:
        fix = {"fix": "py scripts/start.py --setup-only"}
    if line := said(case, r"Torch not compiled with CUDA enabled"):
        return Seen(reading=line, values=fix)
    probe = case.survey.probe
    cuda = probe.cuda if probe is not None and probe.answered else torch and torch.cuda
    if torch is None or gpu is None or not cuda or case.hip:
        return None
    return case.of_torch(
        f"torch {torch.version} in {case.survey.installed.executable} is built for CUDA "
        f"{cuda}, and the GPU is {gpu.name}",
        fix,
    )


def _no_such_pair(case: Case) -> Seen | None:
    line = said(
        case,
        r"(No matching distribution found for|satisfies the requirement) torch(vision|audio)?"
        r"(\[[^\]]*\])?\s*[=~<>]=[^\n]*rocm",
    )
    if not line:
        return None
    return Seen(reading=line, values={"fix": pip_install(case, next(iter(case.builds()), None))})


def _no_directml_wheel(case: Case) -> Seen | None:
    python = case.survey.installed.python
    name = f"{python[0]}.{python[1]}"
    first, last = (f"{major}.{minor}" for major, minor in PYTHONS)
    values = {"first": first, "last": last}
    line = said(
        case,
        r"(No matching distribution found for|satisfies the requirement) "
        r"(torch|onnxruntime)-directml",
    )
    if line:
        return Seen(reading=f"{line} (this is Python {name})", values=values)
    if case.on_windows and not PYTHONS[0] <= python <= PYTHONS[1]:
        return Seen(reading=f"this is Python {name} under Windows", values=values)
    return None


def _runtime_sees_none(case: Case) -> Seen | None:
    survey = case.survey
    if line := said(case, _NO_DEVICE):
        return Seen(reading=line)
    if said(case, r"ROCm agents? (detected|used)") and (line := said(case, r"Device: None")):
        return Seen(reading=line)
    probe = survey.probe
    if probe is None or not probe.answered or not probe.hip or probe.device_count:
        return None
    if not survey.detection.visible or blocked_file(case) or not survey.kfd.present:
        return None
    return Seen(
        reading=f"torch {probe.version} counts 0 GPUs, and the kernel lists "
        f"{len(survey.detection.visible)}; ROCm {probe.hip} in torch, kernel {survey.kernel}"
    )


def _no_torch(case: Case) -> Seen | None:
    installed, probe = case.survey.installed, case.survey.probe
    if not installed.known:
        return None
    if installed.torch is None:
        return case.of_torch(f"{installed.executable} has no torch", {})
    failed = probe is not None and not probe.answered and not probe.ended.crashed
    if probe is not None and failed and probe.ended.status is not None:
        where = installed.torch.folder
        return case.of_torch(f"torch in {where} does not answer: the child {probe.ended.how}", {})
    return None


def _two_onnxruntimes(case: Case) -> Seen | None:
    packages = case.survey.installed.packages
    rivals = [
        n for n in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-windowsml") if n in packages
    ]
    if not case.on_windows or not rivals or "onnxruntime-directml" not in packages:
        return None
    return Seen(
        reading=f"{' and '.join(rivals)} and onnxruntime-directml are installed together",
        values={
            "fix": f"{case.survey.installed.executable} -m pip uninstall --yes {' '.join(rivals)} "
            "onnxruntime-directml && py scripts/start.py --setup-only"
        },
    )


def _no_directml(case: Case) -> Seen | None:
    survey = case.survey
    if not case.on_windows or not survey.installed.known or survey.gpu is None:
        return None
    if "onnxruntime-directml" in survey.installed.packages or case.hip:
        return None
    return Seen(reading=f"{survey.installed.executable} has no onnxruntime-directml")


RULES = (
    Rule(number=11, name="cpu-wheel", stage=Stage.BUILD, severity=FAULT, rung=Rung.TORCH,
         sees=_cpu_wheel,
         cause="This build of torch has no ROCm in it: another Python came first on the path, or "
         "some requirement pulled the plain package in.",
         fix="{fix}", source="forge-classic#324; A1111#17025"),
    Rule(number=12, name="cuda-wheel", stage=Stage.BUILD, severity=FAULT, rung=Rung.TORCH,
         sees=_cuda_wheel,
         cause="A requirement, or an extra index beside the usual one, let pip bring torch for "
         "another maker's GPUs or for none; torch must come from its own index alone.",
         fix="{fix}", source="InvokeAI#7146; StabilityMatrix#1354; Fooocus#113"),
    Rule(number=13, name="no-such-build", stage=Stage.BUILD, severity=FAULT, rung=Rung.TORCH,
         sees=_no_such_pair,
         cause="That version of torch was never built for that version of ROCm; with the usual "
         "index pip would go on to a build without ROCm, so take a pair that there is.",
         fix="{fix}", source="InvokeAI PR#7147; InvokeAI#8655"),
    Rule(number=14, name="no-directml-for-python", stage=Stage.BUILD, severity=FAULT,
         rung=Rung.TORCH, sees=_no_directml_wheel,
         cause="onnxruntime-directml, which sdamd uses, is published for 64-bit Windows and Python "
         "{first} to {last}; torch-directml ended with Python 3.12, and sdamd needs none of it.",
         fix="py -3.12 -m venv .venv", source="DirectML#544; stable-diffusion-webui-amdgpu#268"),
    Rule(number=23, name="runtime-sees-no-gpu", stage=Stage.BUILD, severity=FAULT,
         rung=Rung.RUNTIME, sees=_runtime_sees_none,
         cause="torch's ROCm and the layers below it do not agree; where the ladder shows nothing "
         "else wrong, kernel driver and ROCm are too far apart in age.",
         fix="sdamd doctor --probe (the first red rung tells; if none is, update the kernel)",
         source="sdnext#2884; ROCm/ROCm#3910"),
    Rule(number=48, name="torch-missing", stage=Stage.BUILD, severity=FAULT, rung=Rung.TORCH,
         sees=_no_torch,
         cause="sdamd draws with torch, and this Python cannot load it.",
         fix="python3 scripts/start.py --setup-only", source="sdamd"),
    Rule(number=53, name="two-onnxruntimes", stage=Stage.BUILD, severity=FAULT, rung=Rung.RUNTIME,
         sees=_two_onnxruntimes,
         cause="These packages write the same files, so the one that was installed last decides "
         "whether DirectML is there.",
         fix="{fix}", source="onnxruntime's documentation, Install"),
    Rule(number=54, name="directml-missing", stage=Stage.BUILD, severity=FAULT, rung=Rung.RUNTIME,
         sees=_no_directml,
         cause="Under Windows sdamd drives the GPU through DirectML, which this package brings.",
         fix="py scripts/start.py --setup-only", source="sdamd"),
)  # fmt: skip
