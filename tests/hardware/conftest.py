"""Machines as folders: the recorded ones, and small ones that a test builds."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"

Build = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def machines() -> Path:
    return DATA / "machines"


@pytest.fixture
def reports() -> Path:
    return DATA / "reports"


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Write files (path below the root -> text) and return the root."""

    def write(files: Mapping[str, str]) -> Path:
        for path, text in files.items():
            target = tmp_path / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def sections(reports: Path) -> Callable[[str], dict[str, str]]:
    """The files of a report: `[path]` on a line, then the file's text; `#` starts a remark."""

    def read(name: str) -> dict[str, str]:
        files: dict[str, str] = {}
        path = ""
        for line in (reports / name).read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                path = line.strip("[]")
                files[path] = ""
            elif path and not line.startswith("#"):
                files[path] += line + "\n"
        return files

    return read


@pytest.fixture
def gpu_node() -> Callable[..., str]:
    """The lines of a GPU node's `properties`; a version of 0 leaves the line out."""

    def lines(version: int = 0, device_id: int = 0, **more: int) -> str:
        properties = {"simd_count": 64, "vendor_id": 4098, "device_id": device_id} | more
        if version:
            properties["gfx_target_version"] = version
        return "".join(f"{key} {value}\n" for key, value in properties.items())

    return lines
