"""The durable queue: batches of jobs in the store, which several processes may work on at once.

A job goes `pending` -> `running` -> `done` or `failed`. It is on the disk before the first one
runs. A claim is a lease of the process that took it: when that process is gone, `recover` makes
the job pending again, and `saved` takes in what it had saved without being able to say so.

Jobs that may share a pass are a *kind*; kinds that need the same checkpoint, and among them the
same size, follow on each other, since a Radeon loads checkpoints slowly and looks for its kernels
anew at every size. Within a kind, pass n holds places n * size to n * size + size - 1 whatever was
made before, so that a batch that was interrupted gives the same pixels as one that was not.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from sdamd.errors import BadRequest, UserError
from sdamd.lease import Process, lives, started, was_cut_off
from sdamd.request import OF_ONE_PICTURE, Job
from sdamd.store import Store

JOBS_MAX: Final = 1_000_000
"""The pictures of one batch; a year of a card's time."""

DEATHS_MAX: Final = 2
"""How many processes a job may take with it before it counts as failed."""

_PAGE: Final = 1000
_LOADED: Final = frozenset({"checkpoint", "loras", "vae", "controlnets"})
"""Fields that say what must be loaded, as far as jobs have them."""
_SIZE: Final = frozenset({"width", "height", "hires_scale", "upscale", "denoise_tile"})
"""Fields that decide the shapes for which kernels are looked for."""


class State(StrEnum):
    """Where a job is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it stands. `state` is `ready`, `paused` or `cancelled`."""

    id: int
    token: str
    name: str
    created: str
    output: Path
    filename: str
    state: str
    total: int
    counts: Mapping[State, int]

    @property
    def left(self) -> int:
        """How many pictures are still to be made, those that are being made among them."""
        return self.counts[State.PENDING] + self.counts[State.RUNNING]

    def job_id(self, number: int) -> str:
        """What the file of a job carries: no other job anywhere has it."""
        return f"{self.token}-{number}"

    def number_of(self, job_id: str) -> int | None:
        """The job of this batch that a file is of; None for one of another batch."""
        token, dash, number = job_id.rpartition("-")
        is_ours = dash and token == self.token and number.isascii() and number.isdigit()
        return int(number) if is_ours and len(number) <= len(str(JOBS_MAX)) else None


class Asked(NamedTuple):
    """A job to take in, and where a contact sheet shows its picture: `steps 20`, `Euler a`."""

    job: Job
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job in the queue, without the bytes of its pictures.

    `labels` are those of its `Asked`; `joules` is what the card took for it, where it tells.
    """

    job: Job
    labels: tuple[str, ...]
    state: State
    attempts: int
    deaths: int
    path: Path | None
    error: str | None
    joules: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Jobs that this process may render now: passes in the order of their places.

    `sizes` are what the passes would have in a batch that nothing ever disturbed; one that has
    fewer jobs has lost them to another time. A job that a process died of comes alone.
    """

    passes: tuple[tuple[Job, ...], ...]
    sizes: tuple[int, ...]

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs of all passes."""
        return tuple(job for one in self.passes for job in one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A picture that is in its file."""

    number: int
    path: Path
    joules: float | None = None


class JobQueue:
    """The batches of one store, as one process sees and works on them."""

    def __init__(
        self,
        store: Store,
        *,
        here: Process | None = None,
        started_of: Callable[[int], str] = started,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._here = here or Process.this()
        self._started_of = started_of
        self._now = now
        self._worker: int | None = None

    # -- batches ---------------------------------------------------------------------------------

    def enqueue(self, jobs: Iterable[Asked], *, name: str, output: Path, filename: str) -> int:
        """Take in a batch, whole or not at all, and return its id.

        The jobs are read once and held by none; an error while they are read leaves no trace, and
        nobody waits meanwhile, however slowly they come.

        Raises:
            BadRequest: there is no job, or there are more than JOBS_MAX.
            StorageError: the store cannot take them.
        """
        with self._store.apart() as connection:
            try:
                for statement in _STAGE:
                    connection.execute(statement)
                _stage(connection, jobs)
                return self._take_in(name, output, filename)
            finally:
                for table in _STAGED:
                    connection.execute(f"DROP TABLE IF EXISTS temp.{table}")

    def batches(self) -> list[Batch]:
        """Every batch, the oldest first."""
        ids = self._store.rows("SELECT id FROM batch ORDER BY id")
        return [self.batch(number) for (number,) in ids]

    def batch(self, number: int) -> Batch:
        """One batch.

        Raises:
            UserError: there is none of this number.
        """
        rows = self._store.rows(
            "SELECT token, name, created, output, filename, state, total FROM batch WHERE id = ?",
            (number,),
        )
        if not rows:
            known = [str(n) for (n,) in self._store.rows("SELECT id FROM batch ORDER BY id")]
            there = f"there are {', '.join(known[-20:])}" if known else "there is none yet"
            raise UserError(f"batch {number} is not known; {there}")
        token, name, created, output, filename, state, total = rows[0]
        found = dict(
            self._store.rows(
                "SELECT state, count(*) FROM job WHERE batch = ? GROUP BY state", (number,)
            )
        )
        return Batch(
            id=number, token=token, name=name, created=created, output=Path(output),
            filename=filename, state=state, total=total,
            counts={state: found.get(state, 0) for state in State},
        )  # fmt: skip

    def batch_state(self, number: int) -> str:
        """Whether a batch is `ready`, `paused` or `cancelled`, without counting anything."""
        ((state,),) = self._store.rows("SELECT state FROM batch WHERE id = ?", (number,))
        return str(state)

    def has_pending(self, number: int) -> bool:
        """Whether a batch has jobs that nobody works on."""
        rows = self._store.rows(
            "SELECT 1 FROM job WHERE batch = ? AND state = 'pending' LIMIT 1", (number,)
        )
        return bool(rows)

    def has_made_alike(self, batch: int, number: int) -> bool:
        """Whether a job that may share a pass with this one is done."""
        rows = self._store.rows(
            "SELECT 1 FROM job JOIN job AS this USING (batch, kind) WHERE job.batch = ? "
            "AND this.number = ? AND job.state = 'done' LIMIT 1",
            (batch, number),
        )
        return bool(rows)

    def unfinished(self) -> list[int]:
        """The batches with pictures still to be made, the oldest first."""
        return [
            number
            for (number,) in self._store.rows(
                "SELECT id FROM batch WHERE state != 'cancelled' AND EXISTS (SELECT 1 FROM job "
                "WHERE job.batch = batch.id AND job.state IN ('pending', 'running')) ORDER BY id"
            )
        ]

    def rows(self, batch: int, *states: State) -> Iterator[Row]:
        """The jobs of a batch by their numbers, a page at a time; of all states where none is said.

        Raises:
            UserError: there is no such batch.
        """
        self.batch(batch)
        wanted = states or tuple(State)
        marks = ", ".join("?" * len(wanted))
        last = -1
        while True:
            page = self._store.rows(
                "SELECT number, shared, own, labels, state, attempts, deaths, path, error, joules "  # noqa: S608  # only marks
                "FROM job JOIN kind ON kind.id = job.kind WHERE job.batch = ? AND number > ? "
                f"AND state IN ({marks}) ORDER BY number LIMIT ?",
                (batch, last, *wanted, _PAGE),
            )
            for (
                number, shared, own, labels, state, attempts, deaths, path, error, joules
            ) in page:  # fmt: skip
                job = _job(number, shared, own)
                yield Row(
                    job=job, labels=tuple(json.loads(labels or "[]")), state=State(state),
                    attempts=attempts, deaths=deaths,
                    path=None if path is None else Path(path), error=error, joules=joules,
                )  # fmt: skip
                last = number
            if len(page) < _PAGE:
                return

    def kinds(self, batch: int) -> list[tuple[Job, int]]:
        """The first job of each kind, and of how many it is one, in the order of rendering."""
        found = self._store.rows(
            "SELECT number, shared, own, count FROM kind JOIN job ON job.batch = kind.batch "
            "AND job.number = kind.first WHERE kind.batch = ? ORDER BY kind.id",
            (batch,),
        )
        return [(_job(number, shared, own), count) for number, shared, own, count in found]

    # -- what a person says of a batch -----------------------------------------------------------

    def pause(self, batch: int) -> None:
        """Let whoever works on it stop after the picture that is being made."""
        self._refuse_cancelled(batch)
        with self._store.transaction() as connection:
            connection.execute("UPDATE batch SET state = 'paused' WHERE id = ?", (batch,))

    def ready(self, batch: int) -> None:
        """Take a pause back.

        Raises:
            UserError: the batch was cancelled.
        """
        self._refuse_cancelled(batch)
        with self._store.transaction() as connection:
            connection.execute("UPDATE batch SET state = 'ready' WHERE id = ?", (batch,))

    def cancel(self, batch: int) -> int:
        """Give up what is not made yet and return how much that was; pictures on disk stay."""
        self.batch(batch)
        with self._store.transaction() as connection:
            connection.execute("UPDATE batch SET state = 'cancelled' WHERE id = ?", (batch,))
            return connection.execute(
                "UPDATE job SET state = 'cancelled' WHERE batch = ? AND state = 'pending'", (batch,)
            ).rowcount

    def retry(self, batch: int, *, missing: bool = False) -> int:
        """Make failed and cancelled jobs pending again; return how many.

        With `missing` also those whose file has gone from the disk since.
        """
        gone = [
            (batch, row.job.index)
            for row in (self.rows(batch, State.DONE) if missing else ())
            if row.path is None or not row.path.exists()
        ]
        self.batch(batch)
        with self._store.transaction() as connection:
            connection.execute("UPDATE batch SET state = 'ready' WHERE id = ?", (batch,))
            again = connection.execute(
                "UPDATE job SET state = 'pending', deaths = 0, error = NULL "
                "WHERE batch = ? AND state IN ('failed', 'cancelled')",
                (batch,),
            ).rowcount
            connection.executemany(
                "UPDATE job SET state = 'pending', path = NULL "
                "WHERE batch = ? AND number = ? AND state = 'done'",
                gone,
            )
        return again + len(gone)

    def move(self, batch: int, output: Path) -> None:
        """Let the pictures to come go to another folder."""
        with self._store.transaction() as connection:
            connection.execute("UPDATE batch SET output = ? WHERE id = ?", (str(output), batch))

    # -- working on a batch ----------------------------------------------------------------------

    def claim(
        self, batch: int, pass_size: Callable[[Job, int], int], *, passes: int = 1
    ) -> Claim | None:
        """Take the next jobs of one kind; None when there are none, or the batch is not ready.

        `pass_size` is asked once for each kind of a batch, with one of its jobs and their count;
        the answer is kept with the batch.
        """
        while (found := self._next(batch)) is not None:
            if claim := self._try_to_claim(batch, found, pass_size, passes):
                return claim
        return None

    def finish(self, batch: int, made: Iterable[Made]) -> None:
        """These are in their files, on the disk. A job that is done already stays as it is."""
        with self._store.transaction() as connection:
            connection.executemany(
                "UPDATE job SET state = 'done', path = ?, joules = ?, error = NULL, worker = NULL "
                "WHERE batch = ? AND number = ? AND state != 'done'",
                [(str(one.path), one.joules, batch, one.number) for one in made],
            )
            self._beat(connection)

    def fail(self, batch: int, number: int, reason: str) -> None:
        """This job gives no picture; the others go on."""
        with self._store.transaction() as connection:
            connection.execute(
                "UPDATE job SET state = 'failed', error = ?, worker = NULL "
                "WHERE batch = ? AND number = ? AND state = 'running'",
                (reason, batch, number),
            )

    def give_back(self, batch: int, numbers: Iterable[int]) -> None:
        """These were not begun, or were stopped: somebody may claim them again."""
        with self._store.transaction() as connection:
            _return(connection, batch, numbers)

    def blame(self, batch: int, number: int, reason: str) -> State:
        """A process died while it was at this job: it is tried once more, alone, then failed."""
        with self._store.transaction() as connection:
            return _blame(connection, batch, number, reason)

    def recover(self, batch: int) -> int:
        """Take back the jobs of workers that are gone; return how many are with living ones.

        When the machine itself went down, the jobs that were running count as a cause, so that
        one that freezes the machine does not do so at every start.
        """
        with self._store.transaction() as connection:
            held = connection.execute(
                "SELECT job.number, worker.id, pid, started, boot, space, host, beat "
                "FROM job JOIN worker ON worker.id = job.worker "
                "WHERE job.batch = ? AND job.state = 'running'",
                (batch,),
            ).fetchall()
            alive = 0
            for number, worker, pid, began, boot, space, host, beat in held:
                owner = Process(pid=pid, started=began, boot=boot, space=space, host=host)
                if worker == self._worker:
                    continue
                if lives(owner, beat, self._now(), self._here, self._started_of):
                    alive += 1
                elif was_cut_off(owner, self._here):
                    reason = "the machine went down while this picture was being made"
                    _blame(connection, batch, number, reason)
                else:
                    _return(connection, batch, [number])
        return alive

    def beat(self) -> None:
        """Say that this process lives, for those who cannot look for it."""
        with self._store.transaction() as connection:
            self._beat(connection)

    def first_number(self, batch: int, folder: Path, free: int) -> int:
        """The number of the batch's first picture in a folder, once and for all.

        `free` is the first that is free there now; it counts only the first time.
        """
        with self._store.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO numbering VALUES (?, ?, ?)", (batch, str(folder), free)
            )
            (first,) = connection.execute(
                "SELECT first FROM numbering WHERE batch = ? AND folder = ?", (batch, str(folder))
            ).fetchone()
            return int(first)

    # -- within ----------------------------------------------------------------------------------

    def _take_in(self, name: str, output: Path, filename: str) -> int:
        (total,) = self._store.rows("SELECT count(*) FROM temp.staged")[0]
        if not total:
            raise BadRequest(f"{name} asks for no picture")
        with self._store.transaction() as connection:
            number = connection.execute(
                "INSERT INTO batch (token, name, created, output, filename, state, total) "
                "VALUES (?, ?, ?, ?, ?, 'ready', ?)",
                (
                    secrets.token_hex(8), name, datetime.now(UTC).isoformat(timespec="seconds"),
                    str(output), filename, total,
                ),
            ).lastrowid  # fmt: skip
            assert number is not None
            for statement in _FROM_STAGED:
                connection.execute(statement, {"batch": number})
        return number

    def _next(self, batch: int) -> Any:
        rows = self._store.rows(
            "SELECT job.kind, place, deaths, pass_size, count, number, shared, own "
            "FROM job JOIN kind ON kind.id = job.kind JOIN batch ON batch.id = job.batch "
            "WHERE job.batch = ? AND job.state = 'pending' AND batch.state = 'ready' "
            "ORDER BY job.kind, place LIMIT 1",
            (batch,),
        )
        return rows[0] if rows else None

    def _try_to_claim(
        self, batch: int, found: Any, pass_size: Callable[[Job, int], int], passes: int
    ) -> Claim | None:
        """Take the jobs that `_next` found; None if another process was faster."""
        kind, place, deaths, size, count, number, shared, own = found
        if size is None:
            # Outside of the transaction: planning takes time, and nobody should wait for it.
            size = max(1, pass_size(_job(number, shared, own), count))
        first = place // size * size
        with self._store.transaction() as connection:
            connection.execute(
                "UPDATE kind SET pass_size = ? WHERE id = ? AND pass_size IS NULL", (size, kind)
            )
            if deaths:
                where, values = "place = ? AND place < ?", (place, place + 1)
            else:
                where = "place >= ? AND place < ? AND deaths = 0"
                values = (first, first + size * passes)
            taken = connection.execute(
                "SELECT number, place, own FROM job WHERE batch = ? AND state = 'pending' "  # noqa: S608  # none of these is from outside
                f"AND kind = ? AND {where} ORDER BY place",
                (batch, kind, *values),
            ).fetchall()
            worker = self._registered(connection)
            connection.executemany(
                "UPDATE job SET state = 'running', attempts = attempts + 1, worker = ? "
                "WHERE batch = ? AND number = ?",
                [(worker, batch, number) for number, _, _ in taken],
            )
        if not taken:
            return None
        together: dict[int, list[Job]] = {}
        for number, place, own in taken:
            job = self._with_pictures(_job(number, shared, own))
            together.setdefault(place // size, []).append(job)
        return Claim(
            passes=tuple(tuple(jobs) for jobs in together.values()),
            sizes=tuple(min(size, count - size * at) for at in together),
        )

    def _with_pictures(self, job: Job) -> Job:
        found = {
            picture.sha256: data
            for picture in job.pictures
            for (data,) in self._store.rows(
                "SELECT data FROM picture WHERE sha256 = ?", (picture.sha256,)
            )
        }
        return job.with_pictures(found)

    def _registered(self, connection: sqlite3.Connection) -> int:
        """This process among the workers."""
        if self._worker is None:
            here = self._here
            self._worker = connection.execute(
                "INSERT INTO worker (pid, started, boot, space, host, beat) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (here.pid, here.started, here.boot, here.space, here.host, self._now()),
            ).lastrowid
        assert self._worker is not None
        return self._worker

    def _beat(self, connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE worker SET beat = ? WHERE id = ?", (self._now(), self._worker))

    def _refuse_cancelled(self, batch: int) -> None:
        if self.batch(batch).state == "cancelled":
            raise UserError(
                f"batch {batch} was cancelled; `sdamd batch retry {batch}` takes it up again"
            )


def _return(connection: sqlite3.Connection, batch: int, numbers: Iterable[int]) -> None:
    """Running jobs to pending, or to cancelled where the batch was meanwhile."""
    connection.executemany(
        "UPDATE job SET worker = NULL, state = CASE (SELECT state FROM batch WHERE id = :batch) "
        "WHEN 'cancelled' THEN 'cancelled' ELSE 'pending' END "
        "WHERE batch = :batch AND number = :number AND state = 'running'",
        [{"batch": batch, "number": number} for number in numbers],
    )


def _blame(connection: sqlite3.Connection, batch: int, number: int, reason: str) -> State:
    connection.execute(
        "UPDATE job SET deaths = deaths + 1, error = ? "
        "WHERE batch = ? AND number = ? AND state = 'running'",
        (reason, batch, number),
    )
    connection.execute(
        "UPDATE job SET state = 'failed', worker = NULL "
        "WHERE batch = ? AND number = ? AND state = 'running' AND deaths >= ?",
        (batch, number, DEATHS_MAX),
    )
    _return(connection, batch, [number])
    (state,) = connection.execute(
        "SELECT state FROM job WHERE batch = ? AND number = ?", (batch, number)
    ).fetchone()
    return State(state)


_STAGED: Final = ("staged", "staged_kind", "staged_picture")
_STAGE: Final = (
    "CREATE TEMP TABLE staged (number INTEGER PRIMARY KEY, kind INTEGER, own TEXT, labels TEXT)",
    "CREATE TEMP TABLE staged_kind ("
    "id INTEGER PRIMARY KEY, loaded TEXT, size TEXT, shared TEXT UNIQUE)",
    "CREATE TEMP TABLE staged_picture (sha256 TEXT PRIMARY KEY, data BLOB)",
)
_FROM_STAGED: Final = (
    "INSERT OR IGNORE INTO picture SELECT sha256, data FROM temp.staged_picture",
    "INSERT INTO kind (batch, first, count, shared) SELECT :batch, first, count, shared FROM ("
    "SELECT kind, min(number) AS first, count(*) AS count FROM temp.staged GROUP BY kind) "
    "JOIN temp.staged_kind ON id = kind ORDER BY "
    "min(first) OVER (PARTITION BY loaded), min(first) OVER (PARTITION BY loaded, size), first",
    "INSERT INTO job (batch, number, kind, place, own, labels) "
    "SELECT :batch, number, kind.id, "
    "row_number() OVER (PARTITION BY kind.id ORDER BY number) - 1, own, labels "
    "FROM temp.staged JOIN temp.staged_kind ON staged_kind.id = staged.kind "
    "JOIN kind ON kind.batch = :batch AND kind.shared = staged_kind.shared",
)
"""From the temporary tables to the queue: kinds in the order of rendering, and the jobs of each."""


def _stage(connection: sqlite3.Connection, jobs: Iterable[Asked]) -> None:
    """Write the jobs to the temporary tables, some at a time."""
    shared_of = attrgetter(*(f.name for f in fields(Job) if f.name not in OF_ONE_PICTURE))
    kinds: dict[object, int] = {}
    numbered = enumerate(jobs)
    while page := list(islice(numbered, _PAGE)):
        if page[-1][0] >= JOBS_MAX:
            raise BadRequest(f"the batch has more than {JOBS_MAX} pictures, which is the most")
        staged = []
        for number, (job, labels) in page:
            key = shared_of(job)
            kind = kinds.get(key)
            if kind is None:
                if len(kinds) > _PAGE:
                    kinds.clear()  # a batch may have as many kinds as jobs
                kind = kinds[key] = _stage_kind(connection, job)
            own = (str(job.seed), job.prompt, job.negative_prompt)
            staged.append((number, kind, json.dumps(own), json.dumps(labels) if labels else None))
        connection.executemany("INSERT INTO temp.staged VALUES (?, ?, ?, ?)", staged)


def _stage_kind(connection: sqlite3.Connection, job: Job) -> int:
    """What a job shares with others, as a row; the same row for the same."""
    shared = {k: v for k, v in job.to_dict().items() if k not in OF_ONE_PICTURE}
    loaded = {name: value for name, value in shared.items() if name in _LOADED}
    size = {name: value for name, value in shared.items() if name in _SIZE}
    texts = [json.dumps(values, sort_keys=True) for values in (loaded, size, shared)]
    connection.execute(
        "INSERT OR IGNORE INTO temp.staged_kind (loaded, size, shared) VALUES (?, ?, ?)", texts
    )
    connection.executemany(
        "INSERT OR IGNORE INTO temp.staged_picture VALUES (?, ?)",
        [(picture.sha256, picture.data) for picture in job.pictures],
    )
    (kind,) = connection.execute(
        "SELECT id FROM temp.staged_kind WHERE shared = ?", texts[2:]
    ).fetchone()
    return int(kind)


def _job(number: int, shared: str, own: str) -> Job:
    """A job as it was, but that pictures are without their bytes."""
    seed, prompt, negative_prompt = json.loads(own)
    values = {"seed": seed, "prompt": prompt, "negative_prompt": negative_prompt}
    return Job.from_dict({**json.loads(shared), **values, "index": number})
