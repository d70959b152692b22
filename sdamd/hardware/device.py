"""Where a run computes: which GPU, driven by which engine, and why."""

import sys
from dataclasses import dataclass

from sdamd.errors import BadRequest, HardwareError
from sdamd.hardware.detect import Detection, pick
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import Engine, candidates, choose_build

_WITHOUT_GPU = {"cpu": Engine.CPU, "directml-cpu": Engine.DIRECTML_CPU}
_ON_GPU = {"rocm": Engine.ROCM, "directml": Engine.DIRECTML}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`gpu` is None where the CPU computes, also under DirectML's graphs (`directml-cpu`)."""

    gpu: Gpu | None
    engine: Engine
    reason: str = ""


CPU = Device(gpu=None, engine=Engine.CPU)
"""What every machine has."""


def choose_device(
    detection: Detection, asked: str, python: tuple[int, int] = sys.version_info[:2]
) -> Device:
    """Turn what a person asks for into a device.

    `asked` is `auto`, `cpu`, `directml-cpu`, an engine (`rocm`, `directml`), a GPU by its index or
    a part of its name, or both as `rocm:1`. Only `auto` falls back to the CPU, and says why.

    Raises:
        BadRequest: there is no such GPU.
        HardwareError: it is there, and the engine cannot drive it here.
    """
    wanted = asked.strip().lower()
    if wanted in _WITHOUT_GPU:
        return Device(gpu=None, engine=_WITHOUT_GPU[wanted], reason=f"{wanted} was asked for")
    engine, which = _parse(wanted)
    gpu = pick(detection, which, asked=asked)
    if gpu is None and which != "cpu" and engine is None and wanted == "auto":
        return Device(gpu=None, engine=Engine.CPU, reason=detection.reason)
    if gpu is None:
        why = "the CPU needs no engine" if which == "cpu" else detection.reason
        raise HardwareError(f"device is {asked}, and that cannot be used: {why}")
    if engine is None:
        build = choose_build(gpu, detection.platform, python)
        if build.engine is Engine.CPU and wanted != "auto":
            raise HardwareError(f"device is {asked}, and that cannot be used: {build.reason}")
        if build.engine is Engine.CPU:
            return Device(gpu=None, engine=Engine.CPU, reason=build.reason)
        return Device(gpu=gpu, engine=build.engine, reason=detection.reason)
    possible = {build.engine for build in candidates(gpu, detection.platform, python)}
    if engine not in possible:
        names = ", ".join(sorted(possible))
        raise HardwareError(
            f"device is {asked}; {gpu.name} under {detection.platform} allows {names}"
        )
    return Device(gpu=gpu, engine=engine, reason=f"{engine} was asked for")


def _parse(wanted: str) -> tuple[Engine | None, str]:
    """Split `rocm:1` into the engine and what names the GPU; either may be left out."""
    engine, colon, which = wanted.partition(":")
    if engine in _ON_GPU:
        return _ON_GPU[engine], which.strip() if colon else "auto"
    if colon:
        raise BadRequest(f"device is {wanted}; before the colon allowed are rocm and directml")
    return None, wanted
