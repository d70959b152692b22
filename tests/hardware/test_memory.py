import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sdamd.hardware.linux import read_gpus
from sdamd.hardware.memory import Memory, read_memory
from sdamd.hardware.products import find_card

Build = Callable[[Mapping[str, str]], Path]
GIB = 2**30
USED = "sys/class/drm/card1/device/mem_info_vram_used"
KFD = "sys/class/kfd/kfd"
CARD = replace(find_card("RX 7900 XTX"), card="card1", node=1)


def test_a_recorded_machine_tells_what_its_desktop_holds(machines: Path) -> None:
    root = machines / "rx7900xtx"
    (gpu,) = read_gpus(root).gpus
    memory = read_memory(root, gpu)
    assert (memory.used_bytes, memory.gtt_used_bytes) == (1_503_238_553, 71_303_168)


def test_an_apu_tells_what_kfd_lists_as_its_memory(machines: Path) -> None:
    (gpu,) = read_gpus(machines / "strix-halo").gpus
    assert (gpu.vram_bytes, gpu.gtt_bytes, gpu.bank_bytes) == (
        536_870_912, 63_181_680_640, 63_181_680_640,
    )  # fmt: skip


def test_ram_is_read_whatever_the_device(build: Build) -> None:
    root = build({"proc/meminfo": "MemTotal:  8000 kB\nMemFree: 1 kB\nMemAvailable:   4000 kB\n"})
    expected = Memory(ram_bytes=8000 * 1024, available_bytes=4000 * 1024)
    assert read_memory(root, None) == expected
    assert read_memory(root, find_card("RX 6600")) == expected


@pytest.mark.parametrize("text", ["", "MemTotal: lots\n", "MemTotal: 99999999999999999 kB\n"])
def test_what_cannot_be_read_is_unknown(build: Build, text: str) -> None:
    assert read_memory(build({"proc/meminfo": text}), CARD) == Memory()


def test_what_this_program_holds_itself_is_not_of_others(build: Build) -> None:
    """Else the second job of a run would be planned for what the first one left."""
    root = build(
        {
            USED: str(12 * GIB),
            f"{KFD}/topology/nodes/1/gpu_id": "4711",
            f"{KFD}/proc/{os.getpid()}/vram_4711": str(9 * GIB),
            f"{KFD}/proc/1/vram_4711": str(GIB),
        }
    )
    assert read_memory(root, CARD).used_bytes == 3 * GIB


def test_what_a_child_and_the_parent_hold_is_ours_too(build: Build) -> None:
    root = build(
        {
            USED: str(5 * GIB),
            f"{KFD}/topology/nodes/1/gpu_id": "4711",
            f"{KFD}/proc/{os.getppid()}/vram_4711": str(4 * GIB),
        }
    )
    assert read_memory(root, CARD).used_bytes == GIB


def test_where_nobody_can_tell_whose_it_is_it_is_unknown(build: Build) -> None:
    """In a container the kernel lists processes by the numbers that they have outside."""
    files = {
        USED: str(5 * GIB),
        f"{KFD}/topology/nodes/1/gpu_id": "4711",
        f"{KFD}/proc/999999999/vram_4711": str(4 * GIB),
    }
    assert read_memory(build(files), CARD).used_bytes is None
    idle = files | {f"{KFD}/proc/999999999/vram_4711": "0"}
    assert read_memory(build(idle), CARD).used_bytes == 5 * GIB


def test_what_this_program_holds_of_the_ram_is_free_for_its_next_run(build: Build) -> None:
    files = {"proc/meminfo": "MemAvailable:   4000 kB\n", "proc/self/statm": "9000 500 100 7 0 9 0"}
    assert read_memory(build(files), None).available_bytes == 4000 * 1024 + 400 * 4096


def test_an_apu_whose_memory_is_ram_gets_back_what_this_program_holds_of_it(build: Build) -> None:
    root = build(
        {
            "proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB\n",
            "sys/class/drm/card1/device/mem_info_vram_used": str(GIB // 4),
            "sys/class/drm/card1/device/mem_info_gtt_used": str(6 * GIB),
            f"{KFD}/topology/nodes/1/gpu_id": "7",
            f"{KFD}/proc/{os.getpid()}/vram_7": str(5 * GIB),
        }
    )
    apu = replace(CARD, vram_bytes=GIB // 2, gtt_bytes=60 * GIB, bank_bytes=60 * GIB)
    memory = read_memory(root, apu)
    assert (memory.used_bytes, memory.gtt_used_bytes) == (GIB // 4, GIB)
    assert memory.available_bytes == 13 * GIB
