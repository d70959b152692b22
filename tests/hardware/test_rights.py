import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.hardware.rights import (
    Asking,
    Membership,
    read_device_file,
    read_membership,
    try_open,
)
from tests.hardware.made import write

STATUS = "Name:\tpython\nUid:\t1000\t1000\nGid:\t1000\t1000\nGroups:\t44 105 \n"
GROUP = "root:x:0:\nvideo:x:44:alice,bob\nrender:x:105:bob\nbroken\nodd:x:nine:alice\n"
PASSWD = "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n"


def test_groups_are_read_as_the_kernel_and_the_user_database_have_them(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/status": STATUS, "etc/group": GROUP, "etc/passwd": PASSWD})
    found = read_membership(root, {})
    assert found.ids == frozenset({44, 105, 1000})
    assert found.listed == {44}
    assert found.names == {0: "root", 44: "video", 105: "render"}


def test_a_user_without_an_entry_is_known_by_the_variable(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/status": STATUS, "etc/group": GROUP})
    assert read_membership(root, {"USER": "bob"}).listed == {44, 105}
    assert read_membership(root, {}).listed == frozenset()


def test_what_is_not_recorded_is_not_known(tmp_path: Path) -> None:
    assert read_membership(tmp_path, {}) == Membership()


@pytest.mark.parametrize(
    ("recorded", "ids", "may"),
    [
        ("660 0 105", {105}, True),
        ("660 0 105", {44}, False),
        ("666 0 105", {44}, True),
        ("600 0 105", {105}, False),
        ("640 0 105", {105}, False),
        ("0660 0 105", {105}, True),
        ("660 0 105", None, None),
    ],
)
def test_a_recorded_file_is_judged_by_its_numbers(
    tmp_path: Path, recorded: str, ids: set[int] | None, may: bool | None
) -> None:
    root = write(tmp_path, {"dev/kfd": recorded})
    membership = Membership(ids=None if ids is None else frozenset(ids), names={105: "render"})
    found = read_device_file(root, "dev/kfd", Asking(live=False, membership=membership))
    assert (found.present, found.may_open) == (True, may)
    assert (found.group, found.group_name) == (105, "render")


@pytest.mark.parametrize(("mode", "may"), [("660", None), ("666", True)])
def test_what_root_may_do_in_a_container_is_not_known(
    tmp_path: Path, mode: str, may: bool | None
) -> None:
    status = "Uid:\t0\t0\nGid:\t0\t0\nGroups:\t992\n"
    root = write(tmp_path, {"dev/kfd": f"{mode} 0 105", "proc/self/status": status})
    asking = Asking(live=False, membership=read_membership(root, {}))
    assert read_device_file(root, "dev/kfd", asking).may_open is may


@pytest.mark.report("A14")
@pytest.mark.skipif(sys.platform == "win32" or os.getuid() != 0, reason="gives files away")
def test_a_file_of_another_group_is_closed_to_this_process(tmp_path: Path) -> None:
    """A14: the numbers of the file itself, where the recording kept them."""
    root = write(tmp_path, {"dev/kfd": "", "proc/self/status": STATUS})
    os.chown(root / "dev/kfd", 0, 9999)
    (root / "dev/kfd").chmod(0o660)
    asking = Asking(live=False, membership=read_membership(root, {}))
    found = read_device_file(root, "dev/kfd", asking)
    assert (found.group, found.may_open) == (9999, False)


@pytest.mark.parametrize(("mode", "may"), [(0o644, None), (0o444, None), (0o660, False)])
def test_without_groups_only_a_file_that_is_closed_on_purpose_is_closed(
    tmp_path: Path, mode: int, may: bool | None
) -> None:
    """The recordings may belong to another user, which says nothing of that machine."""
    root = write(tmp_path, {"dev/kfd": ""})
    (root / "dev/kfd").chmod(mode)
    asking = Asking(live=False, access=lambda path, mode: False)
    assert read_device_file(root, "dev/kfd", asking).may_open is may


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    found = read_device_file(tmp_path, "dev/kfd", Asking(live=True))
    assert (found.present, found.may_open, found.path) == (False, None, "/dev/kfd")


@pytest.mark.parametrize(
    ("access", "error", "may", "said"),
    [(True, "", True, ""), (True, "ENOMEM", False, "ENOMEM"), (False, "", False, "EACCES")],
)
def test_a_live_file_is_opened_once_rights_allow_it(
    tmp_path: Path, access: bool, error: str, may: bool, said: str
) -> None:
    """A13: opening fails with ENOMEM on a GPU that KFD does not support."""
    root = write(tmp_path, {"dev/kfd": ""})
    opened: list[Path] = []

    def opens(path: Path) -> str:
        opened.append(path)
        return error

    asking = Asking(live=True, access=lambda path, mode: access, opens=opens)
    found = read_device_file(root, "dev/kfd", asking)
    assert (found.may_open, found.error) == (may, said)
    assert opened == ([root / "dev/kfd"] if access else [])


def test_opening_says_why_it_failed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert try_open(file) == ""
    assert try_open(tmp_path) == "EISDIR"
    assert try_open(tmp_path / "nothing") == "ENOENT"
    assert stat.S_ISREG(file.stat().st_mode)


@given(status=st.text(max_size=200), group=st.text(max_size=200), passwd=st.binary(max_size=200))
def test_any_text_is_survived(
    tmp_path_factory: pytest.TempPathFactory, status: str, group: str, passwd: bytes
) -> None:
    root = tmp_path_factory.mktemp("machine")
    (root / "proc/self").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "proc/self/status").write_text(f"Uid:{status}\nGroups:{status}", "utf-8", "replace")
    (root / "etc/group").write_text(group, "utf-8", "replace")
    (root / "etc/passwd").write_bytes(passwd)
    found = read_membership(root, {"USER": "x"})
    assert found.ids is None or all(0 <= gid < 10**10 for gid in found.ids)
