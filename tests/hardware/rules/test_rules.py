"""Every rule, where it must fire and where it must not."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sdamd.hardware.child import Ended
from sdamd.hardware.doctor import diagnose
from sdamd.hardware.folders import Folder
from sdamd.hardware.installed import Installed
from sdamd.hardware.rights import DeviceFile
from sdamd.hardware.rules import RULES
from sdamd.hardware.rules.rule import Finding, Severity
from sdamd.hardware.torch_probe import Check, Device, Probe, SelfTest
from tests.hardware.made import (
    AMD_TORCH,
    CPU_TORCH,
    CUDA_TORCH,
    DEVICES,
    GIB,
    NODES,
    WSL,
    fired,
    gpu,
    machine,
    surveyed,
    torch,
)

INVALID = "RuntimeError: HIP error: invalid device function"
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A machine, a text, and what of the survey is other than its files say."""

    files: Mapping[str, str]
    text: str = ""
    platform: str = "linux"
    environ: Mapping[str, str] = field(default_factory=dict)
    change: Mapping[str, Any] = field(default_factory=dict)
    says: Sequence[str] = ()
    never: Sequence[str] = ()
    severity: Severity | None = None


def scene(*parts: Mapping[str, str], without: Sequence[str] = (), **more: Any) -> Scene:
    return Scene(files=machine(*parts, without=without), **more)


def pasted(text: str, *parts: Mapping[str, str], **more: Any) -> Scene:
    return scene(*parts, text=text, **more)


def answered(count: int = 1, archs: Sequence[str] = (), memory: int = 24 * GIB) -> Probe:
    device = Device(name="Radeon", gfx="gfx1100", memory_bytes=memory)
    return Probe(
        ended=Ended(status=0), answered=True, version="2.9.1+rocm6.4", hip="6.4",
        device_count=count, archs=frozenset(archs), devices=(device,) * count,
    )  # fmt: skip


def selftest(ok: bool, reading: str = "error 0.1, allowed 0.001") -> SelfTest:
    check = Check(name="conv", ok=ok, reading=reading)
    return SelfTest(ended=Ended(status=0 if ok else 3), device="Radeon", checks=(check,))


def device_package(arch: str) -> dict[str, str]:
    return {f"python/amd_torch_device_{arch}-2.12.0+rocm7.14.1.dist-info/METADATA": ""}


def folder(**more: Any) -> Folder:
    usual = {"what": "MIOpen's kernel cache", "path": Path("/x"), "free_bytes": 2**40}
    return Folder(**{**usual, **more})


NAVI22 = gpu(1, 100301, 0x73DF, bank_gib=12)
NAVI23 = gpu(1, 100302, 0x73FF, bank_gib=8)
NAVI21 = gpu(1, 100300, 0x73BF, bank_gib=16)
NAVI10 = gpu(1, 100100, 0x731F, bank_gib=8)
POLARIS = gpu(1, 80003, 0x67DF, bank_gib=8)
PHOENIX = gpu(1, 110003, 0x15BF, bank_gib=30, vram_gib=0.5, gtt_gib=30, simds=24)
STRIX_HALO = gpu(1, 110501, 0x1586, bank_gib=30, vram_gib=0.5, gtt_gib=30, simds=80)
RAPHAEL = gpu(2, 100306, 0x164E, bank_gib=15, vram_gib=0.5, gtt_gib=15, simds=4)
UNLISTED_OLD = gpu(1, 0, 0x6810, listed=False)
UNLISTED_NEW = gpu(1, 0, 0x7550, listed=False)
NO_DRIVER = gpu(1, 0, 0x744C, driver="", listed=False)
VFIO = gpu(1, 0, 0x744C, driver="vfio-pci", listed=False)

DOCKER = {".dockerenv": ""}
PODMAN = {"run/.containerenv": "engine=podman"}
MODULES_WITHOUT = {"proc/modules": "nvme 65536 3 - Live 0x0\n"}
OUTSIDE = {"proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t44 992 1000\n",
           "etc/group": "video:x:44:\nrender:x:992:alice\n"}  # fmt: skip
STRANGER = {"proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t1000\n",
            "etc/group": "video:x:44:\nrender:x:105:\n"}  # fmt: skip
BOTH = "Max_Split_Size_MB: 128 , EXPANDABLE_SEGMENTS:True"
ROCMINFO_WSL = "ROCk module is NOT loaded, possibly no GPU devices"

FIRES: Mapping[int, Sequence[Scene]] = {
    1: [
        scene(NO_DRIVER, MODULES_WITHOUT, says=["sudo modprobe amdgpu", "0000:03:00.0"]),
        scene(NO_DRIVER, MODULES_WITHOUT, {"proc/cmdline": "ro nomodeset quiet"},
              says=["nomodeset"]),
        pasted(ROCMINFO_WSL, {}, MODULES_WITHOUT, without=DEVICES, says=["sudo modprobe amdgpu"]),
    ],
    2: [
        scene(gpu(), STRANGER, says=["sudo usermod -aG render,video $USER", "render (105)"]),
        scene(gpu(), STRANGER, {"etc/group": "hsa:x:105:\n"}, says=["usermod -aG hsa,video"]),
        scene(gpu(), STRANGER, {"etc/group": "video:x:105:\n"}, says=["usermod -aG video $USER"]),
        scene(gpu(), STRANGER, {"etc/group": "x:x:1:\n"}, says=["groupadd --gid 105 kfd"]),
        scene(gpu(), STRANGER, without=["etc/group"], says=["usermod -aG 105,video"]),
        scene(gpu(), STRANGER, {"etc/group": "docker:x:105:\n"}, never=["usermod"]),
        scene(gpu(), STRANGER, {"dev/kfd": "660 0 0"}, says=["udevadm"], never=["usermod"]),
        scene(gpu(), {"dev/kfd": "600 0 105"}, says=["file's mode"], never=["usermod"]),
        scene(gpu(), {"dev/dri/renderD128": "600 0 44"}, says=["/dev/dri/renderD128"]),
        pasted("Unable to open /dev/kfd read-write: Operation not permitted", {},
               without=DEVICES, says=["usermod -aG render,video"]),
    ],
    3: [
        scene(gpu(), {"proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t1000\n"},
              says=["log in again", "newgrp render"], never=["usermod"]),
    ],
    4: [
        scene(gpu(), DOCKER, OUTSIDE, says=["--group-add 105", "44, 992, 1000"]),
        scene(gpu(), PODMAN, OUTSIDE, says=["--group-add keep-groups", "105"]),
        scene(gpu(), DOCKER, OUTSIDE, change={"kfd": DeviceFile(
            path="/dev/kfd", present=True, group=105, may_open=False, error="EACCES")},
            says=["--group-add 105"]),
    ],
    5: [
        scene(gpu(), DOCKER, without=DEVICES,
              says=["docker run --device=/dev/kfd --device=/dev/dri --group-add video",
                    "--security-opt seccomp=unconfined"]),
        scene(gpu(), DOCKER, without=["dev/kfd"], says=["has no /dev/kfd"]),
        scene(gpu(), PODMAN, without=DEVICES, says=["podman run", "keep-groups"]),
        scene(gpu(), {"run/secrets/kubernetes.io/x": ""}, without=DEVICES, says=["amd.com/gpu"]),
        scene({f"{NODES}/1/properties": "", "dev/dri/renderD128": ""}, DOCKER,
              says=["device rules"]),
        scene({}, DOCKER, without=DEVICES, severity=Severity.INFO),
        scene(gpu(), DOCKER, change={"kfd": DeviceFile(
            path="/dev/kfd", present=True, group=105, may_open=False, error="EPERM")},
            says=["device rules"]),
    ],
    6: [
        scene(gpu(), {"proc/version": "Linux version 6.10.14-linuxkit (root@x)"}, without=DEVICES,
              says=["docker context use default"]),
        scene(gpu(), environ={}, change={"docker_context": "desktop-linux"},
              severity=Severity.WARNING),
        pasted('docker: Error response from daemon: error gathering device information while adding'
               ' custom device "/dev/kfd": no such file or directory.', {}),
    ],
    7: [
        scene(gpu(1, 0, 0x6810, driver="radeon", listed=False), says=["--device cpu"]),
        scene(UNLISTED_OLD, says=["--device cpu"], never=["usermod", "group,"]),
        pasted("Unable to open /dev/kfd read-write: Cannot allocate memory", never=["usermod"]),
        scene(gpu(), change={"kfd": DeviceFile(
            path="/dev/kfd", present=True, group=105, may_open=False, error="ENOMEM")},
            says=["ENOMEM"]),
        scene(UNLISTED_OLD, change={"dmesg": "kfd kfd: amdgpu: PITCAIRN  not supported in kfd"},
              says=["PITCAIRN"]),
    ],
    8: [
        pasted("kfd kfd: skipped device 1002:67df, PCI rejects atomics", says=["slot"]),
        scene(UNLISTED_OLD, change={"dmesg": "kfd: skipped device 1002:67df, PCI rejects atomics"}),
    ],
    9: [
        Scene(files=WSL, says=["ldconfig -p | grep librocdxg"], never=["modprobe", "usermod"]),
        Scene(files={**WSL, "opt/rocm/lib/librocdxg.so.1": ""},
              says=["export HSA_ENABLE_DXG_DETECTION=1"]),
        Scene(files={"proc/version": WSL["proc/version"], "dev/dxg": "", **torch()},
              says=["no ROCm under /opt/rocm"]),
    ],
    10: [
        Scene(files=WSL, text=ROCMINFO_WSL, never=["modprobe"]),
        pasted(ROCMINFO_WSL, gpu(), DOCKER, never=["modprobe"]),
        pasted(f"{ROCMINFO_WSL}\nLinux version 5.15.153.1-microsoft-standard-WSL2", {}),
    ],
    11: [
        scene(gpu(), CPU_TORCH, says=[
            "torch 2.13.0+cpu in python3", "Radeon",
            "python3 -m pip install --force-reinstall torch==2.9.1+rocm6.4 --index-url "
            "https://download.pytorch.org/whl/rocm6.4"]),
        scene(STRIX_HALO, CPU_TORCH, says=["repo.amd.com", "device-gfx1151"]),
    ],
    12: [
        scene(gpu(), CUDA_TORCH, says=["torch 2.13.0+cu128", "CUDA 12.8", "--index-url"],
              never=["--extra-index-url"]),
        pasted("AssertionError: Torch not compiled with CUDA enabled", {}, says=["--index-url"]),
        pasted("AssertionError: Torch not compiled with CUDA enabled", platform="windows"),
    ],
    13: [
        pasted("ERROR: No matching distribution found for torch==2.4.1+rocm5.6",
               says=["torch==2.9.1+rocm6.4"]),
        pasted("ERROR: Could not find a version that satisfies the requirement "
               "torch==2.4.1+rocm5.6 (from versions: 2.0.0)", {}),
    ],
    14: [
        pasted("ERROR: No matching distribution found for torch-directml", platform="windows",
               change={"installed": Installed(executable="py", python=(3, 13))},
               says=["py -3.12 -m venv", "Python 3.13"]),
        pasted("No matching distribution found for onnxruntime-directml", {}),
        scene(platform="windows", change={"installed": Installed(executable="py", python=(3, 15))}),
    ],
    15: [
        pasted(INVALID, NAVI22, says=[f"export {OVERRIDE}=10.3.0"]),
        pasted("hipErrorNoBinaryForGpu: Unable to find code object", NAVI23, says=["10.3.0"]),
        scene(NAVI22, says=[f"export {OVERRIDE}=10.3.0"]),
        scene(NAVI22, torch("2.99+rocm9", "9.0"), says=["10.3.0"], change={
            "probe": answered(archs=["gfx900", "gfx906", "gfx1030", "gfx1100"])}),
        pasted(f"{INVALID} (gfx1034)", {}, CPU_TORCH, says=["10.3.0"]),
        pasted(INVALID, NAVI22, AMD_TORCH | device_package("gfx1100"),
               says=["device-gfx1031"], never=[OVERRIDE]),
    ],
    16: [
        pasted(INVALID, PHOENIX, says=[f"export {OVERRIDE}=11.0.0"], never=["10.3.0"]),
        pasted(f"{INVALID}\nagent gfx1103", {}, CPU_TORCH, says=["11.0.0"]),
        scene(PHOENIX, says=["11.0.0"]),
    ],
    17: [
        pasted(INVALID, STRIX_HALO, says=["repo.amd.com", f"{OVERRIDE}=11.0.0"], never=["10.3.0"]),
        scene(STRIX_HALO, says=["device-gfx1151"]),
    ],
    18: [
        pasted(INVALID, gpu(1, 90002, 0x15D8, bank_gib=8, simds=44),
               gpu(2, 100302, 0x73FF, bank_gib=8),
               says=["export ROCR_VISIBLE_DEVICES=1"]),
        pasted("device kernel image is invalid", gpu(), RAPHAEL, says=["ROCR_VISIBLE_DEVICES=0"]),
    ],
    19: [
        scene(gpu(), environ={OVERRIDE: "10.3.0"},
              says=[f"unset {OVERRIDE}", "another generation"]),
        scene(gpu(), environ={OVERRIDE: "11.0.0"}, says=["has kernels for gfx1100 itself"]),
        scene(gpu(), environ={f"{OVERRIDE}_1": "10.3.0"}, says=[f"unset {OVERRIDE}_1"]),
        scene(gpu(), environ={OVERRIDE: "gfx1100"}, says=["not a version"]),
        scene(NAVI10, AMD_TORCH, environ={OVERRIDE: "10.3.0"}, says=["no sibling's kernels"]),
        scene(gpu(), platform="windows", environ={OVERRIDE: "11.0.0"}, severity=Severity.WARNING,
              says=["Windows"]),
    ],
    20: [
        pasted("rocBLAS error: Cannot read /opt/rocm-5.7.0/lib/rocblas/library/TensileLibrary.dat: "
               "Illegal seek for GPU arch : gfx1103\n List of available TensileLibrary Files :\n"
               '"/opt/x/TensileLibrary_lazy_gfx1030.dat"\n"/opt/x/TensileLibrary_lazy_gfx1100.dat"',
               {}, says=["gfx1103", f"export {OVERRIDE}=11.0.0"], never=["10.3.0"]),
        pasted("Cannot read C:/x/TensileLibrary.dat: No such file or directory for GPU arch : "
               "gfx1201", {}, says=["gfx1201"], never=[OVERRIDE]),
    ],
    21: [
        scene(gpu(), gpu(2), environ={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
              says=["unset HIP_VISIBLE_DEVICES", "leave 0 of 2"]),
        scene(gpu(), gpu(2), environ={"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"},
              says=["unset CUDA_VISIBLE_DEVICES"], severity=Severity.WARNING),
    ],
    22: [
        scene(environ={"HIP_VISIBLE_DEVICES": "-1"}, says=["unset HIP_VISIBLE_DEVICES"]),
        scene(environ={"ROCR_VISIBLE_DEVICES": ""}, says=["unset ROCR_VISIBLE_DEVICES"]),
        scene(environ={"ROCR_VISIBLE_DEVICES": "7"}, says=["not there", "0: Radeon"]),
        scene(environ={"ROCR_VISIBLE_DEVICES": "0,7"}, severity=Severity.WARNING),
    ],
    23: [
        scene(change={"probe": answered(0)}, says=["counts 0 GPUs"]),
        pasted("RuntimeError: No HIP GPUs are available"),
        pasted("ROCm agents detected: ['gfx1030']\nDevice: None", {}),
    ],
    24: [
        scene(change={"probe": Probe(ended=Ended(status=-6))}, says=["SIGABRT (exit -6)"]),
        scene(change={"probe": Probe(ended=Ended(status=0xC0000005))}, says=["access violation"]),
        scene(change={"probe": Probe(ended=Ended(status=None, seconds=9))}, says=["in 9 s"]),
        scene(change={"selftest": SelfTest(ended=Ended(status=-11))}, says=["SIGSEGV"]),
        pasted("Windows fatal exception: access violation\n  File torch/cuda/__init__.py in "
               "is_available", platform="windows", says=["--device cpu"]),
    ],
    25: [pasted("$ amd-smi list\nERROR: No AMD GPUs found", says=["gfx1100"])],
    26: [
        pasted("HIP out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacty of 7.98 "
               "GiB of which 1.36 GiB is free."),
        pasted("ROCm error: out of memory"),
        pasted("HIP out of memory. Tried to allocate 2.00 MiB (GPU 0; 12.00 GiB total capacity; "
               "312.00 MiB free)", says=["in pieces"]),
    ],
    27: [
        scene(environ={"PYTORCH_HIP_ALLOC_CONF": BOTH}, says=["unset PYTORCH_HIP_ALLOC_CONF"]),
        scene({}, environ={"PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:1"}),
        scene(environ={"PYTORCH_ALLOC_CONF": "max_split_size_mb:1",
                       "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"},
              severity=Severity.WARNING),
        pasted(f"PYTORCH_CUDA_ALLOC_CONF={BOTH}"),
    ],
    28: [
        scene(STRIX_HALO, AMD_TORCH, says=["0.5 GiB", "30.0 GiB", "ttm.pages_limit=12058624"]),
        pasted("HIP out of memory. Tried to allocate 2.00 MiB (GPU 0; 512.00 MiB total capacity; "
               "150.39 MiB already allocated)", PHOENIX, AMD_TORCH, says=["UMA"]),
    ],
    29: [
        scene(STRIX_HALO, {"proc/cmdline": "ro amdgpu.gtt_size=122880 quiet"},
              says=["gtt_size", "ttm.pages_limit=31457280", "amdgpu.gttsize=122880"]),
        pasted("amdgpu: unknown parameter 'gtt_size' ignored"),
        scene(change={"dmesg": "amdgpu: unknown parameter 'gtt_size' ignored"}),
    ],
    30: [
        pasted("Using directml with device:\nTotal VRAM 1024 MB, total RAM 32690 MB"),
        pasted("(privateuseone:0): 0.0 of 0.0 GiB (peak: 0.0 GiB)"),
        scene(gpu(bank_gib=0, vram_gib=0), platform="windows"),
    ],
    31: [
        pasted("RuntimeError: Could not allocate tensor with 377487360 bytes."),
        pasted("[W dml_heap_allocator.cc:120] DML allocator out of memory!"),
        pasted("Exception(1) 8007000E Not enough memory resources are available"),
    ],
    32: [
        pasted("887A0005 The GPU device instance has been suspended."),
        pasted("887A0006 The GPU will not respond to more commands"),
    ],
    33: [
        pasted("Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f."),
        scene({**gpu(), "proc/version": "Linux version 6.18.1-x (a@b)"}, says=["6.17.9"],
              change={"dmesg": "amdgpu: [gfxhub] page fault (src_id:0)"}),
    ],
    34: [
        pasted("modules.devices.NansException: A tensor with all NaNs was produced in VAE."),
        pasted("RuntimeWarning: invalid value encountered in cast"),
    ],
    35: [
        pasted("A tensor with all NaNs was produced in Unet.", says=["--dtype float32"]),
        pasted("only a grey image comes out", NAVI10, AMD_TORCH, says=["gfx1010 is known for it"]),
    ],
    36: [pasted("after torch.compile the latents are NaN"),
         pasted("ONNX fp16 gives a black image")],
    37: [
        pasted("first image takes 40 s", says=["MIOPEN_FIND_MODE=FAST"]),
        scene(environ={"MIOPEN_FIND_MODE": "NORMAL"}, severity=Severity.WARNING),
        scene(environ={"MIOPEN_FIND_ENFORCE": "4"}),
    ],
    38: [
        pasted("MIOpen(HIP): Warning [IsEnoughWorkspace] [EvaluateInvokers] Solver"),
        scene(environ={"PYTORCH_MIOPEN_SUGGEST_NHWC": "1"}),
    ],
    39: [pasted("UserWarning: Attempting to use hipBLASLt on an unsupported architecture!",
                severity=Severity.INFO)],
    40: [
        pasted("Internal error while accessing SQLite database: locking protocol"),
        pasted("MIOpen Error: filesystem error: cannot create directories: Permission denied"),
        scene(change={"folders": (folder(problem="/x is a file", variable="MIOPEN_USER_DB_PATH"),)},
              severity=Severity.FAULT, says=["/x is a file"]),
        scene(change={"folders": (folder(problem="/ cannot be written by this user"),)},
              severity=Severity.WARNING, says=["a folder of its own"]),
        scene(change={"folders": (folder(remote="nfs4"),)}, says=["nfs4"]),
        scene(change={"folders": (folder(free_bytes=5),)}, says=["0 MiB are free"]),
    ],
    41: [
        pasted("SafetensorError: Error while deserializing header: HeaderTooLarge"),
        pasted("incomplete metadata, file not fully covered", says=["head -c 64"]),
    ],
    42: [pasted("UnpicklingError: Weights only load failed.", never=["weights_only=False"])],
    43: [pasted("PermissionError: [Errno 13] Permission denied: '/tmp/gradio/ab'",
                says=["GRADIO_TEMP_DIR"])],
    44: [
        pasted("OSError: [Errno 28] No space left on device", says=["df -h"]),
        scene(change={"folders": (folder(what="sdamd's data", free_bytes=3),)},
              severity=Severity.FAULT),
        scene(change={"folders": (folder(what="sdamd's data", free_bytes=2**29),)},
              severity=Severity.WARNING),
    ],
    45: [
        pasted("[drm] Detected VRAM RAM=98304M, BAR=98304M\ntorch: GPU 0 has a total capacity of "
               "15.24 GiB of which 15.09 GiB is free", STRIX_HALO, says=["15.24", "96.00"]),
        scene(STRIX_HALO, AMD_TORCH, change={"probe": answered(memory=15 * GIB)}),
    ],
    46: [
        pasted(INVALID, gpu(), says=["--selftest"]),
        pasted(INVALID, {}, says=["on the machine that the text is from"]),
        scene(NAVI10, says=["device-gfx1010"], never=[OVERRIDE]),
        pasted(f"{INVALID} gfx803", POLARIS, says=["--device cpu"]),
        pasted(INVALID, gpu(), platform="windows", says=["--device directml"]),
    ],
    47: [scene(POLARIS, CPU_TORCH, says=["gfx803", "--device cpu"], never=[OVERRIDE])],
    48: [
        Scene(files={**machine(), "python/torch/version.py": ""}, change={
            "installed": Installed(executable="/v/python", python=(3, 12))}, says=["/v/python"]),
        scene(change={"probe": Probe(ended=Ended(status=1, err="ImportError: libx.so"))},
              says=["ImportError: libx.so"]),
    ],
    49: [
        scene(UNLISTED_NEW, says=["gfx1201", "KFD"]),
        scene(gpu(), without=["dev/kfd"], says=["/dev/kfd cannot be found"]),
    ],
    50: [
        scene(change={"selftest": selftest(False)}, says=["conv: error 0.1, allowed 0.001"]),
        scene({}, CPU_TORCH, change={"selftest": SelfTest(ended=Ended(status=1, err="Oops"))}),
    ],
    51: [scene(change={"folders": (folder(what="sdamd's data", problem="/x is a file"),)})],
    52: [scene(VFIO, says=["vfio-pci", "lspci -nnk -s 0000:03:00.0"])],
    53: [scene(platform="windows", change={"installed": Installed(
        executable="py", python=(3, 12),
        packages={"onnxruntime": "1.24.4", "onnxruntime-directml": "1.24.4"})})],
    54: [scene(platform="windows", change={"installed": Installed(
        executable="py", python=(3, 12))})],
}  # fmt: skip

SILENT: Mapping[int, Sequence[Scene]] = {
    1: [
        scene(NO_DRIVER, MODULES_WITHOUT, DOCKER),
        scene(VFIO, MODULES_WITHOUT),
        Scene(files=WSL, text=ROCMINFO_WSL),
        scene({}, MODULES_WITHOUT),
    ],
    2: [
        scene(),
        scene(gpu(), DOCKER, OUTSIDE),
        scene({}, STRANGER),
        scene(UNLISTED_OLD),
        Scene(files=WSL, text="Unable to open /dev/kfd read-write: Operation not permitted"),
        scene(without=["proc/self/status"]),
    ],
    3: [scene(), scene(gpu(), STRANGER)],
    4: [scene(gpu(), DOCKER), scene(gpu(), OUTSIDE), scene(gpu(), DOCKER, without=DEVICES)],
    5: [scene(gpu(), DOCKER), scene(without=DEVICES)],
    6: [scene(), scene(gpu(), change={"docker_context": "default"})],
    7: [scene(), scene(UNLISTED_NEW), scene(gpu(), STRANGER), scene(NO_DRIVER)],
    8: [scene(), scene(change={"dmesg": "amdgpu 0000:03:00.0: enabling device"})],
    9: [scene(), scene(gpu(), DOCKER)],
    10: [pasted(ROCMINFO_WSL, {}), Scene(files=WSL)],
    11: [scene(), scene({}, CPU_TORCH), scene(POLARIS, CPU_TORCH), scene(gpu(), CUDA_TORCH),
         scene(gpu(), CPU_TORCH, platform="windows")],
    12: [scene(), scene({}, CUDA_TORCH), scene(gpu(), CPU_TORCH)],
    13: [pasted("No matching distribution found for torch==9.9"), scene()],
    14: [pasted("No matching distribution found for numpy==99", platform="windows"),
         scene(platform="windows",
               change={"installed": Installed(executable="py", python=(3, 11))})],
    15: [
        pasted(INVALID, NAVI21),
        pasted(INVALID, PHOENIX),
        pasted(INVALID, NAVI22, AMD_TORCH | device_package("gfx1031")),
        scene(NAVI22, environ={OVERRIDE: "10.3.0"}),
        scene(NAVI22, environ={f"{OVERRIDE}_1": "10.3.0"}),
        scene(NAVI22, CPU_TORCH),
    ],
    16: [pasted(INVALID, gpu()), pasted(INVALID, NAVI22), scene(PHOENIX, CPU_TORCH),
         pasted(INVALID, gpu(1, 110001, 0x747E, bank_gib=16))],
    17: [pasted(INVALID, PHOENIX), scene(STRIX_HALO, torch("2.13.0+rocm7.2", "7.2.1"))],
    18: [pasted(INVALID, gpu()), pasted(INVALID, gpu(), gpu(2)), scene(gpu(), RAPHAEL)],
    19: [
        scene(),
        scene(NAVI22, environ={OVERRIDE: "10.3.0"}),
        scene(gpu(), NAVI21 | {}, environ={f"{OVERRIDE}_9": "10.3.0"}),
    ],
    20: [pasted("TensileLibrary.dat was read"), scene()],
    21: [scene(environ={"ROCR_VISIBLE_DEVICES": "0"}),
         scene(environ={"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"})],
    22: [scene(environ={"ROCR_VISIBLE_DEVICES": "0"}),
         scene({}, environ={"HIP_VISIBLE_DEVICES": ""}),
         scene(gpu(), gpu(2), environ={"ROCR_VISIBLE_DEVICES": "1,0"})],
    23: [scene(change={"probe": answered(1)}),
         scene(gpu(), STRANGER, change={"probe": answered(0)})],
    24: [scene(change={"probe": answered()}), pasted("Segmentation fault in some editor")],
    25: [pasted("$ amd-smi list\nERROR: No AMD GPUs found", {}), scene()],
    26: [pasted("MemoryError"), pasted("DML allocator out of memory!")],
    27: [
        scene(environ={"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}),
        scene(environ={"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"}),
        scene(environ={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ],
    28: [scene(), scene(gpu(), RAPHAEL),
         scene(gpu(1, 110501, 0x1586, bank_gib=60, vram_gib=0.5, gtt_gib=60), AMD_TORCH)],
    29: [scene(gpu(), {"proc/cmdline": "amdgpu.gttsize=122880"}), scene()],
    30: [scene(platform="windows"), pasted("Total VRAM 12288 MB")],
    31: [pasted("HIP out of memory"), scene()],
    32: [pasted("80070057 The parameter is incorrect."), scene()],
    33: [pasted("page fault in some database"), scene(change={"dmesg": "amdgpu: ring gfx ok"})],
    34: [pasted("A tensor with all NaNs was produced in Unet."), scene()],
    35: [pasted("A tensor with all NaNs was produced in VAE."), scene()],
    36: [pasted("A tensor with all NaNs was produced in VAE."), pasted("torch.compile is slow")],
    37: [scene(), scene(environ={"MIOPEN_FIND_MODE": "2"}),
         scene({}, environ={"MIOPEN_FIND_MODE": "1"})],
    38: [scene(), scene({}, environ={"PYTORCH_MIOPEN_SUGGEST_NHWC": "1"})],
    39: [pasted("hipBLASLt is used"), scene()],
    40: [scene(change={"folders": (folder(),)}), pasted("sqlite3.OperationalError: no such table")],
    41: [pasted("the header of the page is too large"), scene()],
    42: [pasted("loading weights"), scene()],
    43: [pasted("PermissionError: '/tmp/other'"), scene()],
    44: [pasted("[Errno 2] No such file"),
         scene(change={"folders": (folder(what="sdamd's data"),)})],
    45: [
        pasted("GPU 0 has a total capacity of 7.98 GiB", gpu()),
        scene(STRIX_HALO, AMD_TORCH, change={"probe": answered(memory=30 * GIB)}),
    ],
    46: [pasted(INVALID, NAVI22), scene(NAVI22), scene(gpu()), scene(STRIX_HALO)],
    47: [scene(), scene({}), scene(POLARIS, platform="windows")],
    48: [scene(), scene(platform="windows")],
    49: [scene(), scene(UNLISTED_OLD), scene({}),
         Scene(files={n: t for n, t in machine().items() if not n.startswith("dev/")}),
         scene(gpu(), DOCKER, without=["dev/kfd"])],
    50: [scene(change={"selftest": selftest(True)}), scene()],
    51: [scene(), scene(change={"folders": (folder(what="sdamd's data"),)})],
    52: [scene(), scene(NO_DRIVER), scene(gpu(1, 0, 0x6810, driver="radeon", listed=False))],
    53: [scene(platform="windows", change={"installed": Installed(
        executable="py", python=(3, 12), packages={"onnxruntime-directml": "1.24.4"})}),
         scene(gpu(), {"python/onnxruntime-1.24.4.dist-info/METADATA": ""})],
    54: [scene(platform="windows", change={"installed": Installed(
        executable="py", python=(3, 12), packages={"onnxruntime-directml": "1.24.4"})}),
         scene(platform="windows", change={"installed": Installed(
             executable="py", python=(3, 12), known=False)}), scene()],
}  # fmt: skip


def rows(table: Mapping[int, Sequence[Scene]]) -> list[Any]:
    return [
        pytest.param(number, scene, id=f"{number}-{place}")
        for number, scenes in table.items()
        for place, scene in enumerate(scenes)
    ]


def found_in(root: Path, number: int, scene: Scene) -> Finding | None:
    seen = surveyed(root, scene.files, scene.platform, **scene.environ)
    return fired(diagnose(replace(seen, **scene.change), scene.text), number)


@pytest.mark.parametrize(("number", "scene"), rows(FIRES))
def test_a_rule_fires_where_it_must(tmp_path: Path, number: int, scene: Scene) -> None:
    finding = found_in(tmp_path, number, scene)
    assert finding is not None
    words = f"{finding.reading} | {finding.cause} | {finding.fix}"
    assert finding.source
    for text in scene.says:
        assert text in words
    for text in (*scene.never, "chmod"):
        assert text not in words
    assert not re.search(r"\{[a-z_]+\}|\bNone\b", words.replace("Device: None", ""))
    if scene.severity is not None:
        assert finding.severity is scene.severity


@pytest.mark.parametrize(("number", "scene"), rows(SILENT))
def test_a_rule_is_silent_where_it_must_be(tmp_path: Path, number: int, scene: Scene) -> None:
    assert found_in(tmp_path, number, scene) is None


def test_every_rule_has_both_cases() -> None:
    numbers = {rule.number for rule in RULES}
    assert numbers >= set(range(1, 45))
    assert numbers == set(FIRES) == set(SILENT)
    assert all(FIRES[number] and SILENT[number] for number in numbers)
    assert len({rule.name for rule in RULES}) == len(RULES) == len(numbers)
