"""Where presets are found and kept."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.errors import BadRequest, StorageError, UserError
from sdamd.preset.library import add, entries, file_bytes, find, slug

TEXT = b'schema = 1\nname = "My Look"\n\n# a remark\n[request]\nsteps=5\n'


def test_a_preset_is_kept_byte_for_byte_and_found_by_each_of_its_names(tmp_path: Path) -> None:
    path = add(TEXT, "My Look", tmp_path / "presets")
    assert path.read_bytes() == TEXT
    for name in ("My Look", "my look", "MY-LOOK", "my-look", str(path)):
        assert find(name, tmp_path / "presets")[1] == path


def test_one_of_the_same_name_is_never_overwritten_unasked(tmp_path: Path) -> None:
    path = add(TEXT, "a", tmp_path)
    with pytest.raises(BadRequest, match="is there already"):
        add(b"other", "A", tmp_path)
    assert path.read_bytes() == TEXT
    add(b"other", "a", tmp_path, replace=True)
    assert path.read_bytes() == b"other"
    assert [p.name for p in tmp_path.iterdir()] == ["a.toml"]


def test_a_name_that_is_not_there_comes_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the nearest: Portrait"):
        find("potrait sd15", tmp_path)


@pytest.mark.report("E27")
def test_a_broken_preset_is_listed_with_its_fault_and_never_another_in_its_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "portrait-sd15.toml").write_bytes(b"schema = 1\nname = 3\n")
    (broken,) = (e for e in entries(tmp_path) if e.own)
    assert broken.problems == ("portrait-sd15.toml, line 2, column 1: name is 3; allowed is text",)
    with pytest.raises(BadRequest, match="name is 3"):
        find("portrait-sd15", tmp_path)
    assert (tmp_path / "portrait-sd15.toml").read_bytes() == b"schema = 1\nname = 3\n"


def test_ones_own_preset_hides_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    add(b'schema = 1\nname = "Crisp"\n[request]\nsteps = 3\n', "Crisp", tmp_path)
    assert find("crisp", tmp_path)[0].values == {"steps": 3}
    assert sum(entry.name == "Crisp" for entry in entries(tmp_path)) == 1


def test_a_file_of_fifty_megabytes_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    with path.open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(BadRequest, match="50000000 bytes; allowed at most"):
        file_bytes(path)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        find(str(tmp_path / "none.toml"), tmp_path)


@given(st.text(min_size=1, max_size=300))
def test_a_slug_is_a_legal_file_name_everywhere(name: str) -> None:
    made = slug(name)
    assert made
    assert len(made.encode()) <= 130
    assert not set(made) & set('/\\:*?"<>| .')
    assert made.split(".")[0] not in {"con", "nul", "prn", "aux", "com1", "lpt9"}
    assert slug(made) == made
