"""The file behind the queue, on real disks, with real processes beside."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from sdamd.errors import StorageError
from sdamd.store import APPLICATION_ID, MIGRATIONS, Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "sdamd.db"


def pragma(path: Path, name: str) -> object:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]


def test_a_new_file_is_made_with_its_folder_and_says_whose_it_is(path: Path) -> None:
    Store(path).close()
    assert pragma(path, "application_id") == APPLICATION_ID
    assert pragma(path, "user_version") == len(MIGRATIONS)
    assert pragma(path, "journal_mode") == "wal"


def test_a_transaction_is_synced_to_the_disk(path: Path) -> None:
    with closing(Store(path)) as store:
        assert store.rows("PRAGMA synchronous") == [(2,)]  # FULL
        assert store.rows("PRAGMA foreign_keys") == [(1,)]


def test_a_transaction_that_fails_leaves_nothing(path: Path) -> None:
    with closing(Store(path)) as store:
        with suppress(ZeroDivisionError), store.transaction() as connection:
            connection.execute("INSERT INTO picture VALUES ('a', 'b')")
            raise ZeroDivisionError
        assert store.rows("SELECT * FROM picture") == []


def test_an_older_file_is_brought_up_to_date_and_keeps_what_is_in_it(path: Path) -> None:
    with closing(Store(path)) as store, store.transaction() as connection:
        connection.execute("INSERT INTO picture VALUES ('a', 'b')")
    newer = (*MIGRATIONS, ("ALTER TABLE picture ADD COLUMN name TEXT DEFAULT 'x'",))
    with closing(Store(path, migrations=newer)) as store:
        assert store.rows("SELECT * FROM picture") == [("a", "b", "x")]
    with closing(Store(path, migrations=newer)) as store:
        assert store.rows("PRAGMA user_version") == [(len(newer),)]


def test_a_migration_that_fails_leaves_the_old_schema(path: Path) -> None:
    Store(path).close()
    broken = (*MIGRATIONS, ("CREATE TABLE extra (a)", "CREATE TABLE extra (a)"))
    with pytest.raises(sqlite3.OperationalError, match="extra already exists"):
        Store(path, migrations=broken)
    assert pragma(path, "user_version") == len(MIGRATIONS)
    with closing(Store(path)) as store:
        assert store.rows("SELECT * FROM sqlite_master WHERE name = 'extra'") == []


def made_by_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (title)")


def of_a_newer_version(path: Path) -> None:
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 1000")


def overwritten_behind_the_header(path: Path) -> None:
    Store(path).close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(size - 100))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(b"no database " * 1000), "is damaged (file is not a data"),
        (overwritten_behind_the_header, "is damaged ("),
        (made_by_another_program, "is the database of another program; it stays as it is"),
        (of_a_newer_version, "was written by a newer sdamd (schema 1000; this one knows "),
        (Path.mkdir, "cannot be written (unable to open database file)"),
    ],
    ids=["not a database", "garbage", "another program", "newer", "a folder"],
)
def test_what_cannot_be_used_is_told_in_a_sentence_and_stays(
    path: Path, spoil: object, said: str
) -> None:
    path.parent.mkdir()
    assert callable(spoil)
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StorageError) as raised:
        Store(path)
    assert str(raised.value).startswith(f"{path} {said}")
    assert "\n" not in str(raised.value)
    assert raised.value.exit_status == 4
    assert (path.read_bytes() if path.is_file() else None) == before


def test_an_empty_file_is_a_new_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    Store(path).close()
    assert pragma(path, "user_version") == len(MIGRATIONS)


def test_a_file_that_somebody_else_writes_for_too_long_is_told(path: Path) -> None:
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with closing(Store(path, busy_seconds=0.2)) as store:
            said = r"is locked by another program, .* 0\.2 s"
            with pytest.raises(StorageError, match=said), store.transaction():
                pytest.fail("it never gets here")
            assert store.rows("SELECT count(*) FROM batch") == [(0,)]  # reading goes on


def test_a_full_disk_is_told_and_what_was_there_stays(path: Path) -> None:
    with closing(Store(path)) as store:
        with store.transaction() as connection:
            connection.execute("INSERT INTO picture VALUES ('a', 'b')")
        store.rows(f"PRAGMA max_page_count = {store.rows('PRAGMA page_count')[0][0]}")
        said = "cannot grow: the disk is full"
        with pytest.raises(StorageError, match=said), store.transaction() as connection:
            connection.execute("INSERT INTO picture VALUES ('c', zeroblob(1000000))")
        assert store.rows("SELECT * FROM picture") == [("a", "b")]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made: Not a directory"):
        Store(tmp_path / "file" / "home" / "sdamd.db")


READ_ONLY = """
import sys
from pathlib import Path
from sdamd.errors import StorageError
from sdamd.store import Store
try:
    with Store(Path(sys.argv[1])).transaction() as connection:
        connection.execute("DELETE FROM picture")
except StorageError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no mounts")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_read_only_disk_is_told(path: Path) -> None:
    """In a mount namespace of its own, since root may write wherever it likes otherwise."""
    Store(path).close()
    mount = f"mount --bind {path.parent} {path.parent} && mount -o remount,ro,bind {path.parent}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mount} && exec '{sys.executable}' -c '{READ_ONLY}' "
         f"{path}"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.stderr == ""
    assert done.stdout.startswith(f"{path} cannot be written (")
    assert "read-only" in done.stdout
    assert done.stdout.count("\n") == 1
