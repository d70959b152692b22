"""Public bug reports about machines, errors and speed, each against what doctor says to it.

What a report calls for beyond a diagnosis (retries, tiles, dtypes) is proven where that is done.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sdamd.errors import HardwareError
from sdamd.hardware.child import Ended
from sdamd.hardware.doctor import Diagnosis, diagnose
from sdamd.hardware.installed import Installed
from sdamd.hardware.rules.rule import Severity
from sdamd.hardware.runtime import AMD_ROCM714, PYTORCH_ROCM64, override_for
from sdamd.hardware.survey import survey
from sdamd.hardware.torch_probe import Check, Device, Probe, SelfTest
from tests.hardware.made import (
    AMD_TORCH,
    CPU_TORCH,
    CUDA_TORCH,
    DEVICES,
    GIB,
    LINUX,
    MACHINES,
    NODES,
    RAPHAEL,
    WSL,
    examined,
    faults,
    fired,
    gpu,
    machine,
    surveyed,
    torch,
    write,
)

INVALID = "RuntimeError: HIP error: invalid device function"
STRIX_HALO = gpu(1, 110501, 0x1586, bank_gib=96, vram_gib=15.5, gtt_gib=96, simds=80)


def words(diagnosis: Diagnosis) -> str:
    found = (*diagnosis.recognised, *diagnosis.findings)
    return "\n".join(f"{f.reading}\n{f.cause}\n{f.fix}" for f in found)


def rules(diagnosis: Diagnosis) -> list[int]:
    return [finding.rule for finding in diagnosis.recognised]


# -- A: detection and installation ---------------------------------------------------------------


@pytest.mark.report("A01")
@pytest.mark.parametrize("swapped", [False, True])
def test_a01_the_card_is_chosen_and_the_mask_counts_as_kfd_does(
    tmp_path: Path, swapped: bool
) -> None:
    card, igpu = (2, 1) if swapped else (1, 2)
    files = machine(
        gpu(card, 100302, 0x73FF, bank_gib=8),
        gpu(igpu, 100306, 0x164E, bank_gib=15, vram_gib=0.5, gtt_gib=15, simds=4),
    )
    told = examined(tmp_path, files).to_dict()
    assert told["selected"] == card - 1
    assert told["mask"] == {"ROCR_VISIBLE_DEVICES": str(card - 1)}


@pytest.mark.report("A03")
def test_a03_the_wrong_gpu_is_said_before_an_unsupported_one(tmp_path: Path) -> None:
    files = machine(gpu(1, 90002, 0x15D8, bank_gib=8), gpu(2, 100302, 0x73FF, bank_gib=8))
    found = rules(examined(tmp_path, files, INVALID))
    assert found[0] == 18
    assert set(found[1:]) <= {15}


@pytest.mark.report("A04")
def test_a04_a_gpu_is_found_without_tools_and_without_gpu_id(tmp_path: Path) -> None:
    root = write(tmp_path, machine(gpu(1), gpu(2, 120001, 0x7550), {f"{NODES}/1/gpu_id": "7"}))
    (root / NODES / "1/gpu_id").chmod(0)
    assert len(diagnose(survey(root, "linux", {"PATH": ""})).survey.detection.gpus) == 2


@pytest.mark.report("A06")
@pytest.mark.parametrize(
    ("version", "arch"), [(90010, "gfx90a"), (90402, "gfx942"), (110501, "gfx1151")]
)
def test_a06_the_target_is_read_from_its_line(tmp_path: Path, version: int, arch: str) -> None:
    (found,) = examined(tmp_path, machine(gpu(1, version, 0))).survey.detection.gpus
    assert found.arch == arch


@pytest.mark.report("A07")
def test_a07_an_override_for_one_card_is_a_fault_for_the_other(tmp_path: Path) -> None:
    files = machine(gpu(1, 110000), gpu(2, 100300, 0x73BF, bank_gib=16))
    assert fired(examined(tmp_path, files), 19) is None
    finding = fired(examined(tmp_path, files, HSA_OVERRIDE_GFX_VERSION="10.3.0"), 19)
    assert finding is not None
    assert finding.severity is Severity.FAULT
    assert finding.fix == "unset HSA_OVERRIDE_GFX_VERSION"


@pytest.mark.report("A09")
@pytest.mark.parametrize(("version", "fires"), [(100301, True), (100300, False)])
def test_a09_kernels_of_gfx1030_alone(tmp_path: Path, version: int, fires: bool) -> None:
    archs = frozenset({"gfx900", "gfx906", "gfx1030", "gfx1100"})
    probe = Probe(ended=Ended(status=0), answered=True, version="2", hip="6.0", device_count=1,
                  archs=archs)  # fmt: skip
    seen = surveyed(tmp_path, machine(gpu(1, version, 0), torch("2.4.1+rocm6.0", "6.0")))
    finding = fired(diagnose(replace(seen, probe=probe)), 15)
    assert (finding is not None) is fires
    if finding:
        assert finding.fix == "export HSA_OVERRIDE_GFX_VERSION=10.3.0"


@pytest.mark.report("A09")
def test_a09_a_probe_that_is_killed_is_reported(tmp_path: Path) -> None:
    seen = surveyed(tmp_path, machine())
    assert faults(diagnose(replace(seen, probe=Probe(ended=Ended(status=-6))))) == [24]


@pytest.mark.report("A10")
@pytest.mark.parametrize(
    ("version", "value"), [(100301, "10.3.0"), (110003, "11.0.0"), (110501, "11.0.0")]
)
def test_a10_the_stand_in_is_of_the_same_generation(
    tmp_path: Path, version: int, value: str
) -> None:
    said = words(examined(tmp_path, machine(gpu(1, version, 0)), INVALID))
    assert f"HSA_OVERRIDE_GFX_VERSION={value}" in said
    other = {"10.3.0": "11.0.0", "11.0.0": "10.3.0"}[value]
    assert f"HSA_OVERRIDE_GFX_VERSION={other}" not in said


TENSILE = """\
rocBLAS error: Cannot read /opt/rocm-5.7.0/lib/rocblas/library/TensileLibrary.dat: Illegal seek \
for GPU arch : gfx1103
 List of available TensileLibrary Files :
"/opt/rocm-5.7.0/lib/rocblas/library/TensileLibrary_lazy_gfx900.dat"
"/opt/rocm-5.7.0/lib/rocblas/library/TensileLibrary_lazy_gfx1030.dat"
"/opt/rocm-5.7.0/lib/rocblas/library/TensileLibrary_lazy_gfx1100.dat"
"""


@pytest.mark.report("A11")
def test_a11_rocblas_without_kernels(tmp_path: Path) -> None:
    finding = fired(examined(tmp_path, MACHINES["cpu-only"], TENSILE), 20)
    assert finding is not None
    assert "gfx1103" in finding.cause
    assert finding.fix == "export HSA_OVERRIDE_GFX_VERSION=11.0.0"


@pytest.mark.report("A13")
@pytest.mark.parametrize(
    "text",
    ["Unable to open /dev/kfd read-write: Cannot allocate memory",
     "kfd kfd: amdgpu: PITCAIRN  not supported in kfd"],
)  # fmt: skip
def test_a13_an_old_gpu_is_no_matter_of_rights(tmp_path: Path, text: str) -> None:
    diagnosis = examined(tmp_path, MACHINES["pitcairn"], text)
    assert rules(diagnosis) == [7]
    assert not any(word in words(diagnosis) for word in ("usermod", "chmod", "render"))
    assert faults(diagnosis) == [7]


@pytest.mark.report("A13")
def test_a13_atomics(tmp_path: Path) -> None:
    text = "kfd kfd: skipped device 1002:67df, PCI rejects atomics"
    assert rules(examined(tmp_path, MACHINES["cpu-only"], text)) == [8]


@pytest.mark.report("A14")
@pytest.mark.parametrize(
    ("name", "group", "fix"),
    [
        ("render", "render:x:9999:", "sudo usermod -aG render,video $USER"),
        ("old session", "render:x:9999:alice", "log out"),
        ("not called render", "amdgpu:x:9999:", "sudo usermod -aG amdgpu,video $USER"),
        ("root", "root:x:9999:", "sudo udevadm trigger"),
        ("docker", "docker:x:9999:", "sudo udevadm trigger"),
    ],
)
def test_a14_the_group_that_owns_the_file_decides(
    tmp_path: Path, name: str, group: str, fix: str
) -> None:
    files = machine(gpu(), {"etc/group": f"{group}\n", "dev/kfd": "660 0 9999"})
    (finding, *_) = examined(tmp_path, files).findings
    assert finding.fix.startswith(fix)
    assert "(9999)" in finding.reading


@pytest.mark.report("A15")
def test_a15_the_number_of_the_group_counts(tmp_path: Path) -> None:
    inside = {"etc/group": "render:x:992:user\nvideo:x:44:user\n", ".dockerenv": "",
              "proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t44 992\n"}  # fmt: skip
    diagnosis = examined(tmp_path, machine(gpu(), inside), "No HIP GPUs are available")
    finding = fired(diagnosis, 4)
    assert finding is not None
    assert "--group-add 105" in finding.fix
    assert "chmod" not in words(diagnosis)


@pytest.mark.report("A17")
@pytest.mark.parametrize("without", [DEVICES, ("dev/kfd",)])
def test_a17_a_container_without_devices_gets_its_command(
    tmp_path: Path, without: tuple[str, ...]
) -> None:
    finding = fired(examined(tmp_path, machine(gpu(), {".dockerenv": ""}, without=without)), 5)
    assert finding is not None
    assert finding.fix.startswith("docker run --device=/dev/kfd --device=/dev/dri --group-add")
    assert "seccomp=unconfined" in finding.fix


@pytest.mark.report("A18")
def test_a18_wsl_is_told_of_nothing_that_it_has_not(tmp_path: Path) -> None:
    text = "ROCk module is NOT loaded, possibly no GPU devices"
    diagnosis = examined(tmp_path, WSL, text)
    assert rules(diagnosis) == [10]
    assert faults(diagnosis) == [9]
    assert not any(w in words(diagnosis) for w in ("modprobe", "usermod", "render group"))


@pytest.mark.report("A19", "A20")
@pytest.mark.parametrize(
    ("build", "said"), [(CPU_TORCH, "torch 2.13.0+cpu"), (CUDA_TORCH, "torch 2.13.0+cu128")]
)
def test_a19_another_build_of_torch_is_named_with_its_python(
    tmp_path: Path, build: dict[str, str], said: str
) -> None:
    diagnosis = examined(tmp_path, machine(gpu(), build))
    (finding,) = diagnosis.findings
    assert finding.reading.startswith(f"{said} in python3 is built for")
    assert finding.fix == (
        "python3 -m pip install --force-reinstall torch==2.9.1+rocm6.4 --index-url "
        "https://download.pytorch.org/whl/rocm6.4"
    )
    assert diagnosis.faulty


@pytest.mark.report("A20")
def test_a20_a_pair_that_never_was_is_replaced_by_one_that_is(tmp_path: Path) -> None:
    text = "ERROR: No matching distribution found for torch==2.4.1+rocm5.6"
    finding = fired(examined(tmp_path, machine(), text), 13)
    assert finding is not None
    assert PYTORCH_ROCM64.torch in finding.fix


@pytest.mark.report("A22")
@pytest.mark.parametrize("python", [(3, 13), (3, 14), (3, 15)])
def test_a22_the_python_to_install_is_named(tmp_path: Path, python: tuple[int, int]) -> None:
    seen = surveyed(tmp_path, machine(), "windows")
    seen = replace(seen, installed=Installed(executable="py", python=python))
    text = "ERROR: No matching distribution found for torch-directml"
    finding = fired(diagnose(seen, text), 14)
    assert finding is not None
    assert "3.11 to 3.14" in finding.cause
    assert finding.fix == "py -3.12 -m venv .venv"


@pytest.mark.report("A24")
def test_a24_leftovers_of_cuda_decide_nothing(tmp_path: Path) -> None:
    files = machine(gpu(1, 100304, 0x743F, bank_gib=4), AMD_TORCH)
    diagnosis = examined(tmp_path, files, CUDA_HOME="/usr/local/cuda", CUDA_PATH="/x")
    assert diagnosis.selected is not None
    assert diagnosis.selected.arch == "gfx1034"


@pytest.mark.report("A25")
@pytest.mark.parametrize(
    ("masks", "rule", "fix"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 21,
         "unset HIP_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, 21,
         "unset HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": ""}, 22, "unset HIP_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 22, "unset CUDA_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000ff"}, 22, "unset ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "9"}, 22, "unset ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000002"}, None, ""),
    ],
)  # fmt: skip
def test_a25_masks(tmp_path: Path, masks: dict[str, str], rule: int | None, fix: str) -> None:
    files = machine(gpu(1, unique_id=1), gpu(2, unique_id=2))
    diagnosis = examined(tmp_path, files, **masks)
    assert faults(diagnosis) == ([] if rule is None else [rule])
    assert [f.fix for f in diagnosis.findings] == ([fix] if fix else [])


@pytest.mark.report("A27")
def test_a27_windows_takes_the_card_and_not_adapter_0(tmp_path: Path) -> None:
    igpu = gpu(1, 100306, 0x164E, bank_gib=15, vram_gib=0.5, gtt_gib=15, simds=4)
    diagnosis = examined(tmp_path, machine(igpu, gpu(2)), platform="windows")
    assert diagnosis.selected is not None
    assert diagnosis.selected.index == 1


@pytest.mark.report("A31")
def test_a31_a_display_controller_is_a_gpu(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, MACHINES["hybrid-laptop"])
    (pci, *_) = diagnosis.steps
    assert pci.ok
    assert pci.reading.endswith(" at 0000:03:00.0")
    assert "," not in pci.reading


@pytest.mark.report("A34")
def test_a34_a_guess_is_called_one(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, machine(gpu(1, 0, 0x744C)))
    (remark,) = diagnosis.survey.detection.remarks
    assert "is a guess" in remark


# -- B: memory -----------------------------------------------------------------------------------

OUT_OF_MEMORY = (
    ("HIP out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacty of 7.98 GiB", 26),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.12 GiB.", 26),
    ("torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB (GPU 0; 8.00 GiB "
     "total capacity; 150.39 MiB already allocated; 312.00 MiB free)", 26),
    ("CUDA out of memory. Tried to allocate 10.25 GiB.", 26),
    ("ROCm error: out of memory", 26),
    ("RuntimeError: Could not allocate tensor with 377487360 bytes. There is not enough GPU", 31),
    ("[W dml_heap_allocator.cc:120] DML allocator out of memory!", 31),
    ("BucketizedBufferAllocator.cpp(122): (caller: 00007FFA) Exception(1) 8007000E Not enough", 31),
)  # fmt: skip


@pytest.mark.report("B01", "B09", "B10")
@pytest.mark.parametrize(("text", "rule"), OUT_OF_MEMORY)
def test_b01_every_spelling_of_out_of_memory_is_known(tmp_path: Path, text: str, rule: int) -> None:
    assert rules(examined(tmp_path, machine(), text)) == [rule]


@pytest.mark.report("B03")
def test_b03_an_apu_is_shown_with_both_sizes(tmp_path: Path) -> None:
    files = machine(gpu(1, 100305, 0x1681, bank_gib=15.25, vram_gib=0.5, gtt_gib=15.25, simds=24),
                    AMD_TORCH)  # fmt: skip
    finding = fired(examined(tmp_path, files), 28)
    assert finding is not None
    assert "0.5 GiB" in finding.reading
    assert "15.2 GiB" in finding.reading
    assert "BIOS" in finding.fix


@pytest.mark.report("B04", "B06")
def test_b04_torch_that_counts_short_is_said(tmp_path: Path) -> None:
    device = Device(name="Radeon 8060S", gfx="gfx1151", memory_bytes=int(15.49 * GIB))
    probe = Probe(ended=Ended(status=0), answered=True, version="2", hip="6.4", device_count=1,
                  archs=frozenset({"gfx1151"}), devices=(device,))  # fmt: skip
    seen = replace(surveyed(tmp_path, machine(STRIX_HALO, AMD_TORCH)), probe=probe)
    finding = fired(diagnose(seen), 45)
    assert finding is not None
    assert finding.reading == "torch counts 15.49 GiB of memory, and the kernel's files 96.00 GiB"


@pytest.mark.report("B06")
def test_b06_the_kernels_log_against_torch(tmp_path: Path) -> None:
    text = (
        "amdgpu 0000:c5:00.0: amdgpu: VRAM: 98304M 0x0000008000000000\n"
        "torch: GPU 0 has a total capacity of 15.24 GiB of which 15.09 GiB is free"
    )
    finding = fired(examined(tmp_path, MACHINES["cpu-only"], text), 45)
    assert finding is not None
    assert finding.reading == "torch counts 15.24 GiB of memory, and the kernel's log 96.00 GiB"


@pytest.mark.report("B07")
def test_b07_a_mistyped_parameter_is_put_right(tmp_path: Path) -> None:
    line = "BOOT_IMAGE=/boot/vmlinuz-6.14.0-1014-oem ro quiet splash amdgpu.gtt_size=122880"
    finding = fired(examined(tmp_path, machine(STRIX_HALO, {"proc/cmdline": line})), 29)
    assert finding is not None
    assert "amdgpu.gtt_size=122880" in finding.reading
    assert "ttm.pages_limit=31457280" in finding.fix
    assert "amdgpu.gttsize=122880" in finding.cause


@pytest.mark.report("B08")
@pytest.mark.parametrize("text", ["Using directml with device:\nTotal VRAM 1024 MB, total RAM 1 MB",
                                  "(privateuseone:0): 0.0 of 0.0 GiB (peak: 0.0 GiB)"])  # fmt: skip
def test_b08_an_unknown_size_is_no_error(tmp_path: Path, text: str) -> None:
    diagnosis = examined(tmp_path, machine(), text, "windows")
    assert rules(diagnosis) == [30]
    assert not diagnosis.faulty


@pytest.mark.report("B14")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
                                  "PYTORCH_CUDA_ALLOC_CONF"])  # fmt: skip
@pytest.mark.parametrize(
    "value",
    ["max_split_size_mb:128,expandable_segments:True",
     "expandable_segments:True,max_split_size_mb:128",
     "Expandable_Segments:TRUE , garbage_collection_threshold:0.8, MAX_SPLIT_SIZE_MB:128"],
)  # fmt: skip
def test_b14_allocator_options_that_corrupt_memory(tmp_path: Path, name: str, value: str) -> None:
    diagnosis = examined(tmp_path, machine(), **{name: value})
    assert faults(diagnosis) == [27]
    assert diagnosis.findings[0].fix == f"unset {name}"


# -- C: wrong pictures, faults -------------------------------------------------------------------


@pytest.mark.report("C01", "C02", "C03", "C04", "C06")
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("A tensor with all NaNs was produced in VAE.", 34),
        ("A tensor with all NaNs was produced in Unet.", 35),
        ("black images, then RuntimeWarning: invalid value encountered in cast", 34),
        ("a grey screen unless --no-half", 35),
        ("onnx fp16: the UNet output is NaN", 36),
    ],
)
def test_c02_where_a_picture_went_wrong_decides(tmp_path: Path, text: str, rule: int) -> None:
    assert rules(examined(tmp_path, machine(), text)) == [rule]


@pytest.mark.report("C15")
def test_c15_a_device_that_computes_wrong_is_named_with_its_number(tmp_path: Path) -> None:
    checks = (
        Check(name="conv", ok=False, reading="error 0.1, allowed 0.001"),
        Check(name="gemm", ok=True, reading="error 0, allowed 0.001"),
    )
    test = SelfTest(ended=Ended(status=3), device="Radeon RX 570", checks=checks)
    diagnosis = diagnose(replace(surveyed(tmp_path, machine()), selftest=test))
    assert faults(diagnosis) == [50]
    assert "conv: error 0.1, allowed 0.001" in diagnosis.findings[0].reading
    assert "gemm" not in diagnosis.findings[0].reading
    good = replace(test, ended=Ended(status=0), checks=checks[1:])
    healthy = diagnose(replace(surveyed(tmp_path, machine()), selftest=good))
    assert healthy.verdict == "Healthy: Radeon (Navi 31) computes, and its numbers are right"


@pytest.mark.report("C18")
def test_c18_a_fault_of_the_gpu_is_known_with_its_kernel(tmp_path: Path) -> None:
    text = "Memory access fault by GPU node-1 (Agent handle: 0x55ac) on address 0x7f95. Reason: x"
    finding = fired(examined(tmp_path, machine(), text), 33)
    assert finding is not None
    assert LINUX["proc/version"].split()[2] in finding.cause
    for text in ("887A0005 The GPU device instance has been suspended.", "887A0006 The GPU will"):
        assert rules(examined(tmp_path, machine(), text, "windows")) == [32]


# -- D: slow -------------------------------------------------------------------------------------


@pytest.mark.report("D01", "D04")
def test_d01_a_slow_first_picture_is_explained(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, machine(), "first image takes 24 s, the next 1 s: it hangs?")
    assert rules(diagnosis) == [37]
    assert diagnosis.recognised[0].fix == "export MIOPEN_FIND_MODE=FAST"


@pytest.mark.report("D03")
@pytest.mark.parametrize("arch", ["gfx110", "gfx11000", "gfx1201x", "gfx"])
def test_d03_an_architecture_is_itself_and_not_a_part_of_another(arch: str) -> None:
    for wheel in (PYTORCH_ROCM64, AMD_ROCM714):
        with pytest.raises(HardwareError, match="no kernels for"):
            override_for(arch, wheel.archs)


@pytest.mark.report("D06")
def test_d06_a_harmless_warning_is_called_harmless(tmp_path: Path) -> None:
    for line in (
        "[W1016 17:27:46 Context.cpp:301] Warning: Attempting to use hipBLASLt on an unsupported "
        "architecture! Overriding blas backend to hipblas (function operator())",
        "UserWarning: Attempting to use hipBLASLt on an unsupported architecture! Overriding",
    ):
        diagnosis = examined(tmp_path, machine(), line)
        assert rules(diagnosis) == [39]
        assert not diagnosis.faulty


@pytest.mark.report("D07")
@pytest.mark.parametrize(
    "text",
    [
        "MIOpen(HIP): Warning [SQLiteBase] Unable to read system database file:/opt/x.kdb",
        'boost::filesystem::permissions: No such file or directory: "/h/gfx906_60.HIP.ufdb.txt"',
        "kern_db.hpp:147: Internal error while accessing SQLite database: disk image is malformed",
        "Internal error while accessing SQLite database: locking protocol",
        "MIOpen Error: filesystem error: cannot create directories: Permission denied [/tmp/m]",
    ],
)
def test_d07_a_cache_that_fails_is_known(tmp_path: Path, text: str) -> None:
    finding = fired(examined(tmp_path, machine(), text), 40)
    assert finding is not None
    assert "MIOPEN_USER_DB_PATH=" in finding.fix


@pytest.mark.report("D07")
@pytest.mark.parametrize("name", ["MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"])
def test_d07_a_cache_that_is_a_file_is_said_before_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    seen = survey(environ={**os.environ, name: str(tmp_path / "file")})
    finding = fired(diagnose(seen), 40)
    assert finding is not None
    assert f"{tmp_path / 'file'} is a file" in finding.reading


# -- E and F: what doctor knows of them ----------------------------------------------------------


@pytest.mark.report("E17", "E18", "E23", "E25")
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("SafetensorError: Error while deserializing header: HeaderTooLarge", 41),
        ("Error while deserializing header: header too large", 41),
        ("incomplete metadata, file not fully covered", 41),
        ("_pickle.UnpicklingError: Weights only load failed.", 42),
        ("OSError: [Errno 28] No space left on device", 44),
        ("PermissionError: [Errno 13] Permission denied: '/tmp/gradio/1a'", 43),
    ],
)
def test_texts_about_files_are_known(tmp_path: Path, text: str, rule: int) -> None:
    assert rules(examined(tmp_path, machine({}, CPU_TORCH, without=DEVICES), text)) == [rule]


def test_the_igpu_of_a_desktop_changes_nothing_about_the_card(tmp_path: Path) -> None:
    assert examined(tmp_path, machine(gpu(), RAPHAEL)).findings == ()
