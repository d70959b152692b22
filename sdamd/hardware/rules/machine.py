"""Rules about the machine itself: kernel driver, KFD, and what memory it has."""

import re

from sdamd.hardware.gpu import Gpu
from sdamd.hardware.rules.rule import (
    FAULT,
    INFO,
    WARNING,
    Case,
    Rule,
    Rung,
    Seen,
    Severity,
    Stage,
    logged,
    said,
)

_GIB = 2**30
_NO_MEMORY = r"/dev/kfd.{0,40}cannot allocate memory"
_NOT_LOADED = r"ROCk module is NOT loaded"


def _driver_not_loaded(case: Case) -> Seen | None:
    survey = case.survey
    if not case.on_bare_linux or survey.detection.gpus:
        return None
    card = next(iter(survey.pci), None)
    name = f"{card.name} at {card.pci}" if card else ""
    unlisted = next(iter(survey.detection.unlisted), None)
    if card is None and unlisted is not None:
        name = f"{unlisted.name} at {unlisted.pci or unlisted.card}"
    claimed = (card.driver if card else "") or (unlisted.driver if unlisted else "")
    if not name and said(case, _NOT_LOADED) and not survey.driver_loaded:
        return Seen(reading=said(case, _NOT_LOADED), values=_why_not_loaded(case))
    if not name or claimed or survey.driver_loaded:
        return None
    return Seen(
        reading=f"{name} is on the bus, and the kernel has no amdgpu driver loaded",
        values=_why_not_loaded(case),
    )


def _why_not_loaded(case: Case) -> dict[str, str]:
    words = case.survey.command_line.split()
    blocking = [w for w in words if w == "nomodeset" or re.search(r"blacklist=.*amdgpu", w)]
    why = f"; the kernel's command line has {' and '.join(blocking)}, which forbids it"
    return {"why": why if blocking else ""}


def _too_old(case: Case) -> Seen | None:
    survey = case.survey
    old = next((gpu for gpu in survey.detection.unlisted if not _has_wheels(gpu)), None)
    if line := said(case, rf"{_NO_MEMORY}|not supported in kfd"):
        return Seen(reading=line)
    if survey.kfd.error == "ENOMEM":
        return Seen(
            reading="opening /dev/kfd fails with ENOMEM, although rights are not the matter"
        )
    if line := logged(case, r"not supported in kfd"):
        return Seen(reading=f"the kernel's log: {line}")
    legacy = next((card for card in survey.pci if card.driver == "radeon"), None)
    if legacy is not None and not survey.detection.gpus:
        return Seen(
            reading=f"{legacy.name} at {legacy.pci} has the driver radeon, that of older cards"
        )
    if old is None or survey.detection.gpus or old.driver != "amdgpu":
        return None
    return Seen(
        reading=f"{old.name} at {old.pci or old.card} has the driver amdgpu, and KFD does not "
        "list it"
    )


def _has_wheels(gpu: Gpu) -> bool:
    return gpu.architecture is not None and gpu.architecture.rocm


def _no_atomics(case: Case) -> Seen | None:
    line = said(case, r"PCI rejects atomics") or logged(case, r"PCI rejects atomics")
    return Seen(reading=line) if line else None


def _tool_sees_nothing(case: Case) -> Seen | None:
    gpus = case.survey.detection.gpus
    line = said(
        case,
        r"(amd-?smi|rocm-?smi|amdsmi)\b.{0,200}(no (amd )?gpus?\b|not found|no devices|empty|"
        r"nothing|\[\]|unable to detect|WARNING: No)|No AMD GPUs? (specified|detected|found)"
        r"|AMDSMI_STATUS_(NOT_INIT|INIT_ERROR|NO_DRV)|Driver not initialized \(amdgpu not found",
        dotall=True,
    )
    if not line or not gpus:
        return None
    names = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in gpus)
    return Seen(reading=line, values={"gpus": names})


def _carve_out(case: Case) -> Seen | None:
    gpu, ram = case.survey.gpu, case.survey.ram_bytes
    pages = _pages(ram)
    small = said(
        case, r"(512\.00 MiB|[12]\.00 GiB) total capac?i?ty|total capac?i?ty of 512\.00 MiB"
    )
    if small and (gpu is None or gpu.is_apu):
        have = f"the driver can map {gpu.gtt_bytes / _GIB:.1f} GiB" if gpu else "an APU's carve-out"
        return Seen(reading=f"{small} ({have})", values={"pages": pages})
    if gpu is None or not gpu.is_apu or case.on_windows or gpu.gtt_bytes <= 2 * gpu.vram_bytes:
        return None
    if gpu.arch == "gfx1036" or (ram and gpu.gtt_bytes >= 0.7 * ram):
        return None  # nothing to gain
    return Seen(
        reading=f"{gpu.name} is an APU: the BIOS sets {gpu.vram_bytes / _GIB:.1f} GiB aside for "
        f"it, and the driver can map {gpu.gtt_bytes / _GIB:.1f} GiB more"
        + (f" of {ram / _GIB:.0f} GiB of RAM" if ram else ""),
        values={"pages": pages},
        severity=Severity.INFO,
    )


def _pages(ram: int) -> str:
    """Three quarters of the RAM, never more than all but 8 GiB, in pages of 4 KiB."""
    gib = min(ram * 3 // 4, ram - 8 * _GIB) // _GIB
    return str(gib * 262144) if gib > 0 else "<GiB times 262144>"


def _wrong_parameter(case: Case) -> Seen | None:
    ours = re.search(r"\bamdgpu\.gtt_size=(\d{1,9})", f"{case.survey.command_line}\n{case.text}")
    if ours:
        pages = str(int(ours[1]) * 256)
        reading = f"the kernel's command line has {ours[0]}, and the driver has no option gtt_size"
        return Seen(reading=reading, values={"pages": pages, "mib": ours[1]})
    pattern = r"amdgpu: unknown parameter ['\"]?gtt_size"
    line = said(case, pattern) or logged(case, pattern)
    if not line:
        return None
    return Seen(reading=line, values={"pages": _pages(case.survey.ram_bytes), "mib": "<MiB>"})


def _no_dml_size(case: Case) -> Seen | None:
    line = said(
        case,
        r"Total VRAM 1024 MB|privateuseone.{0,40}\b0\.0 of 0\.0 GiB|\b0\.0 of 0\.0 GiB"
        r"|Device: privateuseone",
    )
    if line:
        return Seen(reading=line)
    gpu = case.survey.gpu
    if case.on_windows and gpu is not None and gpu.usable_bytes in {0, _GIB} and not gpu.is_apu:
        return Seen(
            reading=f"Windows tells {gpu.usable_bytes // 2**20} MB of memory for {gpu.name}"
        )
    return None


def _memory_mismatch(case: Case) -> Seen | None:
    gpu, probe = case.survey.gpu, case.survey.probe
    told = re.search(r"total capac?i?ty of (\d{1,5}\.\d\d) GiB", case.text)
    total = float(told[1]) if told else 0.0
    if not told and probe is not None and probe.devices:
        total = probe.devices[0].memory_bytes / _GIB
    logged = re.findall(r"VRAM: (\d{1,9})M\b|VRAM RAM=(\d{1,9})M\b",
                        f"{case.survey.dmesg or ''}\n{case.text}")  # fmt: skip
    real = max((int(a or b) / 1024 for a, b in logged), default=0.0)
    where = "the kernel's log"
    if gpu is not None and gpu.usable_bytes > real * _GIB:
        real, where = gpu.usable_bytes / _GIB, "the kernel's files"
    # Another machine's text says nothing about the card that is here.
    if not total or not real or total > 0.9 * real or (gpu and not gpu.is_apu and not logged):
        return None
    return Seen(
        reading=f"torch counts {total:.2f} GiB of memory, and {where} {real:.2f} GiB",
    )


def _no_kfd(case: Case) -> Seen | None:
    survey = case.survey
    if not case.on_bare_linux:
        return None
    able = next((gpu for gpu in survey.detection.unlisted if _has_wheels(gpu)), None)
    if not survey.detection.gpus and able is not None and able.driver == "amdgpu":
        return Seen(
            reading=f"{able.name} ({able.arch}) has the driver amdgpu, and kernel "
            f"{survey.kernel or 'of unknown version'} does not list it in KFD"
        )
    if not survey.detection.gpus or not survey.devices_known:
        return None
    absent = [] if survey.kfd.present else ["/dev/kfd"]
    absent += [] if survey.renders else ["/dev/dri/renderD*"]
    if not absent:
        return None
    return Seen(reading=f"the kernel lists the GPU, and {' and '.join(absent)} cannot be found")


def _other_driver(case: Case) -> Seen | None:
    survey = case.survey
    taken = next((c for c in survey.pci if c.driver not in {"", "amdgpu", "radeon"}), None)
    if taken is None or survey.detection.gpus or survey.detection.unlisted:
        return None
    return Seen(
        reading=f"{taken.name} at {taken.pci} is bound to the driver {taken.driver}",
        values={"pci": taken.pci, "driver": taken.driver},
    )


RULES = (
    Rule(number=1, name="driver-not-loaded", stage=Stage.HARDWARE, severity=FAULT,
         rung=Rung.DRIVER, sees=_driver_not_loaded,
         cause="The card is there, but the kernel driver that makes it usable is not{why}.",
         fix="sudo modprobe amdgpu", source="ROCm/rocm-cli diagnose (fix-5); ROCm/ROCm#795"),
    Rule(number=7, name="not-supported-by-kfd", stage=Stage.HARDWARE, severity=FAULT,
         rung=Rung.KFD, sees=_too_old,
         cause="The compute part of the kernel driver does not know this GPU, which is older than "
         "what it supports; no setting, group or override changes that.",
         fix="sdamd generate PROMPT --device cpu", source="ROCm/ROCm#2232"),
    Rule(number=8, name="no-pcie-atomics", stage=Stage.HARDWARE, severity=FAULT, rung=Rung.KFD,
         sees=_no_atomics,
         cause="GPUs of this age need PCIe atomics, and this slot or board does not route them.",
         fix="put the card into the slot that is wired to the processor; without one: --device cpu",
         source="xuhuisheng/rocm-gfx803#20"),
    Rule(number=25, name="tool-sees-nothing", stage=Stage.HARDWARE, severity=INFO,
         sees=_tool_sees_nothing,
         cause="The kernel lists {gpus}; the tool fails, and neither sdamd nor torch asks it.",
         fix="go on without the tool", source="vllm#46110; unsloth#7314"),
    Rule(number=28, name="apu-carve-out", stage=Stage.MEMORY, severity=WARNING, sees=_carve_out,
         cause="An APU has no memory of its own: the BIOS sets a part of the RAM aside, and the "
         "driver maps more of it, usually half. sdamd counts the larger of the two; other programs "
         "may see the smaller one.",
         fix="add ttm.pages_limit={pages} to the kernel's command line and restart (or raise the "
         "UMA buffer in the BIOS)", source="ROCm/ROCm#2014; pytorch#107605"),
    Rule(number=29, name="mistyped-parameter", stage=Stage.MEMORY, severity=FAULT,
         sees=_wrong_parameter,
         cause="The option was mistyped and is ignored, so the GPU still maps the usual half of "
         "the RAM; it was called amdgpu.gttsize={mib}, and is now counted in pages of 4 KiB.",
         fix="put ttm.pages_limit={pages} into the kernel's command line instead, and restart",
         source="ROCm/ROCm#5595"),
    Rule(number=30, name="directml-size-unknown", stage=Stage.MEMORY, severity=INFO,
         sees=_no_dml_size,
         cause="DirectML cannot be asked for the memory, so programs print a constant or nothing: "
         "that is no error, and no reason for a low-memory mode.",
         fix="sdamd plan --budget 12 (the GiB that the card's box says)",
         source="krita-ai-diffusion#169; ComfyUI#1900"),
    Rule(number=45, name="memory-counted-short", stage=Stage.MEMORY, severity=WARNING,
         sees=_memory_mismatch,
         cause="The installed ROCm hands out another pool than the one that the BIOS or the driver "
         "made large; newer ones take the right one.",
         fix="python3 scripts/start.py --setup-only (installs the ROCm build for this APU)",
         source="TheRock#1054; pytorch#107605; ROCm/ROCm#5444"),
    Rule(number=49, name="kfd-missing", stage=Stage.HARDWARE, severity=FAULT, rung=Rung.KFD,
         sees=_no_kfd,
         cause="The kernel shows pictures with this GPU but does not offer it for computing: it is "
         "older than the card, was built without HSA_AMD, or its device files were not made.",
         fix="sudo dmesg | grep -iE 'amdgpu|kfd' (then install your distribution's newest kernel)",
         source="Linux, drivers/gpu/drm/amd/amdkfd; ROCm/ROCm#2232"),
    Rule(number=52, name="bound-elsewhere", stage=Stage.HARDWARE, severity=FAULT,
         rung=Rung.DRIVER, sees=_other_driver,
         cause="Another driver holds the card: vfio-pci, for one, keeps it for a virtual "
         "machine.",
         fix="lspci -nnk -s {pci} (then take it out of the configuration of {driver} and restart)",
         source="lemonade-sdk/lemonade#419; Linux, Documentation/driver-api/vfio.rst"),
)  # fmt: skip
