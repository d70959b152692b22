import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdamd.hardware import kernel_cache
from sdamd.hardware.kernel_cache import SLOTS, KernelCache, claim, leave, mark_of

TORCH, GFX = "2.9.1+rocm6.4", "gfx1100"
NAMES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")


def folders(claimed: KernelCache) -> list[Path]:
    return [Path(claimed.variables[name]) for name in NAMES]


@pytest.mark.report("D07")
def test_miopen_gets_folders_of_its_owner_alone(tmp_path: Path) -> None:
    claimed = claim(tmp_path / "cache", TORCH, GFX, {})
    assert claimed.said == ()
    for folder in folders(claimed):
        assert folder.parent == tmp_path / "cache" / "miopen" / f"{TORCH}-{GFX}"
        assert list(folder.iterdir()) == []
        if os.name == "posix":
            assert folder.stat().st_mode & 0o777 == 0o700
            assert folder.parent.stat().st_mode & 0o777 == 0o700
    claimed.close()


@pytest.mark.report("D07")
def test_two_at_once_get_two_folders_and_the_next_one_the_first_again(tmp_path: Path) -> None:
    """D07: two processes that wrote one database left it malformed."""
    first, second = (claim(tmp_path, TORCH, GFX, {}) for _ in range(2))
    assert not set(folders(first)) & set(folders(second))
    first.close()
    third = claim(tmp_path, TORCH, GFX, {})
    assert folders(third) == folders(first)
    for claimed in (second, third):
        claimed.close()


@pytest.mark.report("D07")
def test_a_folder_is_free_once_its_process_has_ended(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from sdamd.hardware.kernel_cache import claim\n"
        "taken = claim(Path(sys.argv[1]), sys.argv[2], sys.argv[3], {})\n"
        "print(taken.variables[sys.argv[4]], flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), TORCH, GFX, NAMES[0]]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        beside = claim(tmp_path, TORCH, GFX, {})
        assert theirs not in folders(beside)
        beside.close()
        other.kill()
    again = claim(tmp_path, TORCH, GFX, {})
    assert theirs in folders(again)
    again.close()


@pytest.mark.report("D07")
@pytest.mark.parametrize("where", ["the cache", "the folder", "the database"])
def test_where_nothing_can_be_written_the_sentence_says_so(tmp_path: Path, where: str) -> None:
    cache = tmp_path / "cache"
    blocked = {
        "the cache": cache,
        "the folder": cache / "miopen" / f"{TORCH}-{GFX}",
        "the database": cache / "miopen" / f"{TORCH}-{GFX}" / "database",
    }[where]
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("a file in its place")
    claimed = claim(cache, TORCH, GFX, {})
    assert claimed.variables == {}
    (said,) = claimed.said
    assert "cannot be used" in said
    assert "--home" in said


@pytest.mark.report("D07")
@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_home_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in claim(tmp_path / "cache", TORCH, GFX, {}).said[0]


def test_folders_that_the_user_named_stay(tmp_path: Path) -> None:
    both = dict.fromkeys(NAMES, "/somewhere")
    assert claim(tmp_path, TORCH, GFX, both) == KernelCache(variables={})
    assert list(tmp_path.iterdir()) == []
    one = claim(tmp_path, TORCH, GFX, {NAMES[0]: "/somewhere"})
    assert list(one.variables) == [NAMES[1]]
    one.close()


def test_more_than_anybody_runs_share_what_miopen_does_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SLOTS == 8
    monkeypatch.setattr(kernel_cache, "SLOTS", 2)
    first, second = (claim(tmp_path, TORCH, GFX, {}) for _ in range(2))
    third = claim(tmp_path, TORCH, GFX, {})
    assert third.variables == {}
    assert "2 sdamd use" in third.said[0]
    for claimed in (first, second, third):
        claimed.close()


def test_a_shape_is_new_once_in_each_folder(tmp_path: Path) -> None:
    claimed = claim(tmp_path, TORCH, GFX, {})
    mark = mark_of(claimed.variables, "512x768x1")
    assert mark is not None
    leave(mark)
    assert mark_of(claimed.variables, "512x768x1") is None
    assert mark_of(claimed.variables, "768x512x1") is not None
    other = claim(tmp_path, "2.13.0+rocm7.2", GFX, {})
    assert mark_of(other.variables, "512x768x1") is not None
    for taken in (claimed, other):
        taken.close()


@pytest.mark.parametrize("folder", ["", "/nowhere/kernels", "relative"])
def test_nothing_is_marked_in_folders_of_others(folder: str, tmp_path: Path) -> None:
    assert mark_of({NAMES[1]: folder}, "512x512x1") is None
    assert mark_of({NAMES[1]: str(tmp_path)}, "512x512x1") is None
    assert mark_of({}, "512x512x1") is None


def test_a_mark_that_cannot_be_left_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text("in the way")
    leave(tmp_path / "shapes" / "512x512x1")
