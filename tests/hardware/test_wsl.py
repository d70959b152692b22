from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdamd.hardware.gpu import Kind
from sdamd.hardware.wsl import is_wsl, parse_rocminfo

Build = Callable[[Mapping[str, str]], Path]


@pytest.mark.parametrize(
    ("files", "is_it"),
    [
        ({"dev/dxg": ""}, True),
        ({"proc/version": "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@builder)"}, True),
        ({"proc/version": "Linux version 4.4.0-19041-Microsoft"}, True),
        ({"proc/version": "Linux version 6.8.0-60-generic"}, False),
        ({}, False),
        (
            {
                "proc/version": "Linux version 6.6.0 (builder@microsoft)",
                "sys/class/kfd/kfd/topology/nodes/0/properties": "",
            },
            False,  # a virtual machine with a GPU of its own
        ),
    ],
)
def test_wsl_is_known_by_its_kernel_or_device(
    build: Build, files: dict[str, str], is_it: bool
) -> None:
    """A18."""
    assert is_wsl(build(files)) is is_it


def test_rocminfo_tells_a_card(reports: Path) -> None:
    (gpu,) = parse_rocminfo((reports / "rocminfo-7900xtx.txt").read_text(encoding="utf-8"))
    assert (gpu.index, gpu.arch, gpu.name) == (0, "gfx1100", "Radeon RX 7900 XTX")
    assert (gpu.kind, gpu.compute_units, gpu.wave) == (Kind.DISCRETE, 96, 32)
    assert (gpu.vram_bytes, gpu.uuid) == (25149440 * 1024, "GPU-1122334455667788")


def test_rocminfo_tells_an_apu(reports: Path) -> None:
    (gpu,) = parse_rocminfo((reports / "rocminfo-8060s.txt").read_text(encoding="utf-8"))
    assert (gpu.arch, gpu.kind, gpu.usable_bytes) == ("gfx1151", Kind.APU, 63181680640)
    assert gpu.uuid == ""


def test_an_agent_called_cpu_is_no_gpu(reports: Path) -> None:
    """A18: under WSL the agent of the CPU is called just "CPU"."""
    text = (reports / "A18.txt").read_text(encoding="utf-8")
    assert "Marketing Name:          CPU" in text
    assert parse_rocminfo(text) == ()


def test_an_override_does_not_change_what_the_chip_is(reports: Path) -> None:
    """A07: with HSA_OVERRIDE_GFX_VERSION, rocminfo names the architecture of the override."""
    text = (reports / "rocminfo-7900xtx.txt").read_text(encoding="utf-8")
    (gpu,) = parse_rocminfo(text.replace("gfx1100", "gfx1030"))
    assert gpu.arch == "gfx1100"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text().map(lambda text: f"Agent 1\n  Device Type: GPU\n{text}"))
def test_any_output_can_be_read(text: str) -> None:
    assert len(parse_rocminfo(text)) <= 1 + text.count("Agent")
