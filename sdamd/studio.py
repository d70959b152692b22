"""Puts the parts together for one machine: the composition root of every entry point."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from sdamd import batch, gallery, models, scheduler, tuned
from sdamd.backends.backend import open_backend
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadRequest
from sdamd.filename import Pattern
from sdamd.hardware.detect import Detection, detect
from sdamd.hardware.device import choose_device
from sdamd.hardware.runtime import Engine, choose_build
from sdamd.hardware.tuning import to_set
from sdamd.hardware.visibility import mask_for
from sdamd.plan import Plan, make_plan
from sdamd.prompt import subprompts
from sdamd.render import Event, LocalRender, Render, Rendered, Watch
from sdamd.request import Job, Request
from sdamd.settings import Settings
from sdamd.worker import WorkerRender

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The picture is in its file, on the disk."""

    job: Job
    path: Path


Happening: TypeAlias = Event | Saved


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
        self._render = render or self._usual_render()

    def jobs(self, requests: Iterable[Request]) -> tuple[Job, ...]:
        """Decide everything that the requests leave open.

        Raises:
            BadRequest: with the problems of all requests.
            BadCheckpoint: a checkpoint is missing or cannot be run.
        """
        jobs: list[Job] = []
        problems: list[str] = []
        for request in requests:
            checkpoint = self.find(request.checkpoint)
            try:
                made = list(batch.expand(request, checkpoint.family))
            except BadRequest as error:
                problems += error.problems
                continue
            parts = subprompts(request.prompt)
            if len(parts) == 1 and parts[0].weight != 1:
                # As other tools read it; somebody who wrote "ratio 16:9" is in for a surprise.
                log.warning(
                    "the prompt ends in %g, which is taken as its weight; "
                    "with a comma after it the number is a word",
                    parts[0].weight,
                )
            if problem := scheduler.problem_with_steps(made[0].scheduler, made[0].steps):
                problems.append(problem)
            jobs += [replace(job, index=i) for i, job in enumerate(made, start=len(jobs))]
        if problems:
            raise BadRequest(*problems)
        return tuple(jobs)

    def find(self, name: str) -> Checkpoint:
        """Find a checkpoint by name, file, folder or hub id, which is downloaded; empty is ours."""
        return models.find(name, self.settings.models, models.download)

    def plan(self, job: Job, *, count: int = 1) -> Plan:
        """How jobs like this one would run here."""
        gpu, engine = self.device.gpu, self.device.engine
        checkpoint = self.find(job.checkpoint)
        measured = tuned.for_device(self.settings.cache, gpu, engine, checkpoint.family.name)
        return make_plan(
            job, gpu, checkpoint, self.settings, engine=engine, count=count, tuned=measured,
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
        for event in self._render(jobs, watch):
            yield event
            if isinstance(event, Rendered):
                path = gallery.save(
                    event.png, self.settings.outputs, self.settings.filename, event.record
                )
                yield Saved(job=event.job, path=path)

    def start(self) -> None:
        """Get the worker ready before the first request comes."""
        self._render.start()

    def close(self) -> None:
        """End the worker; it can be started again."""
        self._render.close()

    def worker_environment(self) -> dict[str, str]:
        """Hide the other GPUs from the worker and set what this one needs; the user's own stay."""
        gpu = self.device.gpu
        if gpu is None or self.device.engine is not Engine.ROCM:
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

    def _usual_render(self) -> Render:
        gfx = "" if self.device.gpu is None else self.device.gpu.arch
        opening = partial(open_backend, self.device.engine, self.settings.cache, gfx)
        if self.settings.in_process:
            return LocalRender(self.settings, self.device, opening)
        return WorkerRender(self.settings, self.device, self.worker_environment(), opening)
