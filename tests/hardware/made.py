"""Machines made of text: the files of a kernel, a Python and a user, below a root."""

from collections.abc import Collection, Mapping
from pathlib import Path

from sdamd.hardware.doctor import Diagnosis, diagnose
from sdamd.hardware.rules.rule import Finding, Severity
from sdamd.hardware.survey import Survey, survey

NODES = "sys/class/kfd/kfd/topology/nodes"
GIB = 2**30

Files = dict[str, str]


def gpu(
    node: int = 1,
    version: int = 110000,
    device_id: int = 0x744C,
    *,
    bank_gib: float = 24,
    vram_gib: float | None = None,
    gtt_gib: float = 16,
    simds: int = 192,
    driver: str = "amdgpu",
    listed: bool = True,
    device_class: str = "0x030000",
    unique_id: int = 0,
) -> Files:
    """One GPU: its KFD node (unless it is not `listed`), its DRM card and its PCI device."""
    address = f"0000:{node + 2:02x}:00.0"
    uevent = f"DRIVER={driver}\nPCI_SLOT_NAME={address}\n" if driver else ""
    device = {"vendor": "0x1002", "device": f"{device_id:#06x}", "class": device_class,
              "uevent": uevent or f"PCI_SLOT_NAME={address}\n"}  # fmt: skip
    files = {f"sys/bus/pci/devices/{address}/{name}": text for name, text in device.items()}
    if driver in {"amdgpu", "radeon"}:
        vram = bank_gib if vram_gib is None else vram_gib
        device |= {
            "mem_info_vram_total": str(round(vram * GIB)),
            "mem_info_gtt_total": str(round(gtt_gib * GIB)),
        }
        files |= {f"sys/class/drm/card{node}/device/{name}": t for name, t in device.items()}
        files[f"dev/dri/renderD{127 + node}"] = "660 0 105"
    if listed:
        files[f"{NODES}/{node}/properties"] = (
            f"simd_count {simds}\nvendor_id 4098\ndevice_id {device_id}\n"
            f"gfx_target_version {version}\nlocation_id {(node + 2) << 8}\ndomain 0\n"
            f"drm_render_minor {127 + node}\nwave_front_size 32\nunique_id {unique_id}\n"
        )
        files[f"{NODES}/{node}/mem_banks/0/properties"] = (
            f"heap_type 1\nsize_in_bytes {round(bank_gib * GIB)}\n"
        )
    return files


def torch(
    version: str = "2.9.1+rocm6.4", hip: str | None = "6.4.43484", cuda: str | None = None
) -> Files:
    """A Python that has this torch."""
    return {
        "python/torch/version.py": f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
        f"hip: Optional[str] = {hip!r}\n",
        f"python/torch-{version}.dist-info/METADATA": "",
    }


CPU_TORCH = torch("2.13.0+cpu", None)
CUDA_TORCH = torch("2.13.0+cu128", None, "12.8")
AMD_TORCH = torch("2.12.0+rocm7.14.1", "7.14.60850")

LINUX: Files = {
    "proc/version": "Linux version 6.17.9-arch1-1 (builder@host) #1 SMP",
    "proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz root=UUID=0 ro quiet",
    "proc/modules": "amdgpu 20000000 12 - Live 0x0\nnvme 65536 3 - Live 0x0\n",
    "proc/meminfo": "MemTotal:       65536000 kB\n",
    "proc/self/status": "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\nGroups:\t44 105 1000 \n",
    "etc/group": "root:x:0:\nvideo:x:44:alice\nrender:x:105:alice\nalice:x:1000:\n",
    "etc/passwd": "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n",
    "dev/kfd": "660 0 105",
}

DEVICES = ("dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129")

WSL: Files = {
    "proc/version": "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@x) #1 SMP",
    "dev/dxg": "",
    "opt/rocm/.info/version": "7.2.0",
    **torch(),
}


def machine(*parts: Mapping[str, str], without: Collection[str] = ()) -> Files:
    """A healthy Linux machine with these parts; a Radeon RX 7900 XTX and its torch by default."""
    files: Files = {**LINUX, **torch()}
    for part in parts or (gpu(),):
        if any(name.startswith("python/") for name in part):
            files = {name: text for name, text in files.items() if not name.startswith("python/")}
        files |= part
    return {name: text for name, text in files.items() if name not in without}


def write(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    root.mkdir(parents=True, exist_ok=True)
    return root


def surveyed(
    root: Path, files: Mapping[str, str], platform: str = "linux", **environ: str
) -> Survey:
    return survey(write(root, files), platform, environ)


def examined(
    root: Path, files: Mapping[str, str], text: str = "", platform: str = "linux", **environ: str
) -> Diagnosis:
    return diagnose(surveyed(root, files, platform, **environ), text)


def fired(diagnosis: Diagnosis, number: int) -> Finding | None:
    """The finding of this rule, about the text or else about the machine."""
    found = (*diagnosis.recognised, *diagnosis.findings)
    return next((finding for finding in found if finding.rule == number), None)


def faults(diagnosis: Diagnosis) -> list[int]:
    return [f.rule for f in diagnosis.findings if f.severity is Severity.FAULT]


RAPHAEL = gpu(2, 100306, 0x164E, bank_gib=15, vram_gib=0.5, gtt_gib=15, simds=4)
STRANGER: Files = {
    "proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t1000\n",
    "etc/group": "video:x:44:\nrender:x:105:\n",
}
INTEL: Files = {
    "sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086",
    "sys/bus/pci/devices/0000:00:02.0/class": "0x030000",
    "sys/bus/pci/devices/0000:00:00.0/vendor": "0x1022",
    "sys/bus/pci/devices/0000:00:00.0/class": "0x060000",
}

MACHINES: Mapping[str, Files] = {
    "healthy": machine(),
    "hybrid-laptop": machine(gpu(1, 110002, 0x7480, bank_gib=8, device_class="0x038000"), INTEL),
    "three-cards": machine(
        gpu(1, 110000), gpu(2, 100300, 0x73BF, bank_gib=16), gpu(3, 120001, 0x7550, bank_gib=16)
    ),
    "card-and-igpu": machine(gpu(), RAPHAEL),
    "steam-deck": machine(
        gpu(1, 100303, 0x163F, bank_gib=8, vram_gib=1, gtt_gib=8, simds=16), AMD_TORCH
    ),
    "rx5700": machine(gpu(1, 100100, 0x731F, bank_gib=8), AMD_TORCH),
    "rx6700xt-with-gfx1030-kernels": machine(gpu(1, 100301, 0x73DF, bank_gib=12)),
    "780m-with-gfx1100-kernels": machine(
        gpu(1, 110003, 0x15BF, bank_gib=30, vram_gib=0.5, gtt_gib=30, simds=24)
    ),
    "strix-halo-with-rocm64": machine(
        gpu(1, 110501, 0x1586, bank_gib=30, vram_gib=0.5, gtt_gib=30, simds=80)
    ),
    "cpu-torch": machine(gpu(), CPU_TORCH),
    "cuda-torch": machine(gpu(), CUDA_TORCH),
    "docker": machine(gpu(), {".dockerenv": ""}),
    "docker-without-devices": machine(gpu(), {".dockerenv": ""}, without=DEVICES),
    "docker-without-gpu": machine({}, {".dockerenv": ""}, without=DEVICES),
    "podman-other-number": machine(
        gpu(),
        {"run/.containerenv": "", "proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t992\n"},
    ),
    "lxc-no-driver": machine(
        gpu(1, 0, driver="", listed=False),
        {"dev/lxd/sock": "", "proc/modules": "nvme 1 1 - Live 0x0"},
        without=DEVICES,
    ),
    "docker-desktop": machine(
        {}, {".dockerenv": "", "proc/version": "Linux version 6.10.14-linuxkit (r@b)"},
        without=DEVICES,
    ),
    "no-rights": machine(gpu(), STRANGER),
    "old-session": machine(gpu(), {"proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t1000\n"}),
    "driver-not-loaded": machine(
        gpu(1, 0, driver="", listed=False), {"proc/modules": "nvme 1 1 - Live 0x0"}
    ),
    "vfio": machine(gpu(1, 0, driver="vfio-pci", listed=False)),
    "radeon": machine(gpu(1, 0, 0x6810, driver="radeon", listed=False)),
    "pitcairn": machine(gpu(1, 0, 0x6810, listed=False)),
    "kernel-too-old": machine(gpu(1, 0, 0x7550, listed=False)),
    "rx580": machine(gpu(1, 80003, 0x67DF, bank_gib=8), CPU_TORCH),
    "no-devices": machine(gpu(), {"dev/null": ""}, without=DEVICES),
    "cpu-only": machine({}, CPU_TORCH, without=DEVICES),
    "without-torch": {
        name: text for name, text in machine().items() if not name.startswith("python/torch")
    } | {"python/x": ""},
    "wsl": WSL,
    "wsl-docker": {**WSL, ".dockerenv": ""},
}  # fmt: skip
"""Machines of many kinds; none of them is a recording."""
