"""What machine this is and which build of torch it gets. Standard library only."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sdamd.errors import UserError
from sdamd.hardware.detect import Detection, detect
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import Build, Engine, candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found, and the build that was chosen for it.

    `gpu` is the one that the build is about; without `detection.preferred` it is one that no
    build supports.
    """

    detection: Detection
    gpu: Gpu | None
    build: Build
    by_hand: bool = False


def look(root: Path | None = None, platform: str | None = None, name: str | None = None) -> Machine:
    """Find the GPU and choose the build, or the one called `name`.

    `root` is that of a recorded machine, `platform` another system to suppose; without them it
    is this machine.

    Raises:
        HardwareError: there is no build for this Python.
        UserError: `--build` names none of those that could run here.
    """
    recorded = root is not None
    detection = detect(
        root or Path("/"),
        platform or ("linux" if recorded else sys.platform),
        {} if recorded else os.environ,
    )
    # A GPU that no build supports is still worth a better reason than "no GPU".
    gpu = detection.preferred or next(iter(detection.visible), None)
    builds = candidates(
        gpu,
        detection.platform,
        sys.version_info[:2],
        "x86_64" if recorded or sys.platform == "win32" else os.uname().machine,
    )
    named = {build.name: build for build in builds}
    if name is not None and name not in named:
        raise UserError(f"--build is {name}; for this machine: {', '.join(named)}")
    build = named[name] if name else builds[0]
    if gpu is None and detection.platform != "wsl":
        build = replace(build, reason=f"{detection.reason}, so it computes on the CPU")
    return Machine(detection=detection, gpu=gpu, build=build, by_hand=name is not None)


def environment(machine: Machine, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment for sdamd, and notes on variables that the person set otherwise.

    The other GPUs are not hidden here: `--device` may still choose one of them, and the process
    that renders is given its own mask.
    """
    build = machine.build
    result = dict(environ)
    notes = []
    for variable in build.environment:
        value = result.setdefault(variable.name, variable.value)
        if value != variable.value:
            notes.append(
                f"{variable.name} stays {value!r} as you set it; {build.name} would have "
                f"{variable.value!r}: {variable.reason}"
            )
    override = "HSA_OVERRIDE_GFX_VERSION"
    if (
        build.engine is Engine.ROCM
        and override in environ
        and override not in {variable.name for variable in build.environment}
    ):
        notes.append(
            f"{override} is {environ[override]!r} although {build.name} has kernels of its own "
            "for this GPU, which is a known cause of crashes: unset it"
        )
    return result, notes
