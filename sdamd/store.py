"""The SQLite file behind the queue: how it is opened, migrated, written, and what its errors mean.

A transaction is on the disk when it ends (`synchronous=FULL`), and several processes may have the
file open at once. What cannot be used is told in one sentence and left as it is.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from sdamd.errors import StorageError

FILE: Final = "sdamd.db"
APPLICATION_ID: Final = 0x73644D44
"""`sdMD`, in the header of the file: what tells it from another program's database."""

BUSY_SECONDS: Final = 20.0
"""How long to wait for another process that writes; 100 000 rows take it about two seconds."""

Script: TypeAlias = Sequence[str]
"""The statements that lead from one schema to the next."""

_BATCHES: Script = (
    """CREATE TABLE batch (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        token TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        created TEXT NOT NULL,
        output TEXT NOT NULL,
        filename TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('ready', 'paused', 'cancelled')),
        total INTEGER NOT NULL)""",
    # Jobs that may share a pass; ids rise in the order in which a batch renders its kinds.
    """CREATE TABLE kind (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        batch INTEGER NOT NULL REFERENCES batch,
        first INTEGER NOT NULL,
        count INTEGER NOT NULL,
        shared TEXT NOT NULL,
        pass_size INTEGER,
        UNIQUE (batch, first))""",
    """CREATE TABLE job (
        batch INTEGER NOT NULL REFERENCES batch,
        number INTEGER NOT NULL,
        kind INTEGER NOT NULL REFERENCES kind,
        place INTEGER NOT NULL,
        own TEXT NOT NULL,
        labels TEXT,
        state TEXT NOT NULL DEFAULT 'pending'
            CHECK (state IN ('pending', 'running', 'done', 'failed', 'cancelled')),
        attempts INTEGER NOT NULL DEFAULT 0,
        deaths INTEGER NOT NULL DEFAULT 0,
        worker INTEGER REFERENCES worker,
        path TEXT,
        error TEXT,
        joules REAL,
        PRIMARY KEY (batch, number)) WITHOUT ROWID""",
    "CREATE INDEX job_order ON job (batch, state, kind, place)",
    """CREATE TABLE worker (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        pid INTEGER NOT NULL,
        started TEXT NOT NULL,
        boot TEXT NOT NULL,
        space TEXT NOT NULL,
        host TEXT NOT NULL,
        beat REAL NOT NULL)""",
    # What jobs start from, since the files that it came from may go.
    "CREATE TABLE picture (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL)",
    # The number in the name of a batch's first picture, in each folder that it saves to.
    """CREATE TABLE numbering (
        batch INTEGER NOT NULL REFERENCES batch,
        folder TEXT NOT NULL,
        first INTEGER NOT NULL,
        PRIMARY KEY (batch, folder)) WITHOUT ROWID""",
)

MIGRATIONS: Final[Sequence[Script]] = (_BATCHES,)
"""Script n leads from schema n to n + 1. What was published never changes; a new one is added."""


class Store:
    """One connection to the file; threads of a process may share it and take turns.

    Raises:
        StorageError: the file is damaged, of a newer sdamd or another program, or cannot be
            written.
    """

    def __init__(
        self,
        path: Path,
        *,
        migrations: Sequence[Script] = MIGRATIONS,
        busy_seconds: float = BUSY_SECONDS,
    ) -> None:
        self.path = path
        self._turn = threading.RLock()
        self._busy_seconds = busy_seconds
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be made: {error.strerror}") from error
        with self._said():
            # Transactions are begun and ended below, where one can read it.
            self._connection = sqlite3.connect(
                path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
            )
        try:
            with self._said():
                self._open(migrations)
        except BaseException:
            self._connection.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write, all or nothing; what is written is on the disk when this ends.

        Raises:
            StorageError: the disk is full, or somebody else writes for too long.
        """
        with self._turn, self._said():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.rollback()
                raise
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                self._connection.rollback()
                raise

    def rows(self, sql: str, values: Sequence[object] | dict[str, object] = ()) -> list[Any]:
        """What a query finds, as tuples; only for what is few."""
        with self._turn, self._said():
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def apart(self) -> Iterator[sqlite3.Connection]:
        """Work on temporary tables, which are in a file of their own: nobody has to wait."""
        with self._turn, self._said():
            yield self._connection

    def close(self) -> None:
        """Close the file; what was committed is safe without it."""
        with self._turn:
            self._connection.close()

    def _open(self, migrations: Sequence[Script]) -> None:
        # Before anything is written: the file may not be ours.
        schema = self._schema()
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != APPLICATION_ID and (application or tables):
            raise StorageError(f"{self.path} is the database of another program; it stays as it is")
        if schema > len(migrations):
            raise StorageError(
                f"{self.path} was written by a newer sdamd (schema {schema}; this one knows "
                f"{len(migrations)}); update sdamd, or give another --home"
            )
        # Where the file system cannot do it (network drives), SQLite stays with its journal.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("PRAGMA temp_store = FILE")
        if schema < len(migrations):
            self._migrate(migrations)
        # A file that is damaged behind its first page shows it here and not in mid-batch.
        self._connection.execute("SELECT count(*) FROM sqlite_master WHERE sql > ''").fetchone()

    def _migrate(self, migrations: Sequence[Script]) -> None:
        with self.transaction() as connection:
            for script in migrations[self._schema() :]:  # another process may have been first
                for statement in script:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(migrations)}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")

    def _schema(self) -> int:
        (schema,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(schema)

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Say an error of SQLite in a sentence."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            say = _SENTENCES.get(code)
            if say is None:
                raise
            raise StorageError(f"{self.path} {say(error, self._busy_seconds)}") from error


_Say: TypeAlias = Callable[[sqlite3.Error, float], str]


def _damaged(error: sqlite3.Error, _: float) -> str:
    return (
        f"is damaged ({error}); it was left as it is, and no picture is in it. "
        "Moved elsewhere, it makes room for a new one"
    )


def _busy(_: sqlite3.Error, seconds: float) -> str:
    return f"is locked by another program, for longer than {seconds:g} s; try again when it is done"


def _unwritable(error: sqlite3.Error, _: float) -> str:
    return f"cannot be written ({error}): the disk is read-only, or there is no permission"


# Primary result codes. Source: sqlite.org/rescode.html.
_SENTENCES: Final[dict[int, _Say]] = {
    sqlite3.SQLITE_NOTADB: _damaged,
    sqlite3.SQLITE_CORRUPT: _damaged,
    sqlite3.SQLITE_BUSY: _busy,
    sqlite3.SQLITE_LOCKED: _busy,
    sqlite3.SQLITE_READONLY: _unwritable,
    sqlite3.SQLITE_CANTOPEN: _unwritable,
    sqlite3.SQLITE_PERM: _unwritable,
    sqlite3.SQLITE_FULL: lambda *_: "cannot grow: the disk is full",
    sqlite3.SQLITE_IOERR: lambda error, _: f"cannot be read or written: {error}",
    sqlite3.SQLITE_PROTOCOL: _busy,
}
