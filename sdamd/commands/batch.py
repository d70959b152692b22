"""`sdamd batch`: batches that survive anything; this module is what does not render."""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing

from sdamd.commands.arguments import settings_of
from sdamd.errors import UserError
from sdamd.jobs import Batch, JobQueue, Row, State
from sdamd.store import FILE, Store

FAILURES_SHOWN = 50


def run(asked: argparse.Namespace) -> int:
    """Do what the word after `batch` says."""
    if asked.what in {"run", "resume", "retry"}:
        from sdamd.commands import batch_run  # noqa: PLC0415  # what renders loads more

        words: dict[str, Callable[[argparse.Namespace], int]] = {
            "run": batch_run.run, "resume": batch_run.resume, "retry": batch_run.retry,
        }  # fmt: skip
        return words[asked.what](asked)
    settings = settings_of(asked)
    path = settings.home / FILE
    if not path.exists():  # nobody is helped by an empty one
        if asked.what == "list":
            return 0
        raise UserError(f"there is no batch yet: {path} is not there")
    with closing(Store(path)) as store:
        queue = JobQueue(store)
        return {"list": _list, "show": _show, "cancel": _cancel, "pause": _pause}[asked.what](
            asked, queue
        )


def _list(asked: argparse.Namespace, queue: JobQueue) -> int:
    for batch in queue.batches():
        if asked.json:
            print(json.dumps(_summary(batch) | {"name": batch.name, "created": batch.created}))
        else:
            print(f"{batch.id}  {_in_words(batch)}  {batch.name}  {batch.created}")
    return 0


def _show(asked: argparse.Namespace, queue: JobQueue) -> int:
    batch = queue.batch(asked.id)
    if not asked.json:
        print(f"batch {batch.id}: {_in_words(batch)}")
        print(f"of {batch.name}, {batch.created}, into {batch.output}")
        for line in failures(queue, batch):
            print(line)
        return 0
    # A row at a time: there may be a hundred thousand.
    head = json.dumps(_summary(batch) | {"output": str(batch.output)})
    sys.stdout.write(f'{head[:-1]}, "jobs": [')
    for at, row in enumerate(queue.rows(batch.id)):
        sys.stdout.write(f"{', ' if at else ''}{json.dumps(_shown(row))}")
    print("]}")
    return 0


def _cancel(asked: argparse.Namespace, queue: JobQueue) -> int:
    count = queue.cancel(asked.id)
    print(f"sdamd: {count} pictures of batch {asked.id} will not be made", file=sys.stderr)
    return 0


def _pause(asked: argparse.Namespace, queue: JobQueue) -> int:
    for number in [asked.id] if asked.id else queue.unfinished():
        queue.pause(number)
        print(
            f"sdamd: batch {number} stops after the picture that is being made; "
            f"`sdamd batch resume {number}` goes on",
            file=sys.stderr,
        )
    return 0


def _summary(batch: Batch) -> dict[str, object]:
    return {
        "id": batch.id,
        "state": batch.state,
        "total": batch.total,
        **{str(state): count for state, count in batch.counts.items()},
    }


def _in_words(batch: Batch) -> str:
    """`57 of 200 done, 3 failed, 140 to do, paused`."""
    counts = batch.counts
    said = [f"{counts[State.DONE]} of {batch.total} done"]
    said += [
        f"{counts[state]} {state}" for state in (State.FAILED, State.CANCELLED) if counts[state]
    ]
    if batch.left:
        said.append(f"{batch.left} to do")
        if batch.state == "paused":
            said.append("paused")
    return ", ".join(said)


def _shown(row: Row) -> dict[str, object]:
    return {
        "index": row.job.index,
        "state": str(row.state),
        "attempts": row.attempts,
        "seed": str(row.job.seed),
        "path": None if row.path is None else str(row.path),
        "error": row.error,
        "joules": row.joules,
    }


def failures(queue: JobQueue, batch: Batch) -> list[str]:
    """The table of a batch's failed pictures, and where the rest is; empty without any."""
    count = batch.counts[State.FAILED]
    if not count:
        return []
    lines = [f"{'picture':>7}  {'seed':>20}  {'tries':>5}  why"]
    for row, _ in zip(queue.rows(batch.id, State.FAILED), range(FAILURES_SHOWN), strict=False):
        number, why = row.job.index + 1, " ".join((row.error or "").split())
        lines.append(f"{number:>7}  {row.job.seed:>20}  {row.attempts:>5}  {why}")
    if count > FAILURES_SHOWN:
        lines.append(f"and {count - FAILURES_SHOWN} more: sdamd batch show {batch.id} --json")
    return lines
