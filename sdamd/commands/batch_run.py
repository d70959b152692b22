"""`sdamd batch run`, `resume` and `retry`: pictures of a batch; prints their paths."""

import argparse
import json
import logging
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from sdamd import batch_file
from sdamd.commands.arguments import asked_for, settings_of
from sdamd.commands.batch import failures
from sdamd.commands.generate import event_line
from sdamd.errors import INTERRUPTED, BadRequest
from sdamd.filename import Pattern
from sdamd.jobs import Batch, State
from sdamd.plan import about_shapes
from sdamd.progress import Progress, duration
from sdamd.render import Failed, Rendered, Step
from sdamd.runner import Cooling, Device, Happening, Left, Limits, Retried, Saved, Wish
from sdamd.settings import Settings
from sdamd.store import FILE
from sdamd.studio import Studio
from sdamd.template import Mode, Wildcards

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Between two lines about the progress where no bar can be drawn."""

PROBLEMS_SHOWN = 20


def run(asked: argparse.Namespace) -> int:
    """Take in a file of rows as a batch, and make its pictures."""
    request, settings = asked_for(asked)
    limits, axes = limits_of(asked), batch_file.parse_axes(asked.vary)

    def rows() -> Iterator[batch_file.Row]:
        source = batch_file.read(
            asked.file, request.to_dict(),
            kind=None if asked.format is None else batch_file.Kind(asked.format),
            output=settings.outputs, stdin=sys.stdin.buffer,
        )  # fmt: skip
        return batch_file.expand(
            source, mode=Mode(asked.templates), wildcards=Wildcards(settings.home / "wildcards"),
            axes=axes, limit=asked.limit,
        )  # fmt: skip

    name = "stdin" if asked.file == "-" else asked.file
    if asked.dry_run:
        from sdamd.commands import batch_dry_run  # noqa: PLC0415  # not needed for a real run

        return batch_dry_run.run(asked, settings, rows(), name)
    with closing(Studio(settings)) as studio:
        # What cannot be used is told before anything is read or written.
        devices = studio.batch_devices(_named(asked), limits)
        if (settings.home / FILE).exists():
            studio.queue.batches()
        refused = _Refused()
        number = studio.enqueue(rows(), name=name, strict=asked.strict, refused=refused)
        refused.sum_up()
        if said := about_shapes(job for job, _ in studio.queue.kinds(number)):
            log.warning(said)
        status = _work(asked, studio, [number], limits, devices)
        return status or min(1, refused.count)


def resume(asked: argparse.Namespace) -> int:
    """Go on with one batch, or with all that are not finished, the oldest first."""
    limits, settings = limits_of(asked), _settings(asked)
    with closing(Studio(settings)) as studio:
        devices = studio.batch_devices(_named(asked), limits)
        numbers = [asked.id] if asked.id else studio.queue.unfinished()
        for number in numbers:
            studio.queue.ready(number)
        return _work(asked, studio, numbers, limits, devices)


def retry(asked: argparse.Namespace) -> int:
    """Make the failed and cancelled pictures of a batch again."""
    limits, settings = limits_of(asked), _settings(asked)
    with closing(Studio(settings)) as studio:
        devices = studio.batch_devices(_named(asked), limits)
        count = studio.queue.retry(asked.id, missing=asked.missing)
        _say(f"{count} pictures of batch {asked.id} are made again")
        return _work(asked, studio, [asked.id], limits, devices)


def _named(asked: argparse.Namespace) -> list[str]:
    """The devices that are named."""
    return [name.strip() for name in (asked.devices or "").split(",") if name.strip()]


def _settings(asked: argparse.Namespace) -> Settings:
    settings = settings_of(asked)
    Pattern.parse(settings.filename)
    return settings


def limits_of(asked: argparse.Namespace, now: Callable[[], float] = time.time) -> Limits:
    """When to stop and when to rest.

    Raises:
        BadRequest: with all that is wrong.
    """
    problems: list[str] = []
    hours = _number("max-hours", asked.max_hours, 0.01, 8760, problems)
    celsius = _number("max-temp", asked.max_temp, 30, 120, problems)
    ends: list[tuple[float, str]] = []
    if hours is not None:
        ends.append((now() + hours * 3600, f"{hours:g} hours are over"))
    if asked.stop_at is not None:
        clock = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", asked.stop_at.strip())
        if clock is None:
            problems.append(f"stop-at is {asked.stop_at!r}; allowed 00:00 to 23:59")
        else:
            end = _next(datetime.fromtimestamp(now()).astimezone(), *map(int, clock.groups()))
            ends.append((end.timestamp(), f"it is {end:%H:%M}"))
    if problems:
        raise BadRequest(*problems)
    until, text = min(ends) if ends else (None, "")
    return Limits(until=until, until_text=text, celsius=celsius)


def _next(now: datetime, hour: int, minute: int) -> datetime:
    """The next time that a clock on the wall shows this."""
    # Without the zone's offset, which may be another tomorrow.
    today = now.replace(hour=hour, minute=minute, second=0, microsecond=0, tzinfo=None)
    late = today <= now.replace(tzinfo=None)
    return (today + timedelta(days=1) if late else today).astimezone()


def _number(
    name: str, text: str | None, least: float, most: float, problems: list[str]
) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        problems.append(f"{name} is {text!r}; allowed {least:g} to {most:g}")
    return value


class _Refused:
    """Tells what is wrong with rows as they are read, but not all of thousands."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, problem: str) -> None:
        self.count += 1
        if self.count <= PROBLEMS_SHOWN:
            _say(problem)

    def sum_up(self) -> None:
        """Say what became of the rest."""
        if self.count > PROBLEMS_SHOWN:
            _say(f"and {self.count - PROBLEMS_SHOWN} more problems")
        if self.count:
            _say("these rows make no picture; the others do (--strict would refuse them all)")


def _work(
    asked: argparse.Namespace, studio: Studio, numbers: Sequence[int], limits: Limits,
    devices: Sequence[Device],
) -> int:  # fmt: skip
    """Make what these batches lack; the exit status."""
    status = 0
    with interrupts() as wish:
        for number in numbers:
            if asked.output and asked.what != "run":
                studio.queue.move(number, Path(asked.output).expanduser().absolute())
            shown = _Shown(asked, studio.queue.batch(number))
            try:
                for event in studio.run_batch(number, wish=wish, limits=limits, devices=devices):
                    shown.see(event)
            except KeyboardInterrupt:
                shown.stopped = "it was interrupted"
            finally:
                shown.clear()
            status = max(status, _sum_up(asked, studio, number, shown.stopped))
            if wish() or shown.stopped == "it was interrupted":
                return INTERRUPTED
    return status


def _sum_up(asked: argparse.Namespace, studio: Studio, number: int, stopped: str) -> int:
    batch = studio.queue.batch(number)
    counts = batch.counts
    for line in failures(studio.queue, batch):
        _say(line)
    if batch.left and stopped:
        _say(
            f"stopped, since {stopped}: {counts[State.DONE]} of {batch.total} pictures of batch "
            f"{number} are done; `sdamd batch resume {number}` goes on"
        )
    else:
        _say(f"batch {number}: {counts[State.DONE]} of {batch.total} pictures are done")
        if not batch.left:
            _write_contact_sheet(asked, studio, batch)
    return 1 if counts[State.FAILED] else 0


def _write_contact_sheet(asked: argparse.Namespace, studio: Studio, batch: Batch) -> None:
    rows = studio.queue.rows(batch.id)
    if not next(rows).labels:
        return
    from sdamd import contact_sheet  # noqa: PLC0415  # only for --vary

    cells = (
        contact_sheet.Cell(labels=row.labels, path=row.path if row.state is State.DONE else None)
        for row in studio.queue.rows(batch.id)
    )
    for path in contact_sheet.write(cells, batch.output, f"contact-sheet-{batch.id}"):
        print(path, file=sys.stderr if asked.json else sys.stdout, flush=True)


class _Shown:
    """What a person sees of a run: paths or JSON on stdout, progress and failures on stderr."""

    def __init__(self, asked: argparse.Namespace, batch: Batch) -> None:
        self._json = asked.json
        self._batch = batch
        self._total = batch.left
        self._done = self._failed = 0
        self._steps: dict[int, float] = {}
        self._began = self._said = time.monotonic()
        self._progress = Progress(max(1, self._total))
        self.stopped = ""
        _say(f"batch {batch.id}: {self._total} of {batch.total} pictures to make")

    def see(self, event: Happening) -> None:
        """Show an event."""
        match event:
            case Step(jobs=together, step=step, steps=steps):
                self._steps |= {job.index: step / steps for job in together}
            case Rendered(said=said) if said:
                self._tell(f"picture {event.job.index + 1} (seed {event.job.seed}): {said}")
            case Saved(job=job, path=path):
                self._over(job.index)
                self._done += 1
                self.clear()
                if not self._json:
                    print(path, flush=True)
            case Failed(job=job, error=error):
                self._over(job.index)
                self._failed += 1
                self._tell(f"picture {job.index + 1} (seed {job.seed}): {error}")
            case Retried(job=job, error=error):
                self._steps.pop(job.index, None)
                self._tell(f"picture {job.index + 1} (seed {job.seed}) is tried again: {error}")
            case Cooling(device=device, celsius=celsius, until=until):
                self._tell(f"{device} has {celsius:g} °C and rests until it has {until:g} °C")
            case Left(why=why):
                self.stopped = why
        if self._json and not isinstance(event, Retried | Cooling | Left):
            self._print(event_line(event))
        self._advance()

    def clear(self) -> None:
        """Take the bar away."""
        self._progress.clear()

    def _print(self, line: dict[str, object] | None) -> None:
        if line is not None:
            print(json.dumps({**line, "batch": self._batch.id}), flush=True)

    def _over(self, number: int) -> None:
        self._steps.pop(number, None)

    def _tell(self, sentence: str) -> None:
        self.clear()
        _say(sentence)

    def _advance(self) -> None:
        over = self._done + self._failed
        now = over + sum(self._steps.values())
        self._progress.update(now, f"picture {min(over + 1, self._total)} of {self._total}")
        moment = time.monotonic()
        if sys.stderr.isatty() or moment - self._said < LINE_SECONDS or over == self._total:
            return
        self._said = moment
        left = duration((moment - self._began) * (self._total - now) / now) if now else "unknown"
        failed = f", {self._failed} failed" if self._failed else ""
        _say(
            f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S} batch {self._batch.id}: "
            f"{over} of {self._total} pictures{failed}; time left: {left}"
        )


@contextmanager
def interrupts() -> Iterator[Callable[[], Wish]]:
    """The first Ctrl-C lets the running picture be finished, the second stops now.

    The end that a system asks for (SIGTERM) stops after the step, as there is little time.
    """
    wish = Wish.GO_ON

    def interrupted(number: int, _: object) -> None:
        nonlocal wish
        if wish is not Wish.GO_ON:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            wish = Wish.FINISH
            _say("finishing the running picture, then stopping; Ctrl-C again stops now")
        else:
            wish = Wish.STOP
            _say("asked to end: stopping after this step")

    before = {n: signal.signal(n, interrupted) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(sentence: str) -> None:
    for line in sentence.splitlines():
        print(f"sdamd: {line}", file=sys.stderr, flush=True)
