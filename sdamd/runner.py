"""Works through a batch of the queue: claims, renders on one or more devices, saves, marks done.

The order that makes a picture exactly once: it is claimed in the store, rendered, saved under its
final name with the job's id inside, and marked as done. Wherever that is cut off, the next run
finds either the file, and marks it, or none, and makes it.

The store is asked from the thread that reads `run` alone; each device has a thread that waits for
its render, and one more thread saves, so that the next picture need not wait for the disk.
"""

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final, TypeAlias

from sdamd import gallery
from sdamd.errors import DoesNotFit, HardwareError, SdamdError, StorageError, UserError
from sdamd.hardware.sensors import NONE, Sensors
from sdamd.jobs import Batch, Claim, JobQueue, Made, State
from sdamd.render import FILLER, Event, Failed, Render, Rendered, Started, Step
from sdamd.request import Job

log = logging.getLogger(__name__)

AHEAD: Final = 4
"""How many passes a device is given at once, so that it need not wait for the store."""

DEATHS_IN_A_ROW: Final = 3
"""After so many, without a picture between, a device is left out when there is another."""

DEATHS_OF_THE_LAST: Final = 20
"""The same for the last device: then it is not the pictures."""

SHORT_SECONDS: Final = 10.0
"""Until the next try, where memory is short for what has fitted before."""

SHORT_MAX_SECONDS: Final = 900.0
"""For how long to try that; then the batch stops, and nothing is lost."""

COOLER: Final = 5.0
"""By how many degrees a card must be below its limit to go on."""

_FREE_BYTES: Final = 16 * 2**20
_FLUSH_SECONDS: Final = 0.5
_FLUSH_COUNT: Final = 16
_LOOK_SECONDS: Final = 1.0
_BEAT_SECONDS: Final = 20.0
_TICK_SECONDS: Final = 0.1
_UNSAVED_MAX: Final = 64


class Wish(IntEnum):
    """What the person wants who started it."""

    GO_ON = 0
    FINISH = 1
    """Stop, but not before what is being rendered is done."""
    STOP = 2
    """Stop after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The picture is in its file, on the disk."""

    job: Job
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The process that rendered died of this job, it seems; it is tried once more, alone."""

    job: Job
    error: SdamdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooling:
    """A card is hotter than it may be and rests until it is `until` degrees."""

    device: str
    celsius: float
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The run ended with `count` pictures still to be made; `why` in words."""

    why: str
    count: int


Happening: TypeAlias = Event | Saved | Retried | Cooling | Left


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where pictures are rendered: a name for messages, the render, and the card's sensors."""

    name: str
    render: Render
    sensors: Sensors = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop and to rest: seconds since 1970 with how to say it, and degrees Celsius."""

    until: float | None = None
    until_text: str = ""
    celsius: float | None = None


class Runner:
    """One run of one batch.

    `pass_size` says how many jobs like one share a pass, of a kind with that many.
    """

    def __init__(
        self,
        jobs: JobQueue,
        batch: int,
        devices: Sequence[Device],
        pass_size: Callable[[Job, int], int],
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._queue = jobs
        self._batch = jobs.batch(batch)
        self._pass_size = pass_size
        self._limits = limits or Limits()
        self._clock = clock
        self._happened: queue.SimpleQueue[tuple[_Lane | None, object]] = queue.SimpleQueue()
        self._lanes = [_Lane(device, self._happened) for device in devices]
        self._saver = _Saver(jobs, self._batch, self._happened)
        self._unsaved: dict[int, float | None] = {}
        self._made: list[Made] = []
        self._short_since: float | None = None
        self._why = ""
        self._error: BaseException | None = None
        self._looked = self._flushed = self._beaten = clock()

    def run(self, wish: Callable[[], Wish] = lambda: Wish.GO_ON) -> Iterator[Happening]:
        """Make what is missing and yield what happens.

        Raises:
            StorageError: the disk is full or gone; what is not made stays in the queue.
            HardwareError: no device renders any more.
        """
        self._settle()
        try:
            while True:
                self._look(wish)
                yield from self._feed()
                if self._idle() and not self._more():
                    break
                yield from self._take()
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        left = self._queue.batch(self._batch.id)
        if left.left and left.state != "cancelled":
            yield Left(why=self._why or "other processes are making them", count=left.left)

    # -- before and after ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Bring the queue into line with the disk after whatever happened."""
        output, counts = self._batch.output, self._batch.counts
        if not output.is_dir() and counts[State.DONE]:
            raise StorageError(
                f"the pictures of batch {self._batch.id} went to {output}, which is not there; is "
                "its disk connected? --output names another folder for those to come"
            )
        gallery.check_folder(output)
        self._queue.recover(self._batch.id)
        found: list[Made] = []
        for path, job_id in gallery.job_ids(output):
            number = self._batch.number_of(job_id)
            if number is not None:
                found.append(Made(number=number, path=path))
            if len(found) == 500:
                self._queue.finish(self._batch.id, found)
                found.clear()
        if found:
            self._queue.finish(self._batch.id, found)

    def _end(self) -> None:
        """Whatever happened: what is saved is marked, what is not made can be claimed again."""
        for lane in self._lanes:
            lane.end()
        self._saver.end()
        try:
            while not self._happened.empty():
                _, what = self._happened.get()
                if isinstance(what, Saved):
                    self._note(what)
                elif isinstance(what, _Unsaved):
                    self._error = self._error or what.error
            self._flush()
            left = [*self._unsaved, *(n for lane in self._lanes for n in lane.jobs)]
            self._queue.give_back(self._batch.id, left)
        except StorageError as error:
            # The lease ends with this process, and the next run finds the files.
            log.warning("%s", error)
            self._error = self._error or error

    # -- the loop --------------------------------------------------------------------------------

    def _look(self, wish: Callable[[], Wish]) -> None:
        """Find out whether to go on."""
        now = self._clock()
        asked = wish()
        if asked:
            self._stop("it was interrupted", at_once=asked is Wish.STOP)
        if self._limits.until is not None and now >= self._limits.until:
            self._stop(self._limits.until_text)
        for lane in self._lanes:
            lane.measure(now)
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            state = self._queue.batch_state(self._batch.id)
            if state != "ready":
                self._stop(f"it was {state}", at_once=state == "cancelled")
        if self._made and now - self._flushed >= _FLUSH_SECONDS:
            self._flush()
        if now - self._beaten >= _BEAT_SECONDS:
            self._beaten = now
            self._queue.beat()

    def _stop(self, why: str, *, at_once: bool = False) -> None:
        self._why = self._why or why
        for lane in self._lanes:
            lane.wish = max(lane.wish, Wish.STOP if at_once else Wish.FINISH)

    def _fail(self, error: BaseException) -> None:
        """Claim nothing any more, and raise this at the end."""
        self._error = self._error or error
        self._stop(str(error))

    def _feed(self) -> Iterator[Happening]:
        """Give each device that waits its next jobs."""
        for lane in self._lanes:
            while not (self._why or lane.is_full or len(self._unsaved) > _UNSAVED_MAX):
                if self._clock() < lane.waits_until:
                    break
                rests, said = lane.rests(self._limits.celsius)
                if said is not None:
                    yield said
                if rests:
                    break
                claim = self._claim()
                if claim is None:
                    break
                lane.give(claim)

    def _claim(self) -> Claim | None:
        output = self._batch.output
        try:
            free = shutil.disk_usage(output).free
            if free < _FREE_BYTES:
                said = f"the disk has {free / 2**20:.1f} MiB free"
                self._fail(StorageError(f"pictures cannot be saved in {output}: {said}"))
                return None
            passes = AHEAD if self._limits.celsius is None and len(self._lanes) == 1 else 1
            return self._queue.claim(self._batch.id, self._pass_size, passes=passes)
        except OSError as error:
            self._fail(StorageError(f"{output} cannot be used: {error.strerror}"))
        except StorageError as error:
            self._fail(error)
        return None

    def _idle(self) -> bool:
        return not self._unsaved and not any(lane.is_busy for lane in self._lanes)

    def _more(self) -> bool:
        """Whether there is something to claim, now that nothing is being made here."""
        if self._why:
            return False
        self._flush()
        if self._queue.has_pending(self._batch.id):
            return True
        # Others may have died meanwhile; what they had saved is found as at the beginning.
        before = self._queue.batch(self._batch.id).counts[State.RUNNING]
        if before and self._queue.recover(self._batch.id) < before:
            self._settle()
        return self._queue.has_pending(self._batch.id)

    def _take(self) -> Iterator[Happening]:
        """Wait a moment for something to happen, and yield it."""
        try:
            lane, what = self._happened.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            return
        if isinstance(what, _Over):
            assert lane is not None
            yield from self._over(lane, what)
        elif isinstance(what, _Unsaved):
            del self._unsaved[what.number]
            self._queue.give_back(self._batch.id, [what.number])
            self._fail(what.error)
        elif isinstance(what, Saved):
            self._note(what)
            yield what
        elif isinstance(what, Started | Step | Rendered | Failed):
            assert lane is not None
            if isinstance(what, Step) or what.job.index in lane.jobs:  # else it was taken back
                if isinstance(what, Failed) and self._is_short(lane, what):
                    return
                self._see(lane, what)
                yield what

    def _is_short(self, lane: "_Lane", failed: Failed) -> bool:
        """Whether other programs have the memory for now; then the job goes back, and waits.

        What has fitted once is not too large. A night must not be lost for one bad minute.
        """
        number, now = failed.job.index, self._clock()
        if not isinstance(failed.error, DoesNotFit):
            return False
        self._flush()
        if not self._queue.has_made_alike(self._batch.id, number):
            return False
        if self._short_since is None:
            self._short_since = now
            log.warning("%s; it has fitted before, so this waits for memory", failed.error)
        if now - self._short_since > SHORT_MAX_SECONDS:
            self._fail(failed.error)
        lane.waits_until = now + SHORT_SECONDS
        del lane.jobs[number]
        self._queue.give_back(self._batch.id, [number])
        return True

    def _see(self, lane: "_Lane", event: Event) -> None:
        lane.see(event)
        if isinstance(event, Rendered):
            self._short_since = None
            self._unsaved[event.job.index] = lane.joules_of_one()
            self._saver.give(event)
        elif isinstance(event, Failed):
            self._queue.fail(self._batch.id, event.job.index, str(event.error))

    def _note(self, saved: Saved) -> None:
        number = saved.job.index
        joules = self._unsaved.pop(number, None)
        self._made.append(Made(number=number, path=saved.path, joules=joules))
        if len(self._made) >= _FLUSH_COUNT:
            self._flush()

    def _flush(self) -> None:
        self._flushed = self._clock()
        if self._made:
            self._queue.finish(self._batch.id, self._made)
            self._made = []

    def _over(self, lane: "_Lane", over: "_Over") -> Iterator[Happening]:
        """A device is through with a claim, one way or the other."""
        lane.claims -= 1
        left = {n: job for n, job in over.jobs.items() if n in lane.jobs}
        for number in left:
            del lane.jobs[number]
        error = over.error
        begun = left.keys() & lane.begun
        lane.begun -= begun
        if error is None or isinstance(error, StorageError):
            self._queue.give_back(self._batch.id, left)
            if error is not None:
                self._fail(error)
        elif isinstance(error, UserError):
            for job in left.values():  # a model that is missing: it is so for all of these
                self._queue.fail(self._batch.id, job.index, str(error))
                yield Failed(job=job, error=error)
        elif isinstance(error, SdamdError):
            self._queue.give_back(self._batch.id, left.keys() - begun)
            for number in sorted(begun):
                state = self._queue.blame(self._batch.id, number, str(error))
                again = state is not State.FAILED
                yield (Retried if again else Failed)(job=left[number], error=error)
            if lane in self._lanes:  # it may have been left out meanwhile
                self._count_death(lane, error, was_at_work=bool(begun))
        else:
            self._queue.give_back(self._batch.id, left)
            self._fail(error)

    def _count_death(self, lane: "_Lane", error: SdamdError, *, was_at_work: bool) -> None:
        lane.deaths += 1
        lane.deaths_at_start = 0 if was_at_work else lane.deaths_at_start + 1
        is_last = len(self._lanes) == 1
        worst = DEATHS_OF_THE_LAST if is_last else DEATHS_IN_A_ROW
        if lane.deaths < worst and lane.deaths_at_start < 2:
            return
        if is_last:
            self._fail(HardwareError(f"{lane.name} renders no picture any more: {error}"))
        else:
            log.warning("%s is left out from here on: %s", lane.name, error)
            self._lanes.remove(lane)
            lane.end()
            self._queue.give_back(self._batch.id, lane.jobs)
            lane.jobs.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Over:
    """A render has come to the end of a claim; `error` is what ended it before."""

    jobs: dict[int, Job]
    error: BaseException | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsaved:
    """A picture could not be saved."""

    number: int
    error: BaseException


@dataclass(slots=True, eq=False)
class _Lane:
    """A device at work: its thread, what it was given, and how it fares."""

    device: Device
    happened: "queue.SimpleQueue[tuple[_Lane | None, object]]"
    wish: Wish = Wish.GO_ON
    jobs: dict[int, Job] = field(default_factory=dict)
    """What it was given and is neither rendered nor failed."""
    begun: set[int] = field(default_factory=set)
    deaths: int = 0
    deaths_at_start: int = 0
    claims: int = 0
    resting: bool = False
    waits_until: float = 0.0
    joules: float = 0.0
    together: int = 1
    is_between: bool = True
    measured: float | None = None
    work: "queue.SimpleQueue[Claim | None]" = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """What people call the device."""
        return self.device.name

    @property
    def is_busy(self) -> bool:
        """Whether it has something to do."""
        return self.claims > 0

    @property
    def is_full(self) -> bool:
        """Whether it has one claim at work and one that waits."""
        return self.claims >= 2

    def give(self, claim: Claim) -> None:
        """Let it render these after what it has."""
        self.claims += 1
        self.jobs |= {job.index: job for job in claim.jobs}
        self.work.put(claim)
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name=f"render {self.name}")
            self.thread.start()

    def see(self, event: Event) -> None:
        """Keep account of what is being rendered."""
        if isinstance(event, Started):
            self.begun.add(event.job.index)
            if self.is_between:
                self.is_between, self.joules = False, 0.0
        elif isinstance(event, Step):
            self.together = len(event.jobs)
        else:
            self.deaths = self.deaths_at_start = 0
            self.is_between = True
            self.jobs.pop(event.job.index, None)
            self.begun.discard(event.job.index)

    def measure(self, now: float) -> None:
        """Add up what the card takes."""
        if self.measured is not None and now - self.measured < _LOOK_SECONDS:
            return
        watts = self.device.sensors.watts()
        if watts is not None and self.measured is not None and not self.is_between:
            self.joules += watts * (now - self.measured)
        self.measured = now

    def joules_of_one(self) -> float | None:
        """What one picture of the pass took; None where the card tells no power."""
        if self.device.sensors.power is None:
            return None
        return round(self.joules / self.together, 1)

    def rests(self, limit: float | None) -> tuple[bool, Cooling | None]:
        """Whether the card is too hot for the next picture; with it the news of that."""
        if limit is None:
            return False, None
        if self.is_busy:
            return True, None  # one claim at a time, so that it can rest between
        celsius = self.device.sensors.celsius()
        if celsius is None:  # it sleeps
            self.resting = False
            return False, None
        was_resting, below = self.resting, limit - COOLER
        self.resting = celsius > (below if was_resting else limit)
        if self.resting and not was_resting:
            return True, Cooling(device=self.name, celsius=celsius, until=below)
        return self.resting, None

    def end(self) -> None:
        """Stop now; what it was given and has not rendered stays in `jobs`."""
        if self.thread is None:
            return
        if self.thread.is_alive():
            self.wish = Wish.STOP
            self.work.put(None)
            if self.claims:
                self.device.render.close()  # a child is ended in the middle of a step
            self.thread.join()

    def _work(self) -> None:
        while (claim := self.work.get()) is not None:
            error: BaseException | None = None
            if not self.wish:
                try:
                    for event in self.device.render(_filled(claim), self._watch):
                        self.happened.put((self, event))
                except BaseException as raised:  # noqa: BLE001  # the reader of `run` gets it
                    error = raised
            jobs = {job.index: job for job in claim.jobs}
            self.happened.put((self, _Over(jobs=jobs, error=error)))

    def _watch(self) -> bool:
        """Asked by the render after steps: stop?"""
        return self.wish is Wish.STOP or (self.wish is Wish.FINISH and not self.begun)


def _filled(claim: Claim) -> tuple[Job, ...]:
    """All jobs of a claim, each pass filled up to the size that it would have undisturbed.

    Kernels round by the size of a pass, so only then are the pixels the same to the bit.
    """
    return tuple(
        job
        for jobs, size in zip(claim.passes, claim.sizes, strict=True)
        for job in (*jobs, *(replace(jobs[0], index=FILLER) for _ in range(size - len(jobs))))
    )


class _Saver:
    """The thread that saves."""

    def __init__(
        self,
        jobs: JobQueue,
        batch: Batch,
        happened: "queue.SimpleQueue[tuple[_Lane | None, object]]",
    ) -> None:
        self._queue = jobs
        self._batch = batch
        self._happened = happened
        self._first: dict[Path, int] = {}
        self._waiting: queue.SimpleQueue[Rendered | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="save", daemon=True)
        self._thread.start()

    def give(self, rendered: Rendered) -> None:
        """Save this after what is waiting."""
        self._waiting.put(rendered)

    def end(self) -> None:
        """Save what is waiting, and end."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (rendered := self._waiting.get()) is not None:
            try:
                path = self._save(rendered)
            except BaseException as error:  # noqa: BLE001  # the reader of `run` gets it
                self._happened.put((None, _Unsaved(number=rendered.job.index, error=error)))
            else:
                self._happened.put((None, Saved(job=rendered.job, path=path)))

    def _save(self, rendered: Rendered) -> Path:
        number = rendered.job.index

        def numbers(folder: Path, free: int) -> gallery.Number:
            if folder not in self._first:
                self._first[folder] = self._queue.first_number(self._batch.id, folder, free)
            first = self._first[folder]
            return gallery.Number(number=first + number, last=first + self._batch.total - 1)

        return gallery.save(
            gallery.with_job_id(rendered.png, self._batch.job_id(number)),
            self._batch.output, self._batch.filename, rendered.record, numbers=numbers,
        )  # fmt: skip
