"""Puts the parts together for one machine: the composition root of every entry point."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final, TypeAlias

from sdamd import batch, gallery, models, runner, scheduler
from sdamd.backends.backend import open_backend
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadCheckpoint, BadRequest, DoesNotFit, HardwareError, UserError
from sdamd.filename import Pattern
from sdamd.hardware.detect import Detection, detect
from sdamd.hardware.device import Device, choose_device
from sdamd.hardware.runtime import Engine, choose_build
from sdamd.hardware.sensors import Sensors
from sdamd.hardware.tuning import to_set
from sdamd.hardware.visibility import mask_for
from sdamd.jobs import Asked, JobQueue
from sdamd.plan import Plan, about_shapes, plan_on, plan_or_refuse, rounded
from sdamd.prompt import subprompts
from sdamd.render import Event, LocalRender, Render, Rendered, Watch
from sdamd.request import Job, Request
from sdamd.runner import Limits, Runner, Wish
from sdamd.settings import Settings
from sdamd.store import FILE, Store
from sdamd.worker import WorkerRender

if TYPE_CHECKING:
    from sdamd.batch_file import Row

log = logging.getLogger(__name__)


Saved: TypeAlias = runner.Saved
Happening: TypeAlias = runner.Happening

RECYCLE_AFTER: Final = 1000
"""Pictures after which a process makes room for a new one: what drivers lose adds up, and the
start of a process is nothing beside so many."""


class Studio:
    """Settings, GPU, render and gallery of one machine.

    `render` replaces the usual one, which is a child process, or this one with
    `settings.in_process`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        render: Render | None = None,
        detection: Detection | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.detection = detection or detect()
        self._environ = os.environ if environ is None else environ
        self.device = choose_device(self.detection, settings.device)
        self._render = render or self._usual_render(self.device)
        self._others: list[Render] = []
        self._queue: JobQueue | None = None
        self._store: Store | None = None

    def jobs(self, requests: Iterable[Request]) -> tuple[Job, ...]:
        """Decide everything that the requests leave open.

        Raises:
            BadRequest: with the problems of all requests.
            BadCheckpoint: a checkpoint is missing or cannot be run.
        """
        jobs: list[Job] = []
        problems: list[str] = []
        for request in requests:
            try:
                made = self._decided(request, self.find(request.checkpoint))
            except BadRequest as error:
                problems += error.problems
                continue
            jobs += [replace(job, index=i) for i, job in enumerate(made, start=len(jobs))]
        if problems:
            raise BadRequest(*problems)
        decided = rounded(jobs, self.settings.round_sizes)
        if said := about_shapes(decided):
            log.warning(said)
        return decided

    def find(self, name: str) -> Checkpoint:
        """Find a checkpoint by name, file, folder or hub id, which is downloaded; empty is ours."""
        return models.find(name, self.settings.models, models.download)

    def plan(self, job: Job, *, count: int = 1) -> Plan:
        """How jobs like this one would run here."""
        return plan_on(
            job, self.device, self.find(job.checkpoint), self.settings, count=count,
            environ=self._environ,
        )  # fmt: skip

    def generate(
        self, requests: Iterable[Request], watch: Watch = lambda: False
    ) -> Iterator[Happening]:
        """Make and save the pictures; everything that can be wrong is checked before the first.

        Raises:
            UserError, StorageError, HardwareError: as `errors` says.
        """
        yield from self.run(self.jobs(requests), watch)

    def run(self, jobs: Sequence[Job], watch: Watch = lambda: False) -> Iterator[Happening]:
        """`generate` for jobs that are decided already."""
        Pattern.parse(self.settings.filename)
        gallery.check_folder(self.settings.outputs)
        self._refuse(jobs)
        for event in self._render(jobs, watch):
            yield event
            if isinstance(event, Rendered):
                path = gallery.save(
                    event.png, self.settings.outputs, self.settings.filename, event.record
                )
                yield Saved(job=event.job, path=path)

    def _refuse(self, jobs: Sequence[Job]) -> None:
        """Refuse before anything is loaded, if none of the jobs can run here.

        Raises:
            DoesNotFit: with the figures of the first, and what would fit.
        """
        refused: list[DoesNotFit] = []
        for job in dict.fromkeys(replace(j, index=0, seed=0, prompt="") for j in jobs):
            try:
                plan_or_refuse(
                    job, self.device, self.find(job.checkpoint), self.settings,
                    environ=self._environ,
                )  # fmt: skip
            except DoesNotFit as error:
                refused.append(error)
            else:
                return
        if refused:
            raise refused[0]

    @property
    def queue(self) -> JobQueue:
        """The batches of this data folder.

        Raises:
            StorageError: their file cannot be used.
        """
        if self._queue is None:
            self._store = Store(self.settings.home / FILE)
            self._queue = JobQueue(self._store)
        return self._queue

    def enqueue(
        self, rows: "Iterable[Row]", *, name: str, strict: bool, refused: Callable[[str], None]
    ) -> int:
        """Take in a batch, whole or not at all, and return its id; its output folder stays its own.

        `refused` is told what is wrong with a row; the others are taken, but not when `strict`.

        Raises:
            BadRequest: there is no row to take in, or one is wrong and `strict` is set.
            StorageError: the queue or the output folder cannot be written.
        """
        Pattern.parse(self.settings.filename)
        gallery.check_folder(self.settings.outputs)
        return self.queue.enqueue(
            self.asked(rows, strict=strict, refused=refused), name=name,
            output=self.settings.outputs.absolute(),
            filename=self.settings.filename,
        )  # fmt: skip

    def asked(
        self, rows: "Iterable[Row]", *, strict: bool, refused: Callable[[str], None]
    ) -> Iterator[Asked]:
        """What rows ask for, decided, one at a time; `enqueue` tells the rest."""
        find = cache(self.find)
        wrong: list[str] = []
        for row in rows:
            problems: Sequence[str] = row.problems
            made: Sequence[Job] = ()
            if row.request is not None:
                try:
                    made = self._decided(row.request, find(row.request.checkpoint))
                except BadRequest as error:
                    problems = [f"{row.where}: {problem}" for problem in error.problems]
                except BadCheckpoint as error:
                    problems = [f"{row.where}: {error}"]
            for problem in problems:
                refused(problem)
            wrong += problems[: WRONG_MAX - len(wrong)]
            for job in rounded(made, self.settings.round_sizes):
                yield Asked(job, row.cell)
        if wrong and strict:
            raise BadRequest(*wrong)

    def run_batch(
        self,
        number: int,
        *,
        wish: Callable[[], Wish] = lambda: Wish.GO_ON,
        limits: Limits | None = None,
        devices: Sequence[runner.Device] = (),
    ) -> Iterator[Happening]:
        """Make what a batch lacks, on `devices` or else on this studio's own.

        Raises:
            HardwareError: a limit cannot be kept here, or nothing renders any more.
            StorageError: the disk is full or gone; what is not made stays in the queue.
        """
        limits = limits or Limits()
        devices = devices or self.batch_devices((), limits)
        self.queue.ready(number)
        running = Runner(self.queue, number, devices, self._pass_size, limits=limits)
        yield from running.run(wish)

    def batch_devices(self, names: Sequence[str], limits: Limits) -> list[runner.Device]:
        """The devices of these names, each with a child of its own; without names the usual one.

        Raises:
            BadRequest: there is no such device, or it is named twice.
            HardwareError: it does not tell how hot it is, and there is a limit to that.
        """
        made = [_named(self.device, self._render)]
        if names:
            chosen = [choose_device(self.detection, name) for name in names]
            on_gpus = [device.gpu.index for device in chosen if device.gpu is not None]
            if len(set(on_gpus)) < len(on_gpus):
                raise BadRequest(f"devices is {','.join(names)}; allowed is each GPU once")
            made = [_named(device, self._usual_render(device)) for device in chosen]
            self._others += (device.render for device in made)
        for device in made:
            if limits.celsius is not None and device.sensors.temperature is None:
                raise HardwareError(
                    f"max_temp is {limits.celsius:g}, but {device.name} does not tell how hot it is"
                )
        return made

    def start(self) -> None:
        """Get the worker ready before the first request comes."""
        self._render.start()

    def close(self) -> None:
        """End the worker; it can be started again."""
        for render in (self._render, *self._others):
            render.close()
        self._others.clear()
        if self._store is not None:
            self._store.close()
            self._store = self._queue = None

    def worker_environment(self, device: Device | None = None) -> dict[str, str]:
        """Hide the other GPUs from the worker and set what this one needs; the user's own stay."""
        device = device or self.device
        gpu = device.gpu
        if gpu is None or device.engine is not Engine.ROCM:
            return {}
        platform = self.detection.platform
        build = choose_build(gpu, platform, sys.version_info[:2], engine=Engine.ROCM)
        needed, said = to_set(build.environment, self._environ)
        for sentence in said:
            log.info(sentence)
        uuids = [gpu.uuid for gpu in self.detection.gpus]
        # HIP numbers the GPUs of Windows by itself, in the order in which DXGI lists AMD's.
        index = self.detection.gpus.index(gpu) if platform == "windows" else gpu.index
        return needed | mask_for(index, uuids, self._environ, platform)

    def warm_up(self, requests: Iterable[Request], watch: Watch = lambda: False) -> Iterator[Event]:
        """Render without saving, so that the device has found its kernels for these sizes."""
        yield from self._render(self.jobs(requests), watch)

    def _usual_render(self, device: Device) -> Render:
        gfx = "" if device.gpu is None else device.gpu.arch
        opening = partial(open_backend, device.engine, self.settings.cache, gfx)
        if self.settings.in_process:
            return LocalRender(self.settings, device, opening)
        return WorkerRender(
            self.settings, device, self.worker_environment(device), opening,
            recycle_after=RECYCLE_AFTER,
        )  # fmt: skip

    def _decided(self, request: Request, checkpoint: Checkpoint) -> list[Job]:
        """The jobs of one request.

        Raises:
            BadRequest: with all that is wrong.
        """
        made = list(batch.expand(request, checkpoint.family, [self.settings.outputs]))
        parts = subprompts(request.prompt)
        if len(parts) == 1 and parts[0].weight != 1:
            # As other tools read it; somebody who wrote "ratio 16:9" is in for a surprise.
            log.warning(
                "the prompt ends in %g, which is taken as its weight; "
                "with a comma after it the number is a word",
                parts[0].weight,
            )
        if problem := scheduler.problem_with_steps(made[0].scheduler, made[0].steps):
            raise BadRequest(problem)
        return made

    def _pass_size(self, job: Job, count: int) -> int:
        try:
            return self.plan(job, count=count).batch
        except (UserError, HardwareError) as error:
            log.debug("%s", error)  # the render meets it again, for each job of this kind
            return 1


WRONG_MAX: Final = 1000
"""Problems of rows that are kept to be told together."""


def _named(device: Device, render: Render) -> runner.Device:
    if device.gpu is None:
        return runner.Device(name="the CPU", render=render)
    sensors = Sensors.of(device.gpu.pci)
    name = f"GPU {device.gpu.index} ({device.gpu.name})"
    return runner.Device(name=name, render=render, sensors=sensors)
