from pathlib import Path

import pytest

from sdamd.errors import BadRequest, HardwareError
from sdamd.hardware.detect import Detection, detect
from sdamd.hardware.device import choose_device
from sdamd.hardware.runtime import Engine

MACHINES = Path(__file__).parents[1] / "data/machines"


def of(name: str, platform: str = "linux") -> Detection:
    return detect(MACHINES / name, platform, {})


@pytest.mark.parametrize(
    ("name", "platform", "asked", "index", "engine", "reason"),
    [
        ("rx7900xtx", "linux", "auto", 0, Engine.ROCM, "Radeon RX 7900 XTX is the only GPU"),
        ("rx7900xtx", "linux", "cpu", None, Engine.CPU, "cpu was asked for"),
        ("rx7900xtx", "linux", "directml-cpu", None, Engine.DIRECTML_CPU, "directml-cpu was asked"),
        ("rx7900xtx", "linux", "rocm", 0, Engine.ROCM, "rocm was asked for"),
        ("rx7900xtx-x2", "linux", "1", 1, Engine.ROCM, "Radeon RX 7900 XTX"),
        ("rx7900xtx-x2", "linux", "rocm:1", 1, Engine.ROCM, "rocm was asked for"),
        ("rx7800xt-raphael", "linux", "auto", 0, Engine.ROCM, "Radeon RX 7800 XT is the discrete"),
        ("rx7800xt-raphael", "linux", "7800", 0, Engine.ROCM, "Radeon RX 7800 XT is the discrete"),
        ("kfd-cpu-only", "linux", "auto", None, Engine.CPU, "no AMD GPU was found"),
        ("rx580", "linux", "auto", None, Engine.CPU, "no current ROCm build has kernels for "),
        ("rx580", "windows", "auto", 0, Engine.DIRECTML, "Radeon RX 580 is the only GPU"),
        ("rx7900xtx", "windows", "auto", 0, Engine.DIRECTML, "Radeon RX 7900 XTX is the only GPU"),
        ("rx7900xtx-x2", "windows", "directml:1", 1, Engine.DIRECTML, "directml was asked for"),
    ],
)
def test_what_is_asked_for_is_what_computes(
    name: str, platform: str, asked: str, index: int | None, engine: Engine, reason: str
) -> None:
    device = choose_device(of(name, platform), asked)
    assert (None if device.gpu is None else device.gpu.index) == index
    assert device.engine is engine
    assert device.reason.startswith(reason)


@pytest.mark.parametrize(
    ("name", "platform", "asked", "said"),
    [
        ("rx580", "linux", "0", "device is 0, and that cannot be used: "),
        ("rx580", "linux", "rocm:0", "device is rocm:0; .* under linux allows cpu"),
        ("kfd-cpu-only", "linux", "rocm", "that cannot be used: no AMD GPU was found"),
        ("rx7900xtx", "linux", "directml", "device is directml; .* under linux allows cpu, rocm"),
        ("rx7900xtx", "linux", "rocm:cpu", "that cannot be used: the CPU needs no engine"),
    ],
)
def test_a_gpu_that_was_asked_for_is_never_silently_replaced_by_the_cpu(
    name: str, platform: str, asked: str, said: str
) -> None:
    with pytest.raises(HardwareError, match=said):
        choose_device(of(name, platform), asked)


@pytest.mark.parametrize("asked", ["5", "-1", "²", "gpu", "4090", "radeon", "rocm:7", "", "rocm:"])
def test_a_gpu_that_is_not_there_or_is_meant_by_two_is_refused_with_the_choices(
    asked: str,
) -> None:
    said = rf"device is {asked}; allowed auto, cpu, 0 \(Radeon RX 7900 XTX\), 1 \("
    with pytest.raises(BadRequest, match=said):
        choose_device(of("rx7900xtx-x2"), asked)


def test_only_the_two_engines_of_gpus_stand_before_a_colon() -> None:
    with pytest.raises(BadRequest, match="before the colon allowed are rocm and directml"):
        choose_device(of("rx7900xtx"), "cuda:0")
