"""What machine this is and which build of torch it gets. Standard library only."""

import os
import platform as this_platform
import sys
from collections.abc import Mapping, Sequence
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
    build supports. `by_hand`: a person chose the build. `device` is what sdamd must then be told,
    since `auto` would go back to the engine of the first choice.
    """

    detection: Detection
    gpu: Gpu | None
    build: Build
    by_hand: bool = False
    device: str = ""


def look(
    root: Path | None = None,
    platform: str | None = None,
    *,
    name: str | None = None,
    engine: str | None = None,
    kept: str = "",
) -> Machine:
    """Find the GPU and choose the build: the one called `name`, or the first for `engine`.

    `root` is that of a recorded machine, `platform` another system to suppose; without them it
    is this machine. `kept` is the build that a person chose earlier; it counts where nothing else
    is asked for, as long as this machine still allows it.

    Raises:
        HardwareError: there is no build for this Python.
        UserError: none of those that could run here is called `name` or is for `engine`.
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
        "x86_64" if recorded else this_platform.machine(),
    )
    chosen = _chosen(builds, name, engine, kept)
    build = chosen or builds[0]
    if gpu is None and detection.platform != "wsl":
        build = replace(build, reason=f"{detection.reason}, so it computes on the CPU")
    return Machine(
        detection=detection,
        gpu=gpu,
        build=build,
        by_hand=chosen is not None,
        device="" if build.engine is builds[0].engine else build.engine.value,
    )


def _chosen(
    builds: Sequence[Build], name: str | None, engine: str | None, kept: str
) -> Build | None:
    """Return the build that a person chose, now or earlier; None leaves it to the table."""
    named = {build.name: build for build in builds}
    if name is not None and name not in named:
        raise UserError(f"--build is {name}; for this machine: {', '.join(named)}")
    if name is not None:
        return named[name]
    if engine is None:
        return named.get(kept)
    if engine == "auto":
        return None
    fitting = [build for build in builds if build.engine.value == engine]
    if not fitting:
        allowed = ", ".join(dict.fromkeys(build.engine.value for build in builds))
        raise UserError(f"--device is {engine}; for this machine: auto, {allowed}")
    return fitting[0]


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
    device = result.setdefault("SDAMD_DEVICE", machine.device) if machine.device else ""
    if device.partition(":")[0] != machine.device:
        notes.append(
            f"SDAMD_DEVICE stays {device!r} as you set it, although {build.name} was chosen; "
            "`--device auto` before the command goes back to the first choice"
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
