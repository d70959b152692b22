"""`sdamd generate`: make pictures; print their paths."""

import argparse
import json
import logging
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from sdamd import gallery
from sdamd.commands.arguments import asked_for, stop_on_interrupt
from sdamd.errors import INTERRUPTED
from sdamd.progress import Progress
from sdamd.render import Failed, Started, Step, in_pass_of
from sdamd.request import Request
from sdamd.studio import Happening, Saved, Studio

log = logging.getLogger(__name__)


def run(asked: argparse.Namespace) -> int:
    """Make pictures; print their paths."""
    request, settings = asked_for(asked)
    pass_size = _pass_size(asked.from_image, request) if asked.from_image else 1
    as_before = pass_size > 1 and not settings.batch_size
    if as_before:
        settings = replace(settings, batch_size=pass_size)
    studio = Studio(settings)
    with closing(studio), stop_on_interrupt() as stopping:
        jobs = studio.jobs([request])
        log.debug("device: %s", studio.device.reason)
        progress = Progress(sum(job.steps for job in jobs))
        saved = failed = done = 0
        rendered = in_pass_of(jobs[0], pass_size) if as_before else jobs
        for event in studio.run(rendered, stopping.is_set):
            match event:
                case Step(jobs=together, step=step, steps=steps):
                    now = done + len(together) * together[0].steps * step / steps
                    progress.update(now, f"picture {saved + failed + 1} of {len(jobs)}")
                case Saved(path=path):
                    saved, done = saved + 1, done + event.job.steps
                    progress.clear()
                    if not asked.json:
                        print(path, flush=True)
                case Failed(job=job, error=error):
                    failed, done = failed + 1, done + job.steps
                    progress.clear()
                    print(
                        f"sdamd: picture {job.index + 1} (seed {job.seed}): {error}",
                        file=sys.stderr,
                    )
            if asked.json and (line := event_line(event)):
                print(json.dumps(line), flush=True)
        progress.clear()
    if stopping.is_set():
        print(f"sdamd: stopped; {saved} of {len(jobs)} pictures are saved", file=sys.stderr)
        return INTERRUPTED
    return 1 if failed else 0


def _pass_size(path: Path, request: Request) -> int:
    """In how large a pass to make a picture again so that every byte is the same.

    It is 1 for a request that changes something, and for the records of other tools.
    """
    reading = gallery.read(path)
    if reading.record is None or reading.request() != request:
        return 1
    return reading.record.together


def event_line(event: Happening) -> dict[str, object] | None:
    """An event as `--json` shows it; that a picture is rendered but not yet saved is not shown."""
    match event:
        case Started(job=job, plan=plan):
            return {
                "event": "started",
                "index": job.index,
                "seed": str(job.seed),
                "plan": plan.to_dict(),
            }
        case Step(jobs=(job, *_), step=step, steps=steps):
            shown = {"event": "step", "index": job.index, "seed": str(job.seed)}
            return {**shown, "step": step, "steps": steps, "together": len(event.jobs)}
        case Saved(job=job, path=path):
            return {"event": "saved", "index": job.index, "seed": str(job.seed), "path": str(path)}
        case Failed(job=job, error=error):
            return {
                "event": "failed",
                "index": job.index,
                "seed": str(job.seed),
                "error": str(error),
            }
    return None
