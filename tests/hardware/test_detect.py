import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sdamd.errors import BadRequest, HardwareError
from sdamd.hardware.detect import Detection, detect, pick
from sdamd.hardware.windows import Adapter, Readings

NODES = "sys/class/kfd/kfd/topology/nodes"
DEVICES = {"dev/kfd": "", "dev/dri/renderD128": "", "dev/dri/renderD129": ""}
GIB = 2**30

Build = Callable[[Mapping[str, str]], Path]
Node = Callable[..., str]
Sections = Callable[[str], dict[str, str]]


def everything(_: Path, __: int) -> bool:
    return True


def nothing(_: Path, __: int) -> bool:
    return False


def on_linux(root: Path, **environ: str) -> Detection:
    return detect(root, "linux", environ, access=everything)


def two_nodes(gpu_node: Node, first: int, second: int, *sizes: int) -> dict[str, str]:
    """KFD nodes 1 and 2 with these target versions, and memory in GiB."""
    files = dict(DEVICES)
    for number, version in enumerate((first, second), 1):
        node = f"{NODES}/{number}"
        files[f"{node}/properties"] = gpu_node(version, wave_front_size=32, unique_id=number)
        size = (sizes or (16, 16))[number - 1] * GIB
        files[f"{node}/mem_banks/0/properties"] = f"heap_type 1\nsize_in_bytes {size}\n"
    return files


RECORDED = sorted(
    p.parent.name for p in Path(__file__).parents[1].glob("data/machines/*/expected.json")
)


@pytest.mark.parametrize("machine", RECORDED)
def test_a_recorded_machine_gives_what_is_expected_of_it(machines: Path, machine: str) -> None:
    root = machines / machine
    expected = json.loads((root / "expected.json").read_text(encoding="utf-8"))
    found = on_linux(root)
    assert found.platform == expected["platform"]
    assert len(found.gpus) == len(expected["gpus"])
    if "preferred_hip_index" in expected:
        assert found.preferred is not None
        assert found.preferred.index == expected["preferred_hip_index"]
    if "rocm_supported" in expected:
        architecture = found.gpus[0].architecture
        assert architecture is not None
        assert architecture.rocm is expected["rocm_supported"]


def test_the_card_is_chosen_and_the_igpu_hidden(build: Build, sections: Sections) -> None:
    """A01: the mask counts as KFD does, not as card0 and card1."""
    found = on_linux(build(sections("A01.txt") | DEVICES))
    assert found.preferred is not None
    assert (found.preferred.arch, found.preferred.card) == ("gfx1032", "card1")
    assert found.mask == {"ROCR_VISIBLE_DEVICES": "0"}
    assert found.reason == (
        "Radeon (Navi 23) is the discrete card (8.0 GiB), Radeon Graphics (Raphael) (gfx1036) is "
        "integrated"
    )


def test_the_choice_stays_when_the_order_of_the_nodes_changes(
    build: Build, sections: Sections
) -> None:
    """A01."""
    files = sections("A01.txt") | DEVICES
    swap = str.maketrans("12", "21")
    swapped = {
        f"{head}{nodes}{tail[0].translate(swap)}{tail[1:]}" if nodes else path: text
        for path, text in files.items()
        for head, nodes, tail in [path.partition(f"{NODES}/")]
    }
    found = on_linux(build(swapped))
    assert found.preferred is not None
    assert (found.preferred.arch, found.preferred.index) == ("gfx1032", 1)
    assert found.mask == {"ROCR_VISIBLE_DEVICES": "1"}


def test_a_card_goes_before_an_apu_of_another_generation(build: Build, gpu_node: Node) -> None:
    """A03: a Ryzen 3400G beside an RX 6600, on which HIP took the APU."""
    found = on_linux(build(two_nodes(gpu_node, 90002, 100302, 32, 8)))
    assert found.preferred is not None
    assert found.preferred.arch == "gfx1032"
    assert found.mask == {"ROCR_VISIBLE_DEVICES": "1"}
    assert "gfx902" in found.notes[0]


@pytest.mark.parametrize(
    ("first", "second", "sizes", "index"),
    [
        (110000, 110002, (24, 8), 0),
        (110002, 110000, (8, 24), 1),
        (110501, 110002, (120, 8), 1),  # an APU with much RAM beside a small card
        (80003, 100302, (8, 8), 1),  # one without kernels beside one with
        (80003, 110003, (8, 32), 1),  # the same beside an APU that can compute
        (110000, 110000, (24, 24), 0),
        (130000, 100302, (16, 8), 0),  # newer than the table
    ],
)
def test_the_best_gpu_is_chosen_wherever_it_stands(
    build: Build, gpu_node: Node, first: int, second: int, sizes: tuple[int, int], index: int
) -> None:
    found = on_linux(build(two_nodes(gpu_node, first, second, *sizes)))
    assert found.preferred is not None
    assert found.preferred.index == index
    assert found.mask == {"ROCR_VISIBLE_DEVICES": str(index)}


@pytest.mark.parametrize("simds", [4, 64])
def test_the_igpu_of_a_desktop_never_stands_in_for_a_card(
    build: Build, gpu_node: Node, simds: int
) -> None:
    files = two_nodes(gpu_node, 80003, 100306, 8, 16)
    files[f"{NODES}/2/properties"] = gpu_node(100306, simd_count=simds)
    found = on_linux(build(files))
    assert found.preferred is None
    assert found.reason == (
        "no current ROCm build has kernels for Radeon (Polaris / Fiji) (gfx803), and "
        "Radeon (Raphael / Granite Ridge) (gfx1036) can only drive a desktop"
    )


def test_the_reason_compares_cards_with_cards(build: Build, gpu_node: Node) -> None:
    files = two_nodes(gpu_node, 110000, 110002, 24, 8)
    files[f"{NODES}/3/properties"] = gpu_node(110501, simd_count=80)
    files[f"{NODES}/3/mem_banks/0/properties"] = f"heap_type 1\nsize_in_bytes {120 * GIB}\n"
    reason = on_linux(build(files)).reason
    assert reason.endswith("(24.0 GiB): none of the 2 discrete cards has more memory")


def test_an_apu_alone_is_chosen(machines: Path) -> None:
    found = on_linux(machines / "strix-halo")
    assert found.preferred is not None
    assert found.preferred.is_apu
    assert (found.mask, found.notes) == ({}, ())
    assert found.reason == "Radeon 8060S is the only GPU that can be used"


def test_a_desktop_igpu_alone_is_chosen_with_a_warning(build: Build, gpu_node: Node) -> None:
    files = {f"{NODES}/1/properties": gpu_node(100306, 0x164E, simd_count=4)}
    found = on_linux(build(files | DEVICES))
    assert found.preferred is not None
    assert "the CPU may be faster" in found.notes[0]


def test_a_card_without_kernels_is_named_and_not_chosen(machines: Path) -> None:
    """A13: KFD lists the RX 580, and no current ROCm build can use it."""
    found = on_linux(machines / "rx580")
    assert (found.preferred, found.mask) == (None, {})
    assert found.reason == "no current ROCm build has kernels for Radeon RX 580 (gfx803)"
    assert found.notes == (
        "Radeon RX 580 (gfx803) is not supported: no current ROCm build has kernels for it",
    )


def test_a_card_that_kfd_leaves_out_is_not_a_matter_of_rights(build: Build) -> None:
    """A13: opening /dev/kfd fails with ENOMEM, and joining a group would not help."""
    device = "sys/class/drm/card0/device"
    files = {
        f"{device}/vendor": "0x1002",
        f"{device}/device": "0x6810",
        f"{device}/class": "0x030000",
        f"{device}/uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:01:00.0\n",
    }
    found = detect(build(files | DEVICES), "linux", {}, access=nothing)
    assert found.preferred is None
    assert [gpu.pci for gpu in found.unlisted] == ["0000:01:00.0"]
    assert found.reason == "AMD GPU 1002:6810 cannot be used, as the notes say"
    assert not any(word in " ".join(found.notes) for word in ("render", "group", "/dev/kfd"))


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("10.3.0", "run code for gfx1030, which is another generation; unset it"),
        ("9.0.0", "run code for gfx900"),
        ("11.0.0", None),
        (None, None),
        ("gfx1030", "allowed is a version like 10.3.0"),
        ("", "allowed is a version like 10.3.0"),
    ],
)
def test_an_override_is_judged_by_the_chosen_card(
    build: Build, gpu_node: Node, override: str | None, note: str | None
) -> None:
    """A07: 10.3.0 was set for a Navi 21 and broke the Navi 31 beside it."""
    environ = {} if override is None else {"HSA_OVERRIDE_GFX_VERSION": override}
    found = on_linux(build(two_nodes(gpu_node, 100300, 110000, 16, 24)), **environ)
    assert found.preferred is not None
    assert found.preferred.arch == "gfx1100"
    assert not found.notes if note is None else note in found.notes[0]


def test_an_override_for_another_node_is_no_fault(build: Build, gpu_node: Node) -> None:
    """A07: each node can have its own."""
    root = build(two_nodes(gpu_node, 100300, 110000, 16, 24))
    assert on_linux(root, HSA_OVERRIDE_GFX_VERSION_1="10.3.0").notes == ()
    (note,) = on_linux(root, HSA_OVERRIDE_GFX_VERSION_2="10.3.0").notes
    assert note.startswith("HSA_OVERRIDE_GFX_VERSION_2=10.3.0")


def test_missing_rights_on_kfd_are_said_with_the_number_of_its_group(machines: Path) -> None:
    """A14, A15: the number of the group counts, not its name; the rights are never widened."""
    root = machines / "rx6600"
    asked = []

    def refuse(path: Path, mode: int) -> bool:
        asked.append((path, mode))
        return False

    found = detect(root, "linux", {}, access=refuse)
    assert asked == [(root / "dev/kfd", os.R_OK | os.W_OK)]
    assert found.preferred is not None
    (note,) = found.notes
    assert "may not open /dev/kfd for reading and writing" in note
    assert f"group with number {(root / 'dev/kfd').stat().st_gid}" in note
    assert "chmod" not in note


@pytest.mark.parametrize(
    ("remove", "container", "note"),
    [
        (("dev/kfd",), False, "/dev/kfd cannot be found, which ROCm needs"),
        (("dev/dri",), False, "/dev/dri cannot be found, which ROCm needs"),
        (
            ("dev/kfd", "dev/dri"),
            True,
            "/dev/kfd and /dev/dri cannot be found in this container, which ROCm needs; "
            "start it with --device=/dev/kfd --device=/dev/dri",
        ),
        (
            ("dev/kfd",),
            True,
            "/dev/kfd cannot be found in this container, which ROCm needs; "
            "start it with --device=/dev/kfd --device=/dev/dri",
        ),
    ],
)
def test_device_files_that_a_container_lacks_are_named(
    machines: Path, tmp_path: Path, remove: tuple[str, ...], container: bool, note: str
) -> None:
    """A17: the kernel's files show the GPU, but its device files were not passed in."""
    root = tmp_path / "machine"
    shutil.copytree(machines / "rx6600", root)
    for name in remove:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if container:
        (root / ".dockerenv").touch()
    found = on_linux(root)
    assert found.preferred is not None
    assert found.notes == (note,)


def test_wsl_without_rocm_is_told_what_is_missing(machines: Path) -> None:
    """A18: advice about kernel modules and groups would be wrong under WSL."""
    found = detect(machines / "wsl2", "linux", {}, access=nothing)
    assert (found.platform, found.gpus, found.preferred) == ("wsl", (), None)
    assert found.notes == (
        "this is WSL, where only ROCm's rocminfo can tell the GPU; it is missing",
    )


@pytest.mark.skipif(sys.platform == "win32", reason="stands for a program of Linux")
def test_wsl_with_rocm_asks_rocminfo_without_the_masks(
    machines: Path, reports: Path, tmp_path: Path
) -> None:
    """A18: ROCm before 7.13 sees the GPU only with HSA_ENABLE_DXG_DETECTION=1."""
    root = tmp_path / "machine"
    shutil.copytree(machines / "wsl2", root)
    tool = root / "opt/rocm/bin/rocminfo"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        "#!/bin/sh\n"
        'test "$HSA_ENABLE_DXG_DETECTION" = 1 && test -z "$ROCR_VISIBLE_DEVICES" &&'
        f' cat "{reports / "rocminfo-7900xtx.txt"}"\n',
        encoding="utf-8",
    )
    tool.chmod(0o755)
    found = on_linux(root, ROCR_VISIBLE_DEVICES="0", PATH=os.environ["PATH"])
    assert found.platform == "wsl"
    assert found.preferred is not None
    assert (found.preferred.arch, found.mask, found.notes) == ("gfx1100", {}, ())


@pytest.mark.skipif(sys.platform == "win32", reason="stands for a program of Linux")
@pytest.mark.parametrize(
    ("script", "note"),
    [("#!/bin/sh\n", "rocminfo lists no GPU"), ("#!/none\n", "rocminfo cannot be run")],
)
def test_a_rocminfo_that_fails_is_said(
    build: Build, machines: Path, script: str, note: str
) -> None:
    root = build({"dev/dxg": "", "opt/rocm/bin/rocminfo": script})
    (root / "opt/rocm/bin/rocminfo").chmod(0o755)
    found = on_linux(root, PATH=os.environ["PATH"])
    assert found.gpus == ()
    assert note in found.notes[0]


@pytest.mark.skipif(sys.platform == "win32", reason="stands for a program of Linux")
def test_leftover_tools_of_cuda_decide_nothing(
    build: Build, gpu_node: Node, tmp_path: Path
) -> None:
    """A24: nvidia-smi on PATH was taken for an NVIDIA card."""
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    tool.chmod(0o755)
    files = {f"{NODES}/1/properties": gpu_node(100304, 0x743F)}
    found = on_linux(build(files | DEVICES), PATH=str(tool.parent), CUDA_PATH="/usr/local/cuda")
    assert found.preferred is not None
    assert found.preferred.arch == "gfx1034"


def test_detection_needs_no_tool_at_all(machines: Path) -> None:
    """A04: no rocminfo, amd-smi or lspci on PATH."""
    assert on_linux(machines / "rx7900xtx", PATH="").preferred is not None


def test_two_masks_that_hide_everything_are_named(machines: Path) -> None:
    """A25: "1" and "1" on two GPUs."""
    found = on_linux(machines / "rx7900xtx-x2", ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="1")
    assert (found.preferred, found.visible, found.mask, len(found.gpus)) == (None, (), {}, 2)
    assert found.notes == (
        "ROCR_VISIBLE_DEVICES=1 and HIP_VISIBLE_DEVICES=1 together hide every GPU: each counts in "
        "what the one before leaves",
    )


@pytest.mark.parametrize("value", ["", "-1"])
def test_an_empty_mask_hides_the_gpu_and_is_obeyed(machines: Path, value: str) -> None:
    """A25."""
    found = on_linux(machines / "rx7900xtx", HIP_VISIBLE_DEVICES=value)
    assert found.preferred is None
    assert found.notes == (f"HIP_VISIBLE_DEVICES={value} hides every GPU",)


def test_a_mask_that_shows_the_igpu_alone_is_obeyed(machines: Path) -> None:
    found = on_linux(machines / "rx7800xt-raphael", ROCR_VISIBLE_DEVICES="1")
    assert found.preferred is not None
    assert (found.preferred.arch, found.mask) == ("gfx1036", {})


def test_a_uuid_in_the_mask_is_followed(build: Build, gpu_node: Node) -> None:
    """A25."""
    root = build(two_nodes(gpu_node, 110000, 110000, 24, 24))
    found = on_linux(root, ROCR_VISIBLE_DEVICES="GPU-0000000000000002")
    assert [gpu.index for gpu in found.visible] == [1]
    assert found.mask == {}


def test_visible_gpus_are_in_the_order_of_torch(machines: Path) -> None:
    found = on_linux(machines / "rx7900xtx-x2", ROCR_VISIBLE_DEVICES="1,0")
    assert [gpu.index for gpu in found.visible] == [1, 0]
    assert found.reason == "Radeon RX 7900 XTX (24.0 GiB) is the first of 2 equal discrete cards"


@pytest.mark.parametrize("machine", ["nvidia-only", "kfd-cpu-only"])
def test_a_machine_without_an_amd_gpu_has_nothing_to_complain_about(
    machines: Path, machine: str
) -> None:
    found = detect(machines / machine, "linux", {}, access=nothing)
    assert (found.reason, found.notes) == ("no AMD GPU was found", ())


def test_another_system_has_no_gpus() -> None:
    found = detect(platform="darwin")
    assert (found.platform, found.gpus) == ("darwin", ())
    assert "this is darwin" in found.reason


def adapter(device_id: int, revision: int, dedicated_bytes: int) -> Adapter:
    return Adapter(
        description="",
        vendor_id=0x1002,
        device_id=device_id,
        revision=revision,
        dedicated_bytes=dedicated_bytes,
        shared_bytes=16 * GIB,
        luid=device_id,
    )


LAPTOP = Readings(adapters=[adapter(0x164E, 0xC1, GIB // 2), adapter(0x73DF, 0xC0, 12 * GIB)])


@pytest.mark.parametrize("platform", ["win32", "windows"])
def test_windows_prefers_the_card_and_not_adapter_0(platform: str) -> None:
    """A27: DirectML took the iGPU, which is adapter 0."""
    found = detect(platform=platform, read_windows=lambda: LAPTOP)
    assert found.preferred is not None
    assert (found.platform, found.preferred.index) == ("windows", 1)
    assert (found.preferred.name, found.mask, found.notes) == ("Radeon RX 6750 XT", {}, ())


@pytest.mark.parametrize(
    ("device", "index"),
    [("auto", 1), ("1", 1), (" 0 ", 0), ("AUTO", 1), ("cpu", None)],
)
def test_a_device_is_picked_as_asked(device: str, index: int | None) -> None:
    """A27: the option was ignored."""
    gpu = pick(detect(platform="win32", read_windows=lambda: LAPTOP), device)
    assert (gpu and gpu.index) == index


@pytest.mark.parametrize("device", ["99", "-1", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device: str) -> None:
    """A27: never another device in silence."""
    found = detect(platform="win32", read_windows=lambda: LAPTOP)
    with pytest.raises(BadRequest) as refusal:
        pick(found, device)
    assert str(refusal.value) == (
        f"device is {device}; allowed auto, cpu, 0 (Radeon Graphics (Raphael)), "
        "1 (Radeon RX 6750 XT)"
    )


def test_windows_uses_cards_that_rocm_dropped() -> None:
    readings = Readings(adapters=[adapter(0x67DF, 0xE7, 8 * GIB)])
    found = detect(platform="win32", read_windows=lambda: readings)
    assert found.preferred is not None
    assert found.preferred.name == "Radeon RX 580"


def test_an_unknown_size_is_said(machines: Path) -> None:
    """B08: unknown is better than a made-up 1024 MB."""
    readings = Readings(adapters=[adapter(0x73DF, 0xC0, 0)])
    found = detect(platform="win32", read_windows=lambda: readings)
    assert found.preferred is not None
    assert found.preferred.vram_bytes == 0
    assert found.notes == ("Radeon RX 6750 XT: the size of its memory is unknown",)


def test_a_dxgi_that_refuses_leaves_no_gpu_and_a_note() -> None:
    def refuse() -> Readings:
        raise HardwareError("CreateDXGIFactory1 failed with 0x887a0004")

    found = detect(platform="win32", read_windows=refuse)
    assert (found.preferred, found.notes) == (None, ("CreateDXGIFactory1 failed with 0x887a0004",))


def test_a_recorded_machine_can_be_seen_as_windows_would(machines: Path) -> None:
    found = detect(machines / "rx7800xt-raphael", "windows")
    assert found.preferred is not None
    assert (found.platform, found.preferred.name) == ("windows", "Radeon RX 7800 XT")
    assert found.preferred.vram_bytes == 17163091968


def test_importing_detection_loads_nothing_heavy() -> None:
    code = (
        "import sys; import sdamd.hardware.detect;"
        "print([m for m in ('torch', 'numpy', 'ctypes', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == "[]"
