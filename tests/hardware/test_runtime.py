import re
import tomllib
from pathlib import Path

import pytest

from sdamd.errors import HardwareError
from sdamd.hardware.gpu import ARCHITECTURES, Gpu, Kind
from sdamd.hardware.runtime import (
    AMD_ROCM714,
    PYTORCH_ROCM64,
    PYTORCH_ROCM72,
    Build,
    Engine,
    Wheel,
    candidates,
    choose_build,
    override_for,
    wrong_torch,
)

PYTORCH = "https://download.pytorch.org/whl/"
AMD = "https://repo.amd.com/rocm/whl-multi-arch/"
PYTHON = (3, 12)


def gpu(arch: str, *, kind: Kind = Kind.DISCRETE, compute_units: int = 32) -> Gpu:
    return Gpu(
        index=0,
        name="Radeon",
        arch=arch,
        vram_bytes=8 * 2**30,
        kind=kind,
        compute_units=compute_units,
    )


def variables(build: Build) -> dict[str, str]:
    return {variable.name: variable.value for variable in build.environment}


@pytest.mark.parametrize(
    ("arch", "packages", "index"),
    [
        ("gfx900", ["torch==2.9.1+rocm6.3"], PYTORCH + "rocm6.3"),
        ("gfx906", ["torch==2.9.1+rocm6.3"], PYTORCH + "rocm6.3"),
        ("gfx908", ["torch==2.13.0+rocm7.2"], PYTORCH + "rocm7.2"),
        ("gfx90a", ["torch==2.13.0+rocm7.2"], PYTORCH + "rocm7.2"),
        ("gfx942", ["torch==2.13.0+rocm7.2"], PYTORCH + "rocm7.2"),
        ("gfx950", ["torch==2.13.0+rocm7.2"], PYTORCH + "rocm7.2"),
        ("gfx1010", ["torch[device-gfx1010]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1011", ["torch[device-gfx1011]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1012", ["torch[device-gfx1012]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1030", ["torch==2.9.1+rocm6.4"], PYTORCH + "rocm6.4"),
        ("gfx1031", ["torch[device-gfx1031]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1032", ["torch[device-gfx1032]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1033", ["torch[device-gfx1033]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1034", ["torch[device-gfx1034]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1035", ["torch[device-gfx1035]==2.12.0+rocm7.14.1"], AMD),
        ("gfx1100", ["torch==2.9.1+rocm6.4"], PYTORCH + "rocm6.4"),
        ("gfx1101", ["torch==2.9.1+rocm6.4"], PYTORCH + "rocm6.4"),
        ("gfx1102", ["torch==2.9.1+rocm6.4"], PYTORCH + "rocm6.4"),
        (
            "gfx1103",
            [
                "torch[device-gfx1103]==2.12.0+rocm7.14.1",
                "amd-torch-device-gfx11==2.12.0+rocm7.14.1",
            ],
            AMD,
        ),
        (
            "gfx1151",
            [
                "torch[device-gfx1151]==2.12.0+rocm7.14.1",
                "amd-torch-device-gfx11==2.12.0+rocm7.14.1",
            ],
            AMD,
        ),
        ("gfx1200", ["torch==2.13.0+rocm7.2"], PYTORCH + "rocm7.2"),
        ("gfx1201", ["torch==2.13.0+rocm7.2"], PYTORCH + "rocm7.2"),
    ],
)
def test_linux_installs_the_rocm_build_with_kernels_for_the_gpu(
    arch: str, packages: list[str], index: str
) -> None:
    build = choose_build(gpu(arch), "linux", PYTHON)
    assert (build.name, build.engine) == (f"rocm-{arch}", Engine.ROCM)
    assert (list(build.packages), build.index) == (packages, index)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_the_table_and_the_architectures_agree_on_what_rocm_supports(arch: str) -> None:
    build = choose_build(gpu(arch), "linux", PYTHON)
    # Two compute units: ROCm would run on it, and the CPU beside it is faster.
    expected = ARCHITECTURES[arch].rocm and arch != "gfx1036"
    assert (build.engine is Engine.ROCM) == expected


ALL_ROCM_BUILDS = [
    pytest.param(arch, build, id=f"{arch} {build.torch} {platform}")
    for platform in ("linux", "wsl", "windows")
    for arch in sorted(ARCHITECTURES)
    for build in candidates(gpu(arch), platform, PYTHON)
    if build.engine is Engine.ROCM
]


@pytest.mark.parametrize(("arch", "build"), ALL_ROCM_BUILDS)
def test_a_rocm_build_pins_its_local_version_on_one_index(arch: str, build: Build) -> None:
    """A20: a pair that the index lacks must fail, not become what another index has."""
    assert build.index is not None
    assert re.fullmatch(r"2\.\d+\.\d+\+rocm\d+\.\d+(\.\d+)?", build.torch)
    assert all(package.endswith(f"=={build.torch}") for package in build.packages)
    local = build.torch.partition("+rocm")[2]
    assert build.expect
    assert f"{local}.".startswith(f"{build.expect}.")


@pytest.mark.parametrize(("arch", "build"), ALL_ROCM_BUILDS)
def test_a_rocm_build_sets_what_torch_reads_when_it_is_imported(arch: str, build: Build) -> None:
    found = variables(build)
    assert found["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] == "1"
    assert found["MIOPEN_FIND_MODE"] == "2"
    assert found["PYTORCH_ALLOC_CONF"] == found["PYTORCH_HIP_ALLOC_CONF"]
    assert "expandable_segments" not in found["PYTORCH_ALLOC_CONF"]
    assert all(variable.reason for variable in build.environment)


@pytest.mark.parametrize(("arch", "build"), ALL_ROCM_BUILDS)
def test_torch_of_every_build_satisfies_the_package(arch: str, build: Build) -> None:
    assert (2, 9) <= minor(build.torch) < upper_bound_of_torch()


def test_torch_of_the_cpu_build_satisfies_the_package() -> None:
    assert minor(choose_build(None, "linux", PYTHON).torch) < upper_bound_of_torch()


def minor(version: str) -> tuple[int, int]:
    first, second, *_ = version.split(".")
    return int(first), int(second)


def upper_bound_of_torch() -> tuple[int, int]:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    line = next(d for d in project["project"]["dependencies"] if re.match(r"torch[<>=]", d))
    match = re.search(r"<(\d+\.\d+)", line)
    assert match
    return minor(match[1])


@pytest.mark.parametrize(
    ("arch", "wheel", "value"),
    [
        pytest.param("gfx1031", PYTORCH_ROCM64, "10.3.0", id="A09 gfx1031"),
        pytest.param("gfx1032", PYTORCH_ROCM64, "10.3.0", id="A09 gfx1032"),
        pytest.param("gfx1036", PYTORCH_ROCM64, "10.3.0", id="A09 gfx1036"),
        pytest.param("gfx1030", PYTORCH_ROCM64, None, id="A09 native"),
        pytest.param("gfx1103", PYTORCH_ROCM64, "11.0.0", id="A10 A11 gfx1103"),
        pytest.param("gfx1151", PYTORCH_ROCM64, "11.0.0", id="A10 gfx1151"),
        pytest.param("gfx1151", PYTORCH_ROCM72, None, id="A10 gfx1151 native"),
        pytest.param("gfx1101", PYTORCH_ROCM64, None, id="gfx1101 native"),
        pytest.param("gfx1032", AMD_ROCM714, None, id="gfx1032 native"),
    ],
)
def test_the_override_is_of_the_same_generation(arch: str, wheel: Wheel, value: str | None) -> None:
    assert override_for(arch, wheel.archs) == value


@pytest.mark.parametrize(
    ("arch", "archs"),
    [
        ("gfx1010", {"gfx1030", "gfx1100"}),
        ("gfx803", {"gfx900"}),
        ("gfx1103", {"gfx1030"}),
        ("gfx1150", {"gfx1030"}),
        ("gfx1201", {"gfx1100"}),
        ("", {"gfx1100"}),
    ],
)
def test_no_override_crosses_a_generation(arch: str, archs: set[str]) -> None:
    """A09, A10: a GPU without a stand-in is refused, with what the wheel has."""
    with pytest.raises(HardwareError, match=min(archs)):
        override_for(arch, frozenset(archs))


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_the_first_choice_never_needs_an_override(arch: str) -> None:
    """A09, A10: AMD's index has native kernels where pytorch.org's builds have none."""
    assert "HSA_OVERRIDE_GFX_VERSION" not in variables(choose_build(gpu(arch), "linux", PYTHON))


@pytest.mark.parametrize(("arch", "value"), [("gfx1032", "10.3.0"), ("gfx1103", "11.0.0")])
def test_the_second_choice_brings_its_override(arch: str, value: str) -> None:
    second = candidates(gpu(arch), "linux", PYTHON)[1]
    assert second.name == f"rocm-{arch}-2.9.1+rocm6.4"
    assert variables(second)["HSA_OVERRIDE_GFX_VERSION"] == value


@pytest.mark.parametrize("arch", [*sorted(ARCHITECTURES), "", "gfx9999"])
def test_windows_uses_directml_for_every_gpu(arch: str) -> None:
    build = choose_build(gpu(arch), "windows", PYTHON)
    assert (build.name, build.engine, build.index) == ("directml", Engine.DIRECTML, None)
    assert build.packages == ("torch==2.13.0",)
    assert build.extra_packages == ("onnxruntime-directml==1.24.4",)
    assert not build.environment


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_windows_has_native_rocm_as_the_second_choice_for_radeons_that_it_runs(arch: str) -> None:
    names = [build.engine for build in candidates(gpu(arch), "windows", PYTHON)]
    row = ARCHITECTURES[arch]
    native = row.rocm and row.generation.startswith("RDNA") and arch != "gfx1036"
    assert names == [Engine.DIRECTML, *([Engine.ROCM] if native else []), Engine.CPU]
    if not native:
        with pytest.raises(HardwareError, match="no build of rocm is known for this machine"):
            choose_build(gpu(arch), "windows", PYTHON, engine=Engine.ROCM)
        return
    build = choose_build(gpu(arch), "windows", PYTHON, engine=Engine.ROCM)
    assert build.index == AMD
    assert build.packages[0] == f"torch[device-{arch}]==2.12.0+rocm7.14.1"
    assert "HSA_OVERRIDE_GFX_VERSION" not in variables(build)


@pytest.mark.parametrize("platform", ["linux", "wsl", "windows", "darwin"])
@pytest.mark.parametrize("arch", ["gfx1100", "gfx803"])
def test_each_engine_can_be_asked_for_where_it_exists(arch: str, platform: str) -> None:
    offered = {build.engine for build in candidates(gpu(arch), platform, PYTHON)}
    for engine in Engine:
        if engine in offered or engine is Engine.DIRECTML_CPU:
            assert choose_build(gpu(arch), platform, PYTHON, engine=engine).engine is engine
        else:
            with pytest.raises(HardwareError, match=f"no build of {engine} is known"):
                choose_build(gpu(arch), platform, PYTHON, engine=engine)


def test_the_first_build_of_an_engine_is_the_first_choice() -> None:
    asked = choose_build(gpu("gfx1100"), "linux", PYTHON, engine=Engine.ROCM)
    assert asked == choose_build(gpu("gfx1100"), "linux", PYTHON)


def test_the_graphs_of_directml_run_on_the_cpu_of_any_system() -> None:
    packages = {
        platform: choose_build(None, platform, PYTHON, engine=Engine.DIRECTML_CPU).extra_packages
        for platform in ("linux", "windows")
    }
    assert packages == {
        "linux": ("onnxruntime==1.24.4",),
        "windows": ("onnxruntime-directml==1.24.4",),
    }


@pytest.mark.parametrize("platform", ["linux", "wsl", "windows", "darwin"])
def test_without_a_gpu_the_first_install_is_the_plain_cpu_torch(platform: str) -> None:
    build = choose_build(None, platform, PYTHON)
    assert (build.name, build.engine) == ("cpu", Engine.CPU)
    assert (build.packages, build.index, build.expect) == (("torch==2.13.0",), None, None)


@pytest.mark.parametrize(
    ("found", "platform", "machine", "words"),
    [
        (None, "linux", "x86_64", "no AMD GPU"),
        (gpu("gfx803"), "linux", "x86_64", "Polaris"),
        (gpu("gfx90c"), "linux", "x86_64", "no published torch"),
        (gpu("gfx9999"), "linux", "x86_64", "gfx9999"),
        (gpu(""), "linux", "x86_64", "unknown architecture"),
        (gpu("gfx1036"), "linux", "x86_64", "two compute units"),
        (gpu("gfx1103", kind=Kind.APU, compute_units=2), "linux", "x86_64", "two compute units"),
        (gpu("gfx1100"), "linux", "aarch64", "not for aarch64"),
        (gpu("gfx900"), "wsl", "x86_64", "WSL2"),
        (gpu("gfx1100"), "darwin", "arm64", "darwin"),
    ],
)
def test_the_cpu_build_says_why_it_is_not_the_gpu(
    found: Gpu | None, platform: str, machine: str, words: str
) -> None:
    build = choose_build(found, platform, PYTHON, machine)
    assert build.engine is Engine.CPU
    assert words in build.reason


def test_wsl_without_a_visible_gpu_is_not_sent_to_linux_remedies() -> None:
    """A18: in WSL neither the amdgpu module nor the render group is what is missing."""
    reason = choose_build(None, "wsl", PYTHON).reason
    assert "Windows" in reason
    assert not re.search(r"modprobe|render|video|usermod", reason)


def test_wsl_takes_the_wheel_that_finds_its_gpu() -> None:
    """A18: the builds of pytorch.org look for /dev/kfd only."""
    builds = candidates(gpu("gfx1100"), "wsl", PYTHON)
    assert [build.name for build in builds] == ["rocm-gfx1100-2.12.0+rocm7.14.1", "cpu"]


@pytest.mark.parametrize("platform", ["linux", "windows"])
@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_the_cpu_is_always_the_last_choice(arch: str, platform: str) -> None:
    assert candidates(gpu(arch), platform, PYTHON)[-1].name == "cpu"


@pytest.mark.parametrize("python", [(3, 10), (3, 15)])
@pytest.mark.parametrize(
    ("found", "platform"), [(gpu("gfx1100"), "linux"), (gpu(""), "windows"), (None, "linux")]
)
def test_an_unfit_python_is_named_before_pip_runs(
    found: Gpu | None, platform: str, python: tuple[int, int]
) -> None:
    """A22: no wheel for this Python, said with the versions that have one."""
    with pytest.raises(HardwareError, match=rf"3\.11 to 3\.14; this is Python 3\.{python[1]}"):
        choose_build(found, platform, python)


ROCM = choose_build(gpu("gfx1100"), "linux", PYTHON)
CPU = choose_build(None, "linux", PYTHON)


@pytest.mark.parametrize(
    ("build", "version", "hip", "words"),
    [
        (ROCM, "2.9.1+rocm6.4", "6.4.43484-123eb5128", None),
        (ROCM, "2.9.1+rocm6.4", None, "torch.version.hip unset"),
        (ROCM, "2.9.1+cu128", None, r"2\.9\.1\+cu128; rocm-gfx1100 needs 2\.9\.1\+rocm6\.4"),
        (ROCM, "2.9.1", None, r"needs 2\.9\.1\+rocm6\.4"),
        (ROCM, "2.13.0+cpu", None, r"needs 2\.9\.1\+rocm6\.4"),
        (ROCM, "2.9.1+rocm6.4", "6.40.1", "needs ROCm 6.4"),
        (CPU, "2.13.0+cpu", None, None),
        (CPU, "2.13.0", None, None),
        (CPU, "2.13.1", None, "needs 2.13.0"),
        (CPU, "2.13.0+rocm7.2", "7.2.53211", "without ROCm"),
    ],
)
def test_another_torch_than_the_chosen_one_is_recognised(
    build: Build, version: str, hip: str | None, words: str | None
) -> None:
    """A19, A20: a CPU or CUDA build in the place of the ROCm one."""
    problem = wrong_torch(build, version=version, hip=hip)
    if words is None:
        assert problem is None
    else:
        assert problem
        assert re.search(words, problem)
