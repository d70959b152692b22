import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.hardware import linux
from sdamd.hardware.place import Place
from sdamd.hardware.survey import read_kernel_log, survey
from tests.hardware.made import GIB, NODES, gpu, machine, surveyed, torch, write


def test_everything_is_read_below_the_root(tmp_path: Path) -> None:
    found = surveyed(
        tmp_path,
        machine(
            gpu(),
            {
                "opt/rocm/core/.info/version": "7.14.1-99\n",
                "opt/rocm/lib/librocdxg.so.1": "",
                "var/log/dmesg": "amdgpu 0000:03:00.0: VRAM: 24560M\n",
                "home/.docker/config.json": '{"currentContext": "desktop-linux"}',
                "proc/self/environ": f"HOME={tmp_path}/home\0HSA_XNACK=1\0broken\0",
            },
        ),
        HSA_XNACK="0",
    )
    assert found.recorded
    assert (found.kernel, found.place) == ("6.17.9-arch1-1", Place.BARE)
    assert "quiet" in found.command_line
    assert found.driver_loaded is True
    assert [(card.pci, card.driver) for card in found.pci] == [("0000:03:00.0", "amdgpu")]
    assert (found.kfd.group_name, found.kfd.may_open) == ("render", True)
    assert [file.path for file in found.renders] == ["/dev/dri/renderD128"]
    assert (found.rocm, found.librocdxg) == ("7.14.1-99", True)
    assert found.docker_context == "desktop-linux"
    assert found.ram_bytes == 65536000 * 1024
    assert found.dmesg is not None
    assert "24560M" in found.dmesg
    # The variables of the recording, where it has them, and not this shell's.
    assert found.environ["HSA_XNACK"] == "1"
    assert found.installed.torch is not None
    assert found.installed.torch.version == "2.9.1+rocm6.4"
    assert found.folders == ()


def test_a_recording_without_variables_is_judged_by_this_shells(tmp_path: Path) -> None:
    found = surveyed(tmp_path, machine(), HSA_OVERRIDE_GFX_VERSION="10.3.0", container="docker")
    assert found.environ["HSA_OVERRIDE_GFX_VERSION"] == "10.3.0"
    assert found.place is Place.BARE  # which says where this shell runs, and not where that one did


def test_what_is_not_there_is_unknown(tmp_path: Path) -> None:
    found = surveyed(tmp_path, {})
    assert found.driver_loaded is None
    assert found.membership.ids is None
    assert found.dmesg is None
    assert (found.kfd.present, found.renders, found.rocm, found.ram_bytes) == (False, (), "", 0)


@pytest.mark.parametrize(
    ("files", "loaded"),
    [
        ({"proc/modules": "amdgpu 1 2 - Live 0x0\n"}, True),
        ({"proc/modules": "amdgpu_old 1 2 - Live 0x0\nnvme 1 1 - Live 0x0\n"}, False),
        ({"sys/module/amdgpu/refcnt": "1"}, True),
        ({}, None),
    ],
)
def test_whether_the_driver_is_loaded(
    tmp_path: Path, files: dict[str, str], loaded: bool | None
) -> None:
    assert surveyed(tmp_path, files).driver_loaded is loaded


@pytest.mark.report("A04")
def test_nodes_that_a_device_cgroup_hides_are_counted_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A04, A06: reading the properties of a masked node gives EPERM."""
    root = write(tmp_path, machine(gpu(1), gpu(2)))
    hidden = root / NODES / "1/properties"
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == hidden:
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    found = survey(root, "linux", {})
    assert found.hidden_nodes == 1
    assert [gpu.node for gpu in found.detection.gpus] == [2]
    assert found.detection.gpus[0].index == 0  # as HIP counts, which skips it too


@pytest.mark.report("A31")
@pytest.mark.parametrize("device_class", ["0x030000", "0x030200", "0x038000", "0x120000"])
def test_a_card_is_a_card_whatever_the_bus_calls_it(tmp_path: Path, device_class: str) -> None:
    """A31: on a laptop it is a 3D or a display controller; chipsets of AMD's are no GPUs."""
    bridge = {
        "sys/bus/pci/devices/0000:00:00.0/vendor": "0x1022",
        "sys/bus/pci/devices/0000:00:00.0/class": "0x060000",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x1002",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x060400",
        "sys/bus/pci/devices/0000:01:00.1/vendor": "0x1002",
        "sys/bus/pci/devices/0000:01:00.1/class": "0x040300",
    }
    root = write(tmp_path, machine(gpu(device_class=device_class), bridge))
    assert [card.pci for card in linux.read_pci_gpus(root)] == ["0000:03:00.0"]


def test_only_the_render_nodes_of_the_gpus_are_asked(tmp_path: Path) -> None:
    files = machine(gpu(), {"dev/dri/renderD200": "600 0 0", "dev/dri/card0": ""})
    assert [file.path for file in surveyed(tmp_path, files).renders] == ["/dev/dri/renderD128"]


def test_a_recording_of_another_system_tells_nothing_of_packages(tmp_path: Path) -> None:
    files = {name: text for name, text in machine().items() if not name.startswith("python/")}
    assert not surveyed(tmp_path, files, "windows").installed.known


def test_the_kernels_log_is_read_as_far_as_it_may_be(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,0,-;amdgpu: hello\n", encoding="utf-8")
    assert read_kernel_log(log) == "amdgpu: hello"
    assert read_kernel_log(tmp_path / "nothing") is None
    assert read_kernel_log(tmp_path) is None


def test_the_log_is_asked_of_whoever_is_given(tmp_path: Path) -> None:
    root = write(tmp_path, machine())
    assert survey(root, "linux", {}, dmesg=lambda: "x").dmesg == "x"


def test_this_machine_is_read_without_root_or_torch() -> None:
    found = survey(environ=dict(os.environ))
    assert not found.recorded
    assert found.installed.torch is not None
    assert any(folder.what == "temporary files" for folder in found.folders)


@given(content=st.binary(max_size=120))
def test_any_content_is_survived(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("machine")
    names = ("proc/version", "proc/cmdline", "proc/modules", "proc/meminfo", "proc/self/environ",
             "opt/rocm/.info/version", "var/log/dmesg", "dev/kfd", "run/systemd/container",
             "sys/bus/pci/devices/0000:01:00.0/vendor", f"{NODES}/1/properties")  # fmt: skip
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    assert survey(root, "linux", {}).ram_bytes >= 0


def test_what_is_made_is_what_it_says(tmp_path: Path) -> None:
    (card,) = surveyed(tmp_path, machine(gpu(bank_gib=24), torch())).detection.gpus
    assert (card.arch, card.vram_bytes, card.is_apu) == ("gfx1100", 24 * GIB, False)
