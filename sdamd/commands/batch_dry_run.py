"""`sdamd batch run --dry-run`: what a batch would be, and take, without making anything."""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sdamd.batch_file import Row
from sdamd.errors import DoesNotFit, StorageError
from sdamd.jobs import JobQueue
from sdamd.plan import Plan, Verdict, about_shapes
from sdamd.progress import duration
from sdamd.request import Job
from sdamd.settings import Settings
from sdamd.store import FILE, Store
from sdamd.studio import Studio

_BYTES_PER_PIXEL = 3
"""Of a PNG at most, near enough: eight bits for each of three channels, packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Pictures that are alike, and how they would be made; `why` there is no plan."""

    job: Job
    count: int
    plan: Plan | None
    why: str = ""

    @property
    def seconds(self) -> float | None:
        """What all of them take; None where nothing tells it."""
        if self.plan is None or self.plan.seconds is None:
            return None
        return self.plan.seconds * self.count / self.plan.batch

    @property
    def bytes_max(self) -> int:
        """What their files take at most."""
        width, height = self.job.hires_size
        return width * height * self.job.upscale**2 * _BYTES_PER_PIXEL * self.count


def run(asked: argparse.Namespace, settings: Settings, rows: Iterator[Row], name: str) -> int:
    """Print the kinds of pictures, the plan of each, the time and the room on the disk."""
    wrong: list[str] = []
    # The same code decides as in a run, on a queue that goes with this process.
    with (
        tempfile.TemporaryDirectory(prefix="sdamd-") as folder,
        closing(Studio(settings)) as studio,
        closing(Store(Path(folder) / FILE)) as store,
    ):
        queue = JobQueue(store)
        number = queue.enqueue(
            studio.asked(rows, strict=asked.strict, refused=wrong.append),
            name=name, output=settings.outputs, filename=settings.filename,
        )  # fmt: skip
        kinds = [_kind(studio, job, count) for job, count in queue.kinds(number)]
    for problem in wrong:
        print(f"sdamd: {problem}", file=sys.stderr)
    free = _free_bytes(settings.outputs)
    if asked.json:
        print(json.dumps(_as_json(kinds, free)))
    else:
        for line in _in_words(kinds, free, settings.outputs):
            print(line)
    if kinds and all(kind.plan is None for kind in kinds):
        return DoesNotFit.exit_status
    return StorageError.exit_status if free is not None and free < _needed(kinds) else 0


def _kind(studio: Studio, job: Job, count: int) -> _Kind:
    plan = studio.plan(job, count=count)
    if plan.verdict is Verdict.DOES_NOT_FIT:
        return _Kind(job=job, count=count, plan=None, why=plan.reasons[-1])
    return _Kind(job=job, count=count, plan=plan)


def _needed(kinds: list[_Kind]) -> int:
    return sum(kind.bytes_max for kind in kinds)


def _free_bytes(folder: Path) -> int | None:
    """What is free where the pictures would go; the folder may not be there yet."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    return None if there is None else shutil.disk_usage(there).free


def _seconds(kinds: list[_Kind]) -> float | None:
    known = [kind.seconds for kind in kinds if kind.seconds is not None]
    return sum(known) if len(known) == len(kinds) else None


def _as_json(kinds: list[_Kind], free: int | None) -> dict[str, object]:
    return {
        "total": sum(kind.count for kind in kinds),
        "seconds": _seconds(kinds),
        "bytes_max": _needed(kinds),
        "free_bytes": free,
        "kinds": [
            {
                "count": kind.count,
                "checkpoint": kind.job.checkpoint,
                "width": kind.job.width,
                "height": kind.job.height,
                "steps": kind.job.steps,
                "seconds": kind.seconds,
                "plan": None if kind.plan is None else kind.plan.to_dict(),
                "problem": kind.why or None,
            }
            for kind in kinds
        ],
    }


def _in_words(kinds: list[_Kind], free: int | None, folder: Path) -> Iterator[str]:
    for kind in kinds:
        job, plan = kind.job, kind.plan
        how = kind.why if plan is None else f"{plan.verdict}, {plan.batch} at a time, {plan.dtype}"
        took = "" if kind.seconds is None else f", about {duration(kind.seconds)}"
        model = job.checkpoint or "the embedded model"
        yield (
            f"{kind.count} x {job.width} x {job.height}, {job.steps} steps of {model}: {how}{took}"
        )
    seconds = _seconds(kinds)
    time = "unknown" if seconds is None else f"about {duration(seconds)}"
    room = "" if free is None else f"; {free / 2**30:.1f} GiB are free in {folder}"
    total = sum(kind.count for kind in kinds)
    yield f"{total} pictures; time: {time}; at most {_needed(kinds) / 2**30:.2f} GiB{room}"
    if said := about_shapes(kind.job for kind in kinds):
        yield said
