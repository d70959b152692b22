import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sdamd.hardware import folders
from sdamd.hardware.folders import Folder, read_folders


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def miopen(environ: dict[str, str]) -> list[Folder]:
    return [folder for folder in read_folders(environ) if folder.is_miopen]


@pytest.mark.report("D07")
def test_miopen_writes_below_home_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert [f.path for f in miopen(home)] == [
        tmp_path / ".config/miopen",
        tmp_path / ".cache/miopen",
    ]
    database, cache = miopen(home | {"MIOPEN_USER_DB_PATH": "/elsewhere"})
    assert (database.path, database.variable) == (Path("/elsewhere"), "MIOPEN_USER_DB_PATH")
    assert (cache.path, cache.variable) == (tmp_path / ".cache/miopen", "")
    assert not cache.problem
    assert cache.free_bytes > 0


@pytest.mark.report("D07")
def test_a_cache_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / ".config").touch()
    database, cache = miopen({"HOME": str(tmp_path)})
    assert database.problem == f"{tmp_path / '.config'} is a file"
    assert not cache.problem


@pytest.mark.report("D07")
@pytest.mark.skipif(sys.platform == "win32" or os.getuid() == 0, reason="root may write anywhere")
def test_a_home_that_cannot_be_written_is_said() -> None:
    assert all("cannot be written" in f.problem for f in miopen({"HOME": "/nonexistent"}))


@pytest.mark.report("D07")
def test_rights_are_asked_of_the_nearest_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def refuse(path: Path, mode: int) -> bool:
        asked.append(Path(path))
        return False

    monkeypatch.setattr(os, "access", refuse)
    found = miopen({"HOME": str(tmp_path / "not/there/yet")})
    assert {f.problem for f in found} == {f"{tmp_path} cannot be written by this user"}
    assert set(asked) >= {tmp_path}


@pytest.mark.report("D07")
@pytest.mark.parametrize(
    ("mounts", "remote"),
    [
        ("/dev/sda / ext4 rw 0 0\nserver:/home {place} nfs4 rw 0 0\n", "nfs4"),
        ("server:/x / nfs4 rw 0 0\n/dev/sdb {place} ext4 rw 0 0\n", ""),
        ("short\n\n", ""),
    ],
)
def test_a_folder_on_another_machine_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, remote: str
) -> None:
    monkeypatch.setattr(folders, "read_text", lambda path: mounts.format(place=tmp_path))
    assert {f.remote for f in miopen({"HOME": str(tmp_path)})} == {remote}


def test_the_data_folder_and_the_temporary_one_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 7, 3))
    temporary, data = read_folders({"SDAMD_HOME": str(tmp_path)}, tmp_path / "new")
    assert (data.what, data.variable, data.free_bytes) == ("sdamd's data", "SDAMD_HOME", 3)
    assert temporary.free_bytes == 3
    assert list(tmp_path.iterdir()) == []  # nothing was made
