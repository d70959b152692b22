"""Runs: what follows a click on Generate. They are the server's; pages come and look, and go."""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sdamd.errors import SdamdError
from sdamd.metadata import to_parameters
from sdamd.render import Failed, Rendered, Started, Step
from sdamd.request import Job, Request
from sdamd.studio import Happening, Saved, Studio

log = logging.getLogger(__name__)

SHOWN = 100
"""How many pictures of one run a page shows; a browser would choke on thousands."""
KEPT = 50
"""How many runs are remembered."""


class Stage(StrEnum):
    """Where a run is; the last three are its ends."""

    WAITING = "waiting"
    LOADING = "loading"
    RENDERING = "rendering"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A saved picture and its record as text."""

    job: Job
    path: Path
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run at one moment.

    `pictures` are the last `SHOWN`; `finished` counts those that are saved or have failed, which
    took `steps_finished`. `together` are the jobs of the pass that goes on, at `step` of `steps`.
    Times are seconds of the run's clock; `began` is that of the first step.
    """

    stage: Stage = Stage.WAITING
    stopping: bool = False
    pictures: tuple[Picture, ...] = ()
    problems: tuple[str, ...] = ()
    saved: int = 0
    finished: int = 0
    steps_finished: int = 0
    together: tuple[Job, ...] = ()
    step: int = 0
    steps: int = 0
    started: float | None = None
    began: float | None = None
    now: float = 0.0

    @property
    def ended(self) -> bool:
        """Nothing will change any more."""
        return self.stage in (Stage.DONE, Stage.STOPPED, Stage.FAILED)

    @property
    def steps_done(self) -> float:
        """Steps of all pictures so far."""
        running = sum(job.steps for job in self.together)
        return self.steps_finished + (running * self.step / self.steps if self.steps else 0)


class Run:
    """The jobs of one click and how far they are. Written by one thread, read by many."""

    def __init__(self, jobs: Sequence[Job], clock: Callable[[], float] = time.monotonic) -> None:
        self.id = secrets.token_hex(8)
        self.jobs = tuple(jobs)
        self.total_steps = sum(job.steps for job in jobs)
        self._clock = clock
        self._stop = threading.Event()
        self._changed = threading.Condition()  # its lock may be taken again by its owner
        self._state = State(now=clock())
        self._first_steps = 0.0
        self._parameters = ""

    @property
    def state(self) -> State:
        """How far it is."""
        return self._state

    def seconds(self) -> float:
        """How long it has run, or ran; waiting does not count."""
        state = self._state
        end = state.now if state.ended else self._clock()
        return 0.0 if state.started is None else end - state.started

    def seconds_left(self) -> float | None:
        """The time for the steps that are left, at the pace of those since the first."""
        state = self._state
        made = state.steps_done - self._first_steps
        if state.began is None or made <= 0 or state.now <= state.began:
            return None
        return (self.total_steps - state.steps_done) * (state.now - state.began) / made

    def stop(self) -> None:
        """End after the current step; a run that waits ends at once."""
        with self._changed:
            self._stop.set()
            if self._state.stage is Stage.WAITING:
                self._change(stage=Stage.STOPPED)
            elif not self._state.ended:
                self._change(stopping=True)

    def wait(self, seen: State, seconds: float) -> State:
        """The state as soon as it is another than `seen`, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not seen, seconds)
            return self._state

    def carry_out(self, studio: Studio) -> None:
        """Make the pictures. Whatever goes wrong becomes part of the state."""
        with self._changed:
            if self._stop.is_set():
                return
            self._change(stage=Stage.LOADING, started=self._clock())
        problems: tuple[str, ...] = ()
        try:
            for event in studio.run(self.jobs, self._stop.is_set):
                self._note(event)
        except SdamdError as error:
            problems = tuple(str(error).splitlines())
        except Exception as error:  # noqa: BLE001  # as below
            # A bug, too, must reach the page, and must not keep the next run from starting.
            level = logging.INFO if self._stop.is_set() else logging.ERROR
            log.log(level, "the run has failed", exc_info=True)
            problems = (f"unexpected {type(error).__name__}: {error}; the terminal shows more",)
        state = self._state
        if problems or state.finished > state.saved:
            end = Stage.FAILED
        else:
            end = Stage.STOPPED if state.finished < len(self.jobs) else Stage.DONE
        self._change(stage=end, problems=state.problems + problems, together=(), step=0, steps=0)

    def _note(self, event: Happening) -> None:
        state = self._state
        match event:
            case Started(job=job):
                # Those that share a pass start one after another, before its first step.
                joins = state.step == 0 and job not in state.together
                together = (*state.together, job) if joins else (job,)
                self._change(together=together, step=0, steps=0)
            case Step(jobs=jobs, step=step, steps=steps):
                self._change(stage=Stage.RENDERING, together=jobs, step=step, steps=steps)
                if state.began is None:
                    self._first_steps = self._state.steps_done
                    self._change(began=self._state.now)
            case Rendered(record=record):
                self._parameters = to_parameters(record)
            case Saved(job=job, path=path):
                picture = Picture(job=job, path=path, parameters=self._parameters)
                pictures = (*state.pictures, picture)[-SHOWN:]
                self._finish(job, pictures=pictures, saved=state.saved + 1)
            case Failed(job=job, error=error):
                said = f"picture {job.index + 1} (seed {job.seed}): {error}"
                self._finish(job, problems=(*state.problems, said))

    def _finish(self, job: Job, **changes: object) -> None:
        state = self._state
        self._change(
            finished=state.finished + 1,
            steps_finished=state.steps_finished + job.steps,
            together=tuple(other for other in state.together if other != job),
            **changes,
        )

    def _change(self, **changes: object) -> None:
        with self._changed:
            self._state = replace(self._state, now=self._clock(), **changes)  # type: ignore[arg-type]  # names of its fields
            self._changed.notify_all()


class Runs:
    """Carries out runs one after another, in a thread of its own."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self._waiting: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._known: dict[str, Run] = {}
        self._thread = threading.Thread(target=self._work, name="runs", daemon=True)
        self._thread.start()

    def start(self, requests: Iterable[Request]) -> Run:
        """Decide what is open and put the jobs in line.

        Raises:
            UserError: what is asked for cannot be made; nothing was started.
        """
        run = Run(self.studio.jobs(requests))
        for old in list(self._known.values())[: -KEPT + 1]:
            if old.state.ended:
                self._known.pop(old.id, None)
        self._known[run.id] = run
        self._waiting.put(run)
        return run

    def find(self, run_id: str) -> Run | None:
        """The run of that id, if it is still remembered."""
        return self._known.get(run_id)

    def current(self) -> Run | None:
        """The run that a page should show when it opens: the oldest unfinished, else the last."""
        runs = list(self._known.values())
        unfinished = (run for run in runs if not run.state.ended)
        return next(unfinished, runs[-1] if runs else None)

    def close(self, seconds: float) -> None:
        """Stop all runs and wait for the end of the current one, but no longer than `seconds`."""
        self._waiting.put(None)
        for run in list(self._known.values()):
            run.stop()
        self._thread.join(seconds)

    def _work(self) -> None:
        while (run := self._waiting.get()) is not None:
            run.carry_out(self.studio)
