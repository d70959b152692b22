"""Which torch this machine needs: the support table, GPU x operating system -> packages.

`choose_build` is the whole interface. Everything that a person reads about the choice (why it
is this build, why it is not the GPU, why a variable is set) is decided here, next to the row.
Nothing here imports torch: the table is read before torch is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sdamd.errors import HardwareError
from sdamd.hardware.gpu import Gpu, Kind
from sdamd.hardware.tuning import Variable, variables_of


class Engine(StrEnum):
    """What computes."""

    ROCM = "rocm"
    DIRECTML = "directml"
    DIRECTML_CPU = "directml-cpu"
    """The graphs of DirectML on onnxruntime's CPU provider: to try them without Windows."""
    CPU = "cpu"


Python = tuple[int, int]

PYTHONS: tuple[Python, Python] = (3, 11), (3, 14)
"""First and last Python for which every wheel of the table is published."""

CPU_TORCH = "2.13.0"
DIRECTML_PACKAGE = "onnxruntime-directml==1.24.4"
ONNXRUNTIME_PACKAGE = "onnxruntime==1.24.4"

PYTORCH_INDEX = "https://download.pytorch.org/whl"
AMD_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What to install for one machine, and what must be true afterwards.

    `packages` are installed first and alone, from `index` (None: from where pip installs
    everything else); `extra_packages` come later, together with sdamd. `torch` is the exact
    version, with its local part (`+rocm6.4`) where the build has one. `expect` is how
    `torch.version.hip` must begin, or None where it must not be set.
    """

    name: str
    engine: Engine
    reason: str
    torch: str
    packages: tuple[str, ...]
    index: str | None = None
    extra_packages: tuple[str, ...] = ()
    environment: tuple[Variable, ...] = ()
    expect: str | None = None
    python: tuple[Python, Python] = PYTHONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A published ROCm build of torch.

    `archs` are the gfx targets whose kernels it holds. `per_device`: the kernels are in a
    package per target, which the extra `device-<gfx>` adds. `wsl`: finds the GPU of WSL2, which
    has no /dev/kfd. `windows` are the targets with kernels in its builds for Windows.
    """

    torch: str
    index: str
    hip: str
    archs: frozenset[str]
    per_device: bool = False
    wsl: bool = False
    windows: frozenset[str] = frozenset()


def _archs(*numbers: str) -> frozenset[str]:
    return frozenset(f"gfx{number}" for number in numbers)


# Source of the lists: the arch lists in the build scripts of pytorch/pytorch (.ci), and the
# device extras that RELEASES.md of ROCm/TheRock names (both as of August 2026).
_ROCM63_ARCHS = _archs(
    "900", "906", "908", "90a", "942", "1030", "1100", "1101", "1102", "1200", "1201"
)

PYTORCH_ROCM63 = Wheel(
    torch="2.9.1+rocm6.3", index=f"{PYTORCH_INDEX}/rocm6.3", hip="6.3", archs=_ROCM63_ARCHS
)
PYTORCH_ROCM64 = Wheel(
    torch="2.9.1+rocm6.4", index=f"{PYTORCH_INDEX}/rocm6.4", hip="6.4", archs=_ROCM63_ARCHS
)
PYTORCH_ROCM72 = Wheel(
    torch="2.13.0+rocm7.2",
    index=f"{PYTORCH_INDEX}/rocm7.2",
    hip="7.2",
    archs=_ROCM63_ARCHS | _archs("950", "1150", "1151"),
)
_AMD_RADEONS = (
    _archs("1010", "1011", "1012", "1030", "1031", "1032", "1033", "1034", "1035", "1036")
    | _archs("1100", "1101", "1102", "1103", "1150", "1151", "1152", "1153", "1200", "1201")
)  # fmt: skip
AMD_ROCM714 = Wheel(
    torch="2.12.0+rocm7.14.1",
    index=AMD_INDEX,
    hip="7.14",
    archs=_AMD_RADEONS | _archs("908", "90a", "942", "950"),
    per_device=True,
    wsl=True,
    windows=_AMD_RADEONS,
)

_WHEELS: Mapping[str, tuple[tuple[Wheel, ...], str]] = {
    # first choice, then what to try when it fails | why this order
    **dict.fromkeys(
        ("gfx1030", "gfx1100", "gfx1101", "gfx1102"),
        (
            (PYTORCH_ROCM64, PYTORCH_ROCM72, AMD_ROCM714),
            "the build with the longest record on this GPU",
        ),
    ),
    **dict.fromkeys(
        ("gfx1200", "gfx1201"),
        ((PYTORCH_ROCM72, AMD_ROCM714), "RDNA 4 is slow and short of memory before ROCm 7"),
    ),
    **dict.fromkeys(
        ("gfx1150", "gfx1151"),
        ((AMD_ROCM714, PYTORCH_ROCM72), "the build that AMD names for this APU"),
    ),
    "gfx1103": (
        (AMD_ROCM714, PYTORCH_ROCM64),
        "AMD's own index has kernels for this APU, pytorch.org's builds do not",
    ),
    **dict.fromkeys(
        ("gfx1152", "gfx1153"), ((AMD_ROCM714,), "only AMD's own index has kernels for this APU")
    ),
    **dict.fromkeys(
        ("gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035"),
        (
            (AMD_ROCM714, PYTORCH_ROCM64),
            "AMD's own index has native kernels for this GPU, so that it need not pose as gfx1030",
        ),
    ),
    **dict.fromkeys(
        ("gfx1010", "gfx1011", "gfx1012"),
        ((AMD_ROCM714,), "only AMD's own index has kernels for RDNA 1"),
    ),
    **dict.fromkeys(
        ("gfx900", "gfx906"),
        ((PYTORCH_ROCM63,), "later builds lose tuned matrix kernels for Vega"),
    ),
    # AMD's 2.12.0+rocm7.14 fails on gfx90a with hipErrorInvalidImage (ROCm/TheRock#7081).
    **dict.fromkeys(("gfx908", "gfx90a"), ((PYTORCH_ROCM72,), "pytorch.org builds it for CDNA")),
    **dict.fromkeys(
        ("gfx942", "gfx950"), ((PYTORCH_ROCM72, AMD_ROCM714), "pytorch.org builds it for CDNA")
    ),
}

_NO_WHEELS: Mapping[str, str] = {
    "gfx803": "ROCm dropped this generation (Polaris, Fiji) and no published torch has kernels "
    "for it; under Windows sdamd uses it through DirectML",
    "gfx902": "no published torch has kernels for this APU",
    "gfx90c": "no published torch has kernels for this APU",
    "gfx1013": "no published torch has kernels for this APU",
    "gfx1036": "its two compute units are slower than the CPU beside them",
}

# A stand-in must share the instruction set: never across a generation.
# Source: amdgpu targets in LLVM; the values are those that users report to work.
_STAND_INS: Mapping[str, tuple[str, frozenset[str]]] = {
    "gfx1030": ("10.3.0", _archs("1031", "1032", "1033", "1034", "1035", "1036")),
    "gfx1100": ("11.0.0", _archs("1101", "1102", "1103", "1150", "1151")),
}


def choose_build(
    gpu: Gpu | None, platform: str, python: Python, machine: str = "x86_64",
    *, engine: Engine | None = None,
) -> Build:  # fmt: skip
    """Return the first choice for `gpu` on `platform` (`linux`, `wsl`, `windows`, `darwin`).

    With `engine` it is the first one of that engine.

    Raises:
        HardwareError: the build exists, but not for this Python; or this machine has none for
            the engine.
    """
    builds = candidates(gpu, platform, python, machine)
    if engine is None:
        return builds[0]
    offered = {build.engine: build for build in (*reversed(builds), _directml_cpu(platform))}
    if engine not in offered:
        names = ", ".join(sorted(offered))
        raise HardwareError(f"no build of {engine} is known for this machine; allowed {names}")
    return offered[engine]


def candidates(
    gpu: Gpu | None, platform: str, python: Python, machine: str = "x86_64"
) -> tuple[Build, ...]:
    """Return every build that could run on this machine: the first choice first, the CPU last.

    Raises:
        HardwareError: the kind of build that fits best exists, but not for this Python.
    """
    builds = (*_directml(gpu, platform), *_rocm(gpu, platform, machine))
    builds += (_cpu(_why_cpu(gpu, platform, machine) if not builds else "every machine has a CPU"),)
    fitting = tuple(build for build in builds if build.python[0] <= python <= build.python[1])
    if not fitting or fitting[0].engine is not builds[0].engine:
        raise HardwareError(_wrong_python(builds[0], python))
    return fitting


def override_for(arch: str, wheel_archs: frozenset[str]) -> str | None:
    """Return the HSA_OVERRIDE_GFX_VERSION with which `arch` runs kernels of `wheel_archs`.

    None where the wheel has native kernels: the variable would then be a fault.

    Raises:
        HardwareError: neither `arch` nor a stand-in of its generation is in the wheel.
    """
    if arch in wheel_archs:
        return None
    for stand_in, (value, archs) in _STAND_INS.items():
        if arch in archs and stand_in in wheel_archs:
            return value
    known = ", ".join(sorted(wheel_archs))
    raise HardwareError(f"this torch has no kernels for {arch or 'this GPU'}; it has: {known}")


def wrong_torch(build: Build, *, version: str, hip: str | None) -> str | None:
    """Say how an installed torch differs from `build`, or None where it is the right one.

    `version` is `torch.__version__`, `hip` is `torch.version.hip`.
    """
    public, _, local = build.torch.partition("+")
    if version.partition("+")[0] != public or (local and version != build.torch):
        return f"torch is {version}; {build.name} needs {build.torch}"
    if build.expect is None and hip is not None:
        return f"torch is built for ROCm {hip}; {build.name} needs a build without ROCm"
    if build.expect is not None and not f"{hip}.".startswith(f"{build.expect}."):
        found = f"is built for ROCm {hip}" if hip else "has no ROCm in it (torch.version.hip unset)"
        return f"torch {found}; {build.name} needs ROCm {build.expect}"
    return None


def _rocm(gpu: Gpu | None, platform: str, machine: str) -> tuple[Build, ...]:
    if gpu is None or platform not in {"linux", "wsl", "windows"} or not _is_x86(machine):
        return ()
    if gpu.arch not in _WHEELS or _is_display_only(gpu):
        return ()
    wheels, why = _WHEELS[gpu.arch]
    if platform == "wsl":
        wheels = tuple(wheel for wheel in wheels if wheel.wsl)
        why = "the build that finds the GPU of WSL2 by itself"
    if platform == "windows":
        wheels = tuple(wheel for wheel in wheels if gpu.arch in wheel.windows)
        why = "AMD builds it for Windows; younger there than DirectML, and often faster"
    return tuple(
        _rocm_build(gpu, wheel, why=why if number == 0 else "an alternative to the first choice")
        for number, wheel in enumerate(wheels)
    )


def _rocm_build(gpu: Gpu, wheel: Wheel, *, why: str) -> Build:
    first_choice = _WHEELS[gpu.arch][0][0]
    return Build(
        name=f"rocm-{gpu.arch}" + ("" if wheel is first_choice else f"-{wheel.torch}"),
        engine=Engine.ROCM,
        reason=f"{gpu.name or gpu.arch} is {gpu.arch}: {why}",
        torch=wheel.torch,
        packages=_torch_packages(gpu.arch, wheel),
        index=wheel.index,
        environment=variables_of(gpu.arch, override_for(gpu.arch, wheel.archs)),
        expect=wheel.hip,
    )


_GFX11 = _archs("1100", "1101", "1102", "1103", "1150", "1151", "1152", "1153")


def _torch_packages(arch: str, wheel: Wheel) -> tuple[str, ...]:
    if not wheel.per_device:
        return (f"torch=={wheel.torch}",)
    packages: tuple[str, ...] = (f"torch[device-{arch}]=={wheel.torch}",)
    if arch in _GFX11:
        # The package of the target alone lacks the fused attention images, which then fail with
        # a deferred hipErrorInvalidValue (pytorch/pytorch#194498). Can go when the extra of the
        # pinned release depends on the family's package by itself.
        packages += (f"amd-torch-device-gfx11=={wheel.torch}",)
    return packages


def _is_display_only(gpu: Gpu) -> bool:
    return gpu.arch == "gfx1036" or (gpu.kind is Kind.APU and 0 < gpu.compute_units <= 2)


def _is_x86(machine: str) -> bool:
    return machine.lower() in {"x86_64", "amd64"}


def _directml(gpu: Gpu | None, platform: str) -> tuple[Build, ...]:
    if gpu is None or platform != "windows":
        return ()
    name = gpu.name or "the GPU"
    return (
        Build(
            name="directml",
            engine=Engine.DIRECTML,
            reason=f"{name} under Windows: DirectML runs on every Radeon with a Direct3D 12 driver",
            torch=CPU_TORCH,
            packages=(f"torch=={CPU_TORCH}",),
            extra_packages=(DIRECTML_PACKAGE,),
        ),
    )


def _directml_cpu(platform: str) -> Build:
    # DirectML's package holds the CPU provider too, and the two must not lie side by side.
    package = DIRECTML_PACKAGE if platform == "windows" else ONNXRUNTIME_PACKAGE
    return Build(
        name="directml-cpu",
        engine=Engine.DIRECTML_CPU,
        reason="the graphs of DirectML were asked for, on the CPU",
        torch=CPU_TORCH,
        packages=(f"torch=={CPU_TORCH}",),
        extra_packages=(package,),
    )


def _cpu(reason: str) -> Build:
    return Build(
        name="cpu",
        engine=Engine.CPU,
        reason=reason,
        torch=CPU_TORCH,
        packages=(f"torch=={CPU_TORCH}",),
    )


def _why_cpu(gpu: Gpu | None, platform: str, machine: str) -> str:
    if gpu is None and platform == "wsl":
        return (
            "WSL2 shows its GPU through /dev/dxg only, where sdamd cannot see what it is, so it "
            "computes on the CPU; run sdamd under Windows itself to use the GPU"
        )
    if gpu is None:
        return "no AMD GPU was found, so it computes on the CPU"
    name = f"{gpu.name or 'the GPU'} ({gpu.arch or 'of unknown architecture'})"
    if platform not in {"linux", "wsl"}:
        return f"{name} cannot be used under {platform}, so it computes on the CPU"
    if _is_display_only(gpu):
        return f"{name}: {_NO_WHEELS['gfx1036']}, so it computes on the CPU"
    if gpu.arch in _WHEELS and not _is_x86(machine):
        return f"{name}: ROCm is published for x86-64 only, not for {machine}; the CPU computes"
    if gpu.arch in _WHEELS:
        return f"{name}: no torch for it works inside WSL2, so it computes on the CPU"
    why = _NO_WHEELS.get(gpu.arch, "no published torch is known to have kernels for it")
    return f"{name}: {why}; here it computes on the CPU"


def _wrong_python(build: Build, python: Python) -> str:
    first, last = (f"{major}.{minor}" for major, minor in build.python)
    return (
        f"{build.name} exists for Python {first} to {last}; this is Python "
        f"{python[0]}.{python[1]}: install Python 3.12 and start sdamd with it"
    )
