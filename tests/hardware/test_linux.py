import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdamd.hardware.gpu import ArchSource, Kind
from sdamd.hardware.linux import is_container, parse_properties, read_gpus

NODES = "sys/class/kfd/kfd/topology/nodes"
MACHINES = sorted(
    p.parent.name for p in Path(__file__).parents[1].glob("data/machines/*/expected.json")
)

Build = Callable[[Mapping[str, str]], Path]
Node = Callable[..., str]
Sections = Callable[[str], dict[str, str]]


def card(name: str, device: str, **files: str) -> dict[str, str]:
    folder = f"sys/class/drm/{name}/device"
    numbers = {"vendor": "0x1002", "device": device, "class": "0x030000"} | files
    return {f"{folder}/{file}": f"{text}\n" for file, text in numbers.items()}


def test_all_recorded_machines_are_tested() -> None:
    assert len(MACHINES) == 13


@pytest.mark.parametrize("machine", MACHINES)
def test_a_recorded_machine_shows_exactly_its_gpus(machines: Path, machine: str) -> None:
    root = machines / machine
    expected = json.loads((root / "expected.json").read_text(encoding="utf-8"))
    found = [gpu.to_dict() for gpu in read_gpus(root).gpus]
    shown = [
        {key: gpu[key] for key in wanted}
        for gpu, wanted in zip(found, expected["gpus"], strict=True)
    ]
    assert shown == expected["gpus"]


def test_kfd_numbers_gpus_and_drm_names_do_not(build: Build, sections: Sections) -> None:
    """A01: DRM lists the iGPU first, KFD the card; an APU's bank is its GTT, not its memory."""
    card_first, igpu = read_gpus(build(sections("A01.txt"))).gpus
    assert (card_first.arch, card_first.index, card_first.card) == ("gfx1032", 0, "card1")
    assert (card_first.kind, card_first.vram_bytes) == (Kind.DISCRETE, 8573157376)
    assert (igpu.arch, igpu.index, igpu.card, igpu.kind) == ("gfx1036", 1, "card0", Kind.APU)
    assert (igpu.vram_bytes, igpu.gtt_bytes) == (536870912, 16377958400)


def test_gpu_id_is_not_needed(build: Build, gpu_node: Node) -> None:
    """A04: the id is a file of its own, which a container may not let us read."""
    root = build(
        {
            f"{NODES}/0/properties": "cpu_cores_count 16\nsimd_count 0\nvendor_id 0\n",
            f"{NODES}/1/properties": gpu_node(120001, 0x7550),
            f"{NODES}/2/properties": gpu_node(100306, 0x13C0),
        }
    )
    (root / NODES / "1/gpu_id").mkdir()  # reading it fails, whoever tries
    assert [gpu.arch for gpu in read_gpus(root).gpus] == ["gfx1201", "gfx1036"]


def test_a_node_that_cannot_be_read_is_skipped_with_a_warning(build: Build, gpu_node: Node) -> None:
    """A06: a device cgroup answers EPERM, or the file is empty."""
    root = build(
        {
            f"{NODES}/2/properties": "",
            f"{NODES}/3/properties": gpu_node(90402, 0x74A1),
        }
    )
    (root / NODES / "1/properties").mkdir(parents=True)
    found = read_gpus(root)
    assert [(gpu.arch, gpu.index, gpu.node) for gpu in found.gpus] == [("gfx942", 0, 3)]
    assert found.notes == (
        "KFD node 1 cannot be read and is skipped",
        "KFD node 2 cannot be read and is skipped",
    )


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        ("A34.txt", ("gfx1151", Kind.APU, 32, "0000:c2:00.0", "renderD128", 0)),
        ("A35.txt", ("gfx1100", Kind.DISCRETE, 96, "0000:86:00.0", "renderD128", 0)),
    ],
)
def test_a_complete_node_tells_all_but_the_memory(
    build: Build, sections: Sections, report: str, shown: tuple[object, ...]
) -> None:
    """A34: local_mem_size is 0 on every modern kernel and is not a size."""
    (gpu,) = read_gpus(build(sections(report))).gpus
    assert shown == (
        gpu.arch,
        gpu.kind,
        gpu.compute_units,
        gpu.pci,
        gpu.render,
        gpu.vram_bytes,
    )
    assert gpu.arch_source is ArchSource.KFD


@pytest.mark.parametrize(
    ("version", "gc", "gfx"),
    [
        (110003, "11.0.1", "gfx1103"),
        (110001, "11.0.3", "gfx1101"),
        (100302, "10.3.4", "gfx1032"),
        (90402, "9.4.3", "gfx942"),
    ],
)
def test_the_version_of_the_hardware_block_does_not_decide(
    build: Build, gpu_node: Node, version: int, gc: str, gfx: str
) -> None:
    """A34: GC 11.0.1 is gfx1103 and 11.0.3 is gfx1101."""
    files = {f"{NODES}/1/properties": gpu_node(version, 0xFFFF, location_id=768)}
    assert read_gpus(build(files | gc_card(gc))).gpus[0].arch == gfx


@pytest.mark.parametrize(
    ("gc", "gfx"),
    [
        ("11.0.1", "gfx1103"),
        ("11.0.3", "gfx1101"),
        ("11.5.1", "gfx1151"),
        ("10.3.6", "gfx1036"),
        ("12.0.0", "gfx1200"),
        ("99.1.1", ""),
    ],
)
def test_without_the_kernels_number_the_architecture_is_called_a_guess(
    build: Build, gpu_node: Node, gc: str, gfx: str
) -> None:
    """A34: the table is the last resort."""
    files = {f"{NODES}/1/properties": gpu_node(0, 0xFFFF, location_id=768)}
    found = read_gpus(build(files | gc_card(gc)))
    assert found.gpus[0].arch == gfx
    assert f"{gfx or 'nothing'} is a guess" in found.notes[0]


def gc_card(gc: str) -> dict[str, str]:
    parts = dict(zip(("major", "minor", "revision"), gc.split("."), strict=True))
    return card(
        "card0",
        "0xffff",
        uevent="DRIVER=amdgpu\nPCI_SLOT_NAME=0000:03:00.0",
        **{f"ip_discovery/die/0/GC/0/{part}": number for part, number in parts.items()},
    )


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("0x038000", {"vendor": "0x8086", "class": "0x030000"}),  # beside an Intel GPU
        ("0x030200", {"vendor": "0x8086", "class": "0x030000"}),  # a 3D controller
        ("0x030000", {"class": "0x060000"}),  # beside AMD's host bridge
        ("0x120000", {"vendor": "0x1a03", "class": "0x030000"}),  # an accelerator
    ],
)
def test_the_class_on_the_bus_tells_gpus_apart(
    build: Build, first: str, others: dict[str, str]
) -> None:
    """A31: a discrete AMD card may be a display or 3D controller; bridges are AMD's as well."""
    files = card("card1", "0x6665", **{"class": first}) | card("card0", "0x1616", **others)
    found = read_gpus(build(files))
    assert [gpu.card for gpu in found.unlisted] == ["card1"]


def test_the_memory_of_a_card_comes_from_no_name(build: Build) -> None:
    """A31: one PCI name covers cards of 2 and 4 GB."""
    files = card("card0", "0x699f", revision="0xc1", mem_info_vram_total="2147483648")
    (gpu,) = read_gpus(build(files)).unlisted
    assert (gpu.arch, gpu.vram_bytes) == ("gfx803", 2147483648)


def test_a_card_without_a_place_in_kfd_is_no_gpu_for_rocm(build: Build) -> None:
    """A13: PCI atomics are missing, or KFD does not support the generation."""
    uevent = "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:01:00.0"
    found = read_gpus(build(card("card0", "0x67df", revision="0xe7", uevent=uevent)))
    assert found.gpus == ()
    assert [gpu.name for gpu in found.unlisted] == ["Radeon RX 580"]
    assert found.unlisted[0].index == -1
    (note,) = found.notes
    assert "does not list it, so ROCm cannot use it" in note


@pytest.mark.parametrize("driver", ["radeon", "vfio-pci"])
def test_a_card_of_another_driver_is_left_out(build: Build, driver: str) -> None:
    """A13."""
    uevent = f"DRIVER={driver}\nPCI_SLOT_NAME=0000:01:00.0"
    found = read_gpus(build(card("card0", "0x6810", uevent=uevent)))
    assert (found.gpus, found.unlisted) == ((), ())
    assert found.notes == (
        f"AMD GPU 1002:6810 at 0000:01:00.0 is bound to the driver {driver}, so ROCm cannot use it",
    )


@pytest.mark.parametrize(
    ("uevent", "state"),
    [
        ("PCI_CLASS=38000\n", "without a driver"),
        ("DRIVER=vfio-pci\n", "bound to the driver vfio-pci"),
    ],
)
def test_a_card_that_no_graphics_driver_claims_is_seen_on_the_bus(
    build: Build, uevent: str, state: str
) -> None:
    bus = "sys/bus/pci/devices"
    found = read_gpus(
        build(
            {
                f"{bus}/0000:00:00.0/vendor": "0x1002\n",
                f"{bus}/0000:00:00.0/class": "0x060000\n",
                f"{bus}/0000:03:00.0/vendor": "0x1002\n",
                f"{bus}/0000:03:00.0/class": "0x038000\n",
                f"{bus}/0000:03:00.0/device": "0x744c\n",
                f"{bus}/0000:03:00.0/revision": "0xc8\n",
                f"{bus}/0000:03:00.0/uevent": uevent,
            }
        )
    )
    assert found.notes == (f"Radeon RX 7900 XTX at 0000:03:00.0 is {state}, so ROCm cannot use it",)


def test_memory_is_every_heap_of_the_card_and_none_of_the_system(
    build: Build, gpu_node: Node
) -> None:
    """Without a resizable BAR, most of the memory is in a heap that the CPU does not see."""
    banks = {0: 256, 1: 268435456, 2: 16911433728}
    files = {
        f"{NODES}/1/mem_banks/{heap}/properties": f"heap_type {heap}\nsize_in_bytes {size}\n"
        for heap, size in banks.items()
    }
    (gpu,) = read_gpus(build(files | {f"{NODES}/1/properties": gpu_node(110001, 0x747E)})).gpus
    assert gpu.vram_bytes == 268435456 + 16911433728


def test_nodes_and_cards_are_ordered_by_number(build: Build, gpu_node: Node) -> None:
    files = {f"{NODES}/{n}/properties": gpu_node(110000, 0x744C) for n in (10, 9, 2)}
    assert [(gpu.node, gpu.index) for gpu in read_gpus(build(files)).gpus] == [
        (2, 0),
        (9, 1),
        (10, 2),
    ]


def test_the_parts_of_one_accelerator_share_its_card(build: Build, gpu_node: Node) -> None:
    uevent = "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:05:00.0"
    files = card("card1", "0x74a1", revision="0x00", uevent=uevent) | {
        f"{NODES}/{n + 2}/properties": gpu_node(90402, 0x74A1, location_id=0x500 + n)
        for n in range(3)
    }
    found = read_gpus(build(files))
    assert [(gpu.pci, gpu.card) for gpu in found.gpus] == [
        ("0000:05:00.0", "card1"),
        ("0000:05:00.1", "card1"),
        ("0000:05:00.2", "card1"),
    ]
    assert found.unlisted == ()


def test_an_unknown_device_whose_bank_dwarfs_its_carve_out_is_an_apu(
    build: Build, gpu_node: Node
) -> None:
    uevent = "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:03:00.0"
    files = {
        f"{NODES}/1/properties": gpu_node(130000, 0xFFFF, location_id=768),
        f"{NODES}/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 16000000000\n",
    }
    sizes = {"mem_info_vram_total": "536870912", "mem_info_gtt_total": "16000000000"}
    (gpu,) = read_gpus(build(files | card("card0", "0xffff", uevent=uevent, **sizes))).gpus
    assert (gpu.arch, gpu.kind, gpu.usable_bytes) == ("gfx1300", Kind.APU, 16000000000)


@pytest.mark.parametrize(("marker", "inside"), [(".dockerenv", True), ("etc/hosts", False)])
def test_a_container_is_known_by_its_marker(build: Build, marker: str, inside: bool) -> None:
    assert is_container(build({marker: ""})) is inside


def test_an_empty_root_has_no_gpus(tmp_path: Path) -> None:
    found = read_gpus(tmp_path)
    assert (found.gpus, found.unlisted, found.notes) == ((), (), ())


slow_start = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow_start
@given(st.text())
def test_any_text_parses_to_numbers(text: str) -> None:
    assert all(key and number >= 0 for key, number in parse_properties(text).items())


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,30}", fullmatch=True), st.integers(0, 2**64 - 1)))
def test_what_the_kernel_writes_is_read_back(properties: dict[str, int]) -> None:
    text = "".join(f"{key} {value}\n" for key, value in properties.items())
    assert parse_properties(text) == properties


@settings(slow_start, max_examples=30)
@given(properties=st.binary(max_size=200), bank=st.binary(max_size=60), number=st.binary())
def test_no_content_of_the_files_breaks_the_detection(
    properties: bytes, bank: bytes, number: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        node = root / NODES / "1"
        device = root / "sys/class/drm/card0/device"
        (node / "mem_banks/0").mkdir(parents=True)
        device.mkdir(parents=True)
        (node / "properties").write_bytes(b"vendor_id 4098\nsimd_count 8\n" + properties)
        (node / "mem_banks/0/properties").write_bytes(bank)
        (device / "vendor").write_bytes(b"0x1002")
        for name in ("device", "revision", "uevent", "mem_info_vram_total"):
            (device / name).write_bytes(number)
        assert len(read_gpus(root).gpus) <= 1
