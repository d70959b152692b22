import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.hardware.installed import read_installed
from sdamd.hardware.runtime import AMD_ROCM714, PYTORCH_ROCM64
from tests.hardware.made import AMD_TORCH, CPU_TORCH, CUDA_TORCH, torch, write


def installed(root: Path, files: dict[str, str]) -> Any:
    return read_installed([str(write(root, files) / "python")])


@pytest.mark.parametrize(
    ("files", "kind", "archs"),
    [
        (torch(), "built for ROCm 6.4.43484", PYTORCH_ROCM64.archs),
        (CPU_TORCH, "built for the CPU alone", None),
        (CUDA_TORCH, "built for CUDA 12.8", None),
        (torch("2.99.0+rocm9.9", "9.9"), "built for ROCm 9.9", None),
        (AMD_TORCH, "built for ROCm 7.14.60850", None),
        ({"python/torch/__init__.py": ""}, "of an unknown kind", None),
    ],
)
def test_what_torch_is_follows_from_its_files(
    tmp_path: Path, files: dict[str, str], kind: str, archs: frozenset[str] | None
) -> None:
    found = installed(tmp_path, files).torch
    assert (found.kind, found.archs) == (kind, archs)


def test_amds_wheel_has_the_kernels_of_the_packages_beside_it(tmp_path: Path) -> None:
    device = {
        f"python/amd_torch_device_{name}-2.12.0+rocm7.14.1.dist-info/METADATA": ""
        for name in ("gfx1100", "gfx11", "gfx803")
    }
    found = installed(tmp_path, AMD_TORCH | device)
    assert AMD_ROCM714.torch == found.torch.version
    assert found.torch.archs == {"gfx1100"}
    assert found.by_device


def test_packages_are_listed_by_their_normal_names(tmp_path: Path) -> None:
    files = {
        f"python/{name}.dist-info/METADATA": ""
        for name in ("onnxruntime_directml-1.24.4", "torch-2.9.1+rocm6.4", "numpy-2.0", "broken")
    }
    assert installed(tmp_path, files).packages == {
        "onnxruntime-directml": "1.24.4",
        "torch": "2.9.1+rocm6.4",
    }


def test_a_python_without_torch(tmp_path: Path) -> None:
    assert read_installed([str(tmp_path), "/nowhere", ""]).torch is None


@pytest.mark.report("A19")
def test_the_torch_of_this_python_is_found_and_not_imported() -> None:
    """A19: the interpreter is named, since another one on the path may have another torch."""
    found = read_installed()
    assert found.executable == sys.executable
    assert found.torch is not None
    assert found.torch.version.partition("+")[0] == found.packages["torch"].partition("+")[0]
    assert found.torch.kind != "of an unknown kind"


@given(content=st.binary(max_size=300))
def test_any_version_file_is_survived(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    root = tmp_path_factory.mktemp("python")
    (root / "torch").mkdir()
    (root / "torch/version.py").write_bytes(content)
    found = read_installed([str(root)]).torch
    assert found is not None
    assert found.folder == root / "torch"
