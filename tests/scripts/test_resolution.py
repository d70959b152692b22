"""What would be installed on machines that are not here, asked of uv, which can stand for any."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sdamd.hardware.runtime import CPU_TORCH, DIRECTML_PACKAGE, PYTHONS

ROOT = Path(__file__).parents[2]
WINDOWS = "x86_64-pc-windows-msvc"
LINUX = "x86_64-unknown-linux-gnu"
VERSIONS = tuple(f"3.{minor}" for minor in range(PYTHONS[0][1], PYTHONS[1][1] + 1))
MACHINES = [(WINDOWS, version) for version in VERSIONS]
MACHINES += [(LINUX, VERSIONS[0]), (LINUX, VERSIONS[-1])]

NO_INDEX = re.compile(
    r"error sending request|network was disabled|timed out|HTTP status server error"
)

pytestmark = pytest.mark.slow

Packages = Mapping[str, str]


def ask(folder: Path, platform: str, python: str) -> subprocess.Popen[str]:
    """Start to resolve what the second step of start.py installs, from wheels alone."""
    requirements = [str(ROOT / "pyproject.toml")]
    requirements += ["directml.txt"] if platform == WINDOWS else []
    options = ["--python-platform", platform, "--python-version", python, "--only-binary", ":all:"]
    options += ["--constraints", "torch.txt", "--no-header", "--no-annotate"]
    return subprocess.Popen(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *options, *requirements],
        cwd=folder,  # uv reads the settings of the folder that it is started in
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def packages(asked: subprocess.Popen[str]) -> Packages | str:
    """What was chosen, or why nothing could be."""
    chosen, complaint = asked.communicate()
    if asked.returncode != 0:
        return complaint
    return dict(line.split("==") for line in chosen.splitlines())


@pytest.fixture(scope="module")
def resolutions(
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[tuple[str, str], Packages | str]:
    """The answers for every machine; asked together, since uv mostly waits for its index."""
    folder = tmp_path_factory.mktemp("resolution")
    (folder / "torch.txt").write_text(f"torch=={CPU_TORCH}\n", encoding="utf-8")
    (folder / "directml.txt").write_text(f"{DIRECTML_PACKAGE}\n", encoding="utf-8")
    asked = {machine: ask(folder, *machine) for machine in MACHINES}
    return {machine: packages(process) for machine, process in asked.items()}


@pytest.mark.parametrize(("platform", "python"), MACHINES)
def test_the_dependencies_resolve_with_exactly_one_onnxruntime(
    resolutions: Mapping[tuple[str, str], Packages | str], platform: str, python: str
) -> None:
    """Several onnxruntime distributions would overwrite each other's files."""
    chosen = resolutions[platform, python]
    if isinstance(chosen, str) and NO_INDEX.search(chosen):
        pytest.skip("uv reaches no package index, so nothing can be resolved")
    assert not isinstance(chosen, str), chosen
    runtimes = {f"{name}=={chosen[name]}" for name in chosen if name.startswith("onnxruntime")}
    assert runtimes == {DIRECTML_PACKAGE if platform == WINDOWS else "onnxruntime==1.24.4"}
    assert chosen["torch"] == CPU_TORCH
