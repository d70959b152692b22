"""The straight line from jobs to PNG bytes, and the events that it reports on the way."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeAlias

from PIL.Image import Image

import sdamd
from sdamd import gallery, models, tuned
from sdamd.backends.backend import Backend, Pipeline, open_backend
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, OutOfVram, SdamdError, Stopped
from sdamd.hardware.device import Device
from sdamd.metadata import Record
from sdamd.plan import Plan, make_plan, more_frugal
from sdamd.request import Job
from sdamd.settings import Settings

log = logging.getLogger(__name__)

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
    """The picture is made: PNG bytes, with the record that is inside them."""

    job: Job
    png: bytes
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The job gave no picture; the others go on."""

    job: Job
    error: SdamdError


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

    def start(self) -> None:
        """Load the engine, which takes seconds; no checkpoint yet."""
        if self._backend is None:
            self._backend = self._open_backend()

    def run(self, jobs: Iterable[Job], emit: Emit, watch: Watch) -> None:
        """Render all jobs in order, telling `emit` what happens."""
        for _, alike in groupby(jobs, key=_shared):
            waiting = list(alike)
            checkpoint = models.find(waiting[0].checkpoint, self._settings.models)
            plan = make_plan(
                waiting[0], self._device.gpu, checkpoint, self._settings,
                engine=self._device.engine, count=len(waiting),
                tuned=tuned.for_device(
                    self._settings.cache, self._device.gpu, self._device.engine,
                    checkpoint.family.name,
                ),
                environ=os.environ,
            )  # fmt: skip
            while waiting and not watch():
                group, waiting = waiting[: plan.batch], waiting[plan.batch :]
                try:
                    made = self._render(group, checkpoint, plan, emit, watch)
                except OutOfVram as error:
                    self.close()
                    smaller = more_frugal(plan)
                    if smaller:
                        plan, waiting = smaller, group + waiting
                        log.warning("%s; trying again: %s", error, plan.to_dict()["choices"])
                        continue
                    # A fresh one: the traceback of this one holds on to the device's memory.
                    made = [OutOfVram(str(error))] * len(group)
                except Stopped:
                    return
                for job, result in zip(group, made, strict=True):
                    if job.index != FILLER:
                        emit(self._finished(job, result, checkpoint, plan, len(group)))

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
        """Render in a thread, so that events can be taken as they come."""
        events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()

        def work() -> None:
            try:
                self.run(jobs, events.put, lambda: left.is_set() or watch())
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

    def close(self) -> None:
        """Let go of the pipeline, and with it of the device's memory."""
        self._key = self._pipeline = None

    def _render(
        self, group: list[Job], checkpoint: Checkpoint, plan: Plan, emit: Emit, watch: Watch
    ) -> list[Image | BadImage | OutOfVram]:
        asked = tuple(job for job in group if job.index != FILLER)
        for job in asked:
            emit(Started(job=job, plan=plan))

        def step(step: int, steps: int) -> bool:
            emit(Step(jobs=asked, step=step, steps=steps))
            return watch()

        return list(self._loaded(checkpoint, plan).sample(group, plan, step))

    def _loaded(self, checkpoint: Checkpoint, plan: Plan) -> Pipeline:
        key = (checkpoint, plan.device, plan.dtype, plan.vae_dtype, plan.offload)
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
        self,
        job: Job,
        result: Image | BadImage | OutOfVram,
        checkpoint: Checkpoint,
        plan: Plan,
        together: int,
    ) -> Rendered | Failed:
        if isinstance(result, SdamdError):
            return Failed(job=job, error=result)
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
        )
        return Rendered(job=job, png=gallery.encode(result, record), record=record)


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
