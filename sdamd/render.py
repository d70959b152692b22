"""The straight line from jobs to PNG bytes, and the events that it reports on the way."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Protocol, TypeAlias

import sdamd
from sdamd import gallery, learnt, models
from sdamd.backends.backend import Backend, Made, Outcome, Pipeline, open_backend
from sdamd.checkpoint import Checkpoint
from sdamd.errors import DoesNotFit, OutOfVram, SdamdError, Stopped, StorageError, Unfinished
from sdamd.hardware.device import Device
from sdamd.hardware.runtime import Engine
from sdamd.metadata import Record
from sdamd.plan import (
    GIB,
    Plan,
    Stage,
    in_figures,
    nearest_that_fits,
    plan_on,
    plan_or_refuse,
)
from sdamd.request import Job
from sdamd.settings import Settings

log = logging.getLogger(__name__)

DIRECTML_LIFETIME = 64
"""Pictures of one process with DirectML, whose drivers do not give back all that they are given.
Source: microsoft/DirectML#412."""

FILLER = -1
"""The index of a job that is rendered for the size of its pass alone, and never reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A job runs now, together with those that share its pass."""

    job: Job
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`step` of `steps` is done for the `jobs` that share a pass."""

    jobs: tuple[Job, ...]
    step: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The picture is made: PNG bytes, with the record that is inside them.

    `said` is what a person should know of it, or empty.
    """

    job: Job
    png: bytes
    record: Record
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The job gave no picture; the others go on."""

    job: Job
    error: SdamdError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run of `LocalRender` ended: `left` are jobs for a fresh process.

    `worn` is that a fresh one should follow in any case, since memory ran out in this one.
    """

    left: tuple[Job, ...] = ()
    worn: bool = False


Event: TypeAlias = Started | Step | Rendered | Failed
Emit: TypeAlias = Callable[[Event], None]
Watch: TypeAlias = Callable[[], bool]
"""Asked after each step; True stops."""


class Render(Protocol):
    """Makes pictures of jobs, wherever that happens."""

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
        """Yield what happens; ends early, without a word about the rest, when `watch` says so."""
        ...

    def start(self) -> None:
        """Get ready now rather than at the first job."""
        ...

    def close(self) -> None:
        """Give back the device."""
        ...


class LocalRender:
    """Renders in this process. Keeps the last pipeline, for the next job that needs the same."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        open_backend: Callable[[], Backend] = open_backend,
    ) -> None:
        self._settings = settings
        self._device = device
        self._open_backend = open_backend
        self._backend: Backend | None = None
        self._key: object = None
        self._pipeline: Pipeline | None = None
        self._sha256 = ""
        self._worn = False
        self._rendered = 0

    def start(self) -> None:
        """Load the engine, which takes seconds; no checkpoint yet."""
        if self._backend is None:
            self._backend = self._open_backend()

    def run(self, jobs: Iterable[Job], emit: Emit, watch: Watch) -> Ended:
        """Render all jobs in order, telling `emit` what happens.

        A process whose memory does not come back is worth less than a new one, so it may leave
        jobs for that; `renew` makes this one as new as it can be.
        """
        waiting = list(jobs)
        try:
            while waiting:
                alike, waiting = _divided(waiting)
                if left := self._run_alike(alike, emit, watch):
                    return Ended(left=(*left, *waiting), worn=True)
        except Stopped:
            pass
        return Ended(worn=self._worn or self._is_old())

    def renew(self) -> None:
        """Give back what can be given back, and begin as if nothing had been rendered."""
        self.close()
        self._worn, self._rendered = False, 0

    def _run_alike(self, jobs: list[Job], emit: Emit, watch: Watch) -> list[Job]:
        """Render jobs that may share passes; those that are left are for a fresh process."""
        checkpoint = models.find(jobs[0].checkpoint, self._settings.models)
        try:
            plan = self._plan(jobs, checkpoint, refuse=True)
        except DoesNotFit as error:
            self._fail(jobs, error, emit)
            return []
        hopeless = False
        while jobs:
            if watch():
                raise Stopped
            if self._is_old():
                return jobs
            group, waiting = jobs[: plan.batch], jobs[plan.batch :]
            suited = _suited(plan, len(group))
            made, ended = self._attempt(group, checkpoint, suited, emit, watch)
            if isinstance(made, OutOfVram):
                if fewer := _with_fewer(ended.plan, made.stage):
                    log.warning("%s; trying again with %d at a time", made, fewer.batch)
                    plan = fewer
                    continue
                if self._rendered and not hopeless:
                    # Where memory was lost on the way, a new process has room for it.
                    return jobs
                hopeless = True
                self._fail(group, self._with_figures(made, group[0], checkpoint, ended.plan), emit)
            else:
                for job, result in zip(group, made, strict=True):
                    self._tell(self._finished(job, result, checkpoint, ended, len(group)), emit)
                if waiting and ended.plan != suited:
                    plan = self._next_plan(waiting, checkpoint, plan, ended.plan)
            self._rendered += len(group)
            jobs = waiting
        return []

    def _next_plan(
        self, jobs: Sequence[Job], checkpoint: Checkpoint, planned: Plan, ended: Plan
    ) -> Plan:
        """What the next pass of such jobs does after memory ran out in one: as was learnt.

        Where nothing was, what changes no picture stays, and tiles are for who needs them.
        """
        made = self._plan(jobs, checkpoint, refuse=False)
        if _choices(made) != _choices(planned):
            return made
        kept = replace(ended, batch=planned.batch)
        if ended.vae_tile != planned.vae_tile:
            kept = replace(kept, vae_tile=planned.vae_tile, vae_bands=planned.vae_bands)
        return kept

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
        """Render in a thread, so that events can be taken as they come."""
        events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()

        def work() -> None:
            try:
                self._run_here(jobs, events.put, lambda: left.is_set() or watch())
            except BaseException as error:  # noqa: BLE001  # raised again by the reader
                events.put(error)
            else:
                events.put(None)

        thread = threading.Thread(target=work, name="render")
        thread.start()
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            left.set()
            thread.join()

    def _run_here(self, jobs: Sequence[Job], emit: Emit, watch: Watch) -> None:
        ended = Ended(left=tuple(jobs))
        while ended.left:
            ended = self.run(ended.left, emit, watch)
            if ended.worn:
                self.renew()

    def close(self) -> None:
        """Let go of the pipeline, and with it of the device's memory."""
        self._key = self._pipeline = None

    def _plan(self, jobs: Sequence[Job], checkpoint: Checkpoint, *, refuse: bool) -> Plan:
        make = plan_or_refuse if refuse else plan_on
        return make(
            jobs[0], self._device, checkpoint, self._settings, count=len(jobs), environ=os.environ
        )

    def _attempt(
        self, group: list[Job], checkpoint: Checkpoint, plan: Plan, emit: Emit, watch: Watch
    ) -> tuple[list[Made] | OutOfVram, Outcome]:
        """The pictures, or what went wrong; and how it ended."""
        asked = tuple(job for job in group if job.index != FILLER)
        for job in asked:
            emit(Started(job=job, plan=plan))

        def step(step: int, steps: int) -> bool:
            emit(Step(jobs=asked, step=step, steps=steps))
            return watch()

        made: list[Made] | OutOfVram
        outcome = None
        try:
            pipeline = self._loaded(checkpoint, plan)
            try:
                made = list(pipeline.sample(group, plan, step))
            finally:
                outcome = pipeline.outcome
                self._worn = self._worn or bool(outcome and outcome.fell)
        except OutOfVram as error:
            # A fresh one: the traceback of this one holds on to the device's memory.
            made = OutOfVram(str(error), stage=error.stage, needed_bytes=error.needed_bytes)
        if isinstance(made, OutOfVram):
            self._worn = True
            self.close()
        if outcome is None:
            return made, Outcome(plan=plan)
        self._learn(group, checkpoint, plan, outcome)
        return made, outcome

    def _learn(
        self, group: Sequence[Job], checkpoint: Checkpoint, plan: Plan, outcome: Outcome
    ) -> None:
        """Keep what the stages took, over what the plan said."""
        if len(group) != plan.batch:
            return  # the prediction was for more
        gpu, engine = self._device.gpu, self._device.engine
        family = checkpoint.family.name
        known = learnt.for_device(self._settings.cache, gpu, engine, family)
        observations = []
        for stage, took in outcome.measured.items():
            key = learnt.key(
                stage, dtype=plan.dtype, vae_dtype=plan.vae_dtype, attention=plan.attention,
                vae_attention=plan.vae_attention,
            )  # fmt: skip
            size = _ratio(took.bytes, getattr(plan.activations, stage), known.bytes.get(key, 1.0))
            seconds = _ratio(
                None if stage in outcome.fell or plan.times is None else took.seconds,
                getattr(plan.times, stage, 0.0), known.seconds.get(key, 1.0),
            )  # fmt: skip
            if size is not None or seconds is not None:
                observations.append(
                    learnt.observation(gpu, engine, family, key, bytes=size, seconds=seconds)
                )
        try:
            learnt.keep(self._settings.cache, observations)
        except StorageError as error:
            log.warning("what this run has taught is not kept: %s", error)

    def _is_old(self) -> bool:
        """Whether the process has made pictures enough for an engine that never frees it all."""
        return self._device.engine is Engine.DIRECTML and self._rendered >= DIRECTML_LIFETIME

    def _with_figures(
        self, error: OutOfVram, job: Job, checkpoint: Checkpoint, plan: Plan
    ) -> OutOfVram:
        """What was needed, what there is, and what would fit."""
        figures = in_figures(plan, error.stage or "the run")
        if error.needed_bytes:
            figures += f"; it took {error.needed_bytes / GIB:.1f} GiB at least"
        nearest = nearest_that_fits(
            job, self._device.gpu, checkpoint, self._settings, engine=self._device.engine,
            budget_bytes=plan.budget_bytes,
        )  # fmt: skip
        smaller = "no size fits" if nearest is None else f"nearest that fits: {nearest}"
        return OutOfVram(f"{error}; {figures}; {smaller}", stage=error.stage)

    def _fail(self, jobs: Iterable[Job], error: SdamdError, emit: Emit) -> None:
        for job in jobs:
            self._tell(Failed(job=job, error=error), emit)

    def _tell(self, event: Rendered | Failed, emit: Emit) -> None:
        if event.job.index != FILLER:
            emit(event)

    def _loaded(self, checkpoint: Checkpoint, plan: Plan) -> Pipeline:
        key = (checkpoint, plan.device, plan.dtype, plan.vae_dtype)
        if self._pipeline is None or key != self._key:
            self.close()  # before the next one is loaded: two may not fit
            self.start()
            assert self._backend is not None
            self._pipeline = self._backend.load(checkpoint, plan)
            # Once for all its pictures: even a remembered hash looks at every file of a folder.
            self._sha256 = models.sha256(checkpoint.path, self._settings.cache)
            self._key = key
        return self._pipeline

    def _finished(
        self, job: Job, result: Made, checkpoint: Checkpoint, ended: Outcome, together: int
    ) -> Rendered | Failed:
        said, plan = "", ended.plan
        if isinstance(result, Unfinished):
            said = f"the second pass failed, so the picture of the first one is kept: {result}"
            result, job = result.image, job.without_hires()
        if isinstance(result, SdamdError):
            return Failed(job=job, error=result)
        if job.denoise_tile is None and plan.denoise_tile:
            # The one choice of a plan that changes what is in the picture.
            job = replace(job, denoise_tile=plan.denoise_tile)
        # A path tells who somebody is; the name and the hash are what finds the model again.
        named = (
            job
            if checkpoint.path != Path(job.checkpoint).expanduser()
            else replace(job, checkpoint=checkpoint.name)
        )
        record = Record(
            job=named,
            version=sdamd.__version__,
            checkpoint_name=checkpoint.name,
            checkpoint_sha256=self._sha256,
            device="CPU" if self._device.gpu is None else self._device.gpu.name,
            dtype=plan.dtype,
            vae_dtype=plan.vae_dtype,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            together=together,
            means=ended.means,
        )
        png = gallery.encode(result, record)
        return Rendered(job=job, png=png, record=record, said=said)


def in_pass_of(job: Job, together: int) -> tuple[Job, ...]:
    """A job with as many fillers as its pass had others.

    Kernels choose their blocks by the size of the batch, and round differently by one of 255;
    what the other rows hold changes nothing. So a picture is made again to the byte in a pass of
    the same size.
    """
    return (job, *(replace(job, index=FILLER) for _ in range(together - 1)))


def _shared(job: Job) -> Job:
    """What jobs must have in common to run in one pass: all but prompts, seed and index."""
    return replace(job, index=0, seed=0, prompt="", negative_prompt="")


def _divided(jobs: list[Job]) -> tuple[list[Job], list[Job]]:
    """The first jobs that may share a pass, and the rest."""
    common = _shared(jobs[0])
    alike = list(takewhile(lambda job: _shared(job) == common, jobs))
    return alike, jobs[len(alike) :]


def _with_fewer(plan: Plan, stage: str) -> Plan | None:
    """How to begin again where going on was not possible: with fewer pictures at a time."""
    if plan.batch == 1 or stage == Stage.LOAD:
        return None
    batch = plan.batch // 2
    return replace(plan, batch=batch, passes=min(plan.passes, 2 * batch))


def _suited(plan: Plan, pictures: int) -> Plan:
    """The plan for a last pass of fewer pictures: as many samples at a time as in the others."""
    at_a_time = -(-2 * plan.batch // plan.passes)
    return replace(plan, passes=min(plan.passes, -(-2 * pictures // at_a_time)))


def _choices(plan: Plan) -> object:
    """How it runs, without what it is for and what is said about it."""
    choices = plan.to_dict()["choices"]
    return {**choices, "batch": 0} if isinstance(choices, dict) else choices


def _ratio(measured: float | None, predicted: float, in_use: float) -> float | None:
    """Measured over what would be predicted without the factor that is in use."""
    return measured / predicted * in_use if measured and predicted else None
