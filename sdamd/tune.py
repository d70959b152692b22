"""Measures on this device what is fastest with one checkpoint, and keeps it for every plan.

One choice after another is tried on a short run, from the plan that the table gives; what is
faster by more than noise stays. A way that fails, or gives a bad picture, is out.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any, Final

import sdamd
from sdamd import batch, models, tuned
from sdamd.backends.backend import Backend, Pipeline, open_backend
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, BadRequest, HardwareError, OutOfVram
from sdamd.hardware.device import Device
from sdamd.hardware.runtime import Engine
from sdamd.hardware.tuning import FUSED, tuning_of
from sdamd.plan import Plan, make_plan, more_frugal
from sdamd.request import Job, Request
from sdamd.settings import Attention, Settings
from sdamd.tuned import Tuned

log = logging.getLogger(__name__)

STEPS: Final = 4
"""Enough that a step and not the start is measured; the VAE weighs more than in a whole run."""
BATCHES: Final = (1, 2, 4)
MARGIN: Final = 0.97
"""Something else must take at most this share of the time: less is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way that was tried. `seconds` is of a picture; None where `problem` says why not."""

    choice: str
    value: str
    seconds: float | None
    problem: str = ""
    kept: bool = False

    def __str__(self) -> str:
        """One line for a person."""
        result = self.problem if self.seconds is None else f"{self.seconds:.3f} s a picture"
        return f"{self.choice} {self.value}: {result}{', kept' if self.kept else ''}"

    def to_dict(self) -> dict[str, object]:
        """The line of `tune --json`."""
        return asdict(self)


def tune(
    settings: Settings,
    device: Device,
    checkpoint_name: str,
    watch: Callable[[], bool],
    opened: Callable[[], Backend] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Trial]:
    """Try every choice, telling each result, and keep the fastest at the end.

    Raises:
        BadRequest: the device is driven by an engine that leaves nothing to choose.
        BadCheckpoint: it is missing or cannot be loaded.
        HardwareError: not even the plan of the table runs.
        StorageError: what was found cannot be kept.
    """
    if device.engine not in {Engine.ROCM, Engine.CPU}:
        raise BadRequest(f"device is {device.engine}; allowed for tune are rocm and cpu")
    checkpoint = models.find(checkpoint_name, settings.models)
    request = Request(
        checkpoint=checkpoint_name, prompt="a house by the sea", steps=STEPS, seed=0, upscale=1,
        count=max(BATCHES),
    )  # fmt: skip
    jobs = tuple(batch.expand(request, checkpoint.family))
    # What is to be measured must not be fixed by a setting.
    free = replace(settings, batch_size=0, attention=Attention.AUTO)
    plan = make_plan(jobs[0], device.gpu, checkpoint, free, engine=device.engine, count=len(jobs))
    gfx = "" if device.gpu is None else device.gpu.arch
    backend = opened() if opened else open_backend(device.engine, settings.cache, gfx)
    race = Race(backend, checkpoint, jobs, clock)
    first, seconds = race.start(plan)
    best = first
    yield Trial(choice="plan", value="of the table", seconds=seconds, kept=True)
    for choice, values in choices(first, device, checkpoint):
        for value in values:
            if watch():
                return
            tried = replace(best, **{choice: value})
            trial = race.trial(tried, choice, value, seconds)
            yield trial
            if trial.kept and trial.seconds is not None:
                best, seconds = tried, trial.seconds
    tuned.keep(settings.cache, (_entry(best, seconds, device, checkpoint),))


def choices(
    first: Plan, device: Device, checkpoint: Checkpoint
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What to try beside the first plan: a field of `Plan`, and its other values."""
    kinds = ["chunked", "sliced"]
    if device.gpu is None or tuning_of(device.gpu.arch).attention == FUSED:
        kinds.insert(0, FUSED)
    if device.gpu is not None:
        packages = (("xformers", "xformers"), ("flash", "flash_attn"))
        kinds += [kind for kind, package in packages if find_spec(package) is not None]
    dtypes = ["float32"]
    if device.gpu is not None:
        known = device.gpu.architecture
        dtypes += ["float16"] if not checkpoint.family.vae_needs_float32 else []
        dtypes += ["bfloat16"] if known is not None and known.bf16 else []
    side = min(checkpoint.family.width, checkpoint.family.height)
    every: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("attention", tuple(kinds)),
        ("batch", BATCHES),
        ("vae_dtype", tuple(dtypes)),
        ("vae_tile", tuple(tile for tile in (0, 512, 256) if tile <= side)),
        ("miopen", (True, False) if device.gpu is not None else (True,)),
        ("channels_last", (False, True)),
    )
    for choice, values in every:
        yield choice, tuple(value for value in values if value != getattr(first, choice))


class Race:
    """Runs plans with one checkpoint, keeping what is loaded from one to the next."""

    def __init__(
        self,
        backend: Backend,
        checkpoint: Checkpoint,
        jobs: Sequence[Job],
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._checkpoint = checkpoint
        self._jobs = jobs
        self._clock = clock
        self._loaded: tuple[object, Pipeline] | None = None

    def start(self, plan: Plan) -> tuple[Plan, float]:
        """The first of the ways down from this plan that runs, and its time.

        Raises:
            BadImage: its pictures are bad.
            HardwareError: none runs.
        """
        try:
            return plan, self.seconds(plan)
        except OutOfVram:
            smaller = more_frugal(plan)
            if smaller is None:
                raise
        self._loaded = None
        return self.start(smaller)

    def trial(self, plan: Plan, choice: str, value: object, best: float) -> Trial:
        """Time one plan against the best so far."""
        tried = Trial(choice=choice, value=str(value), seconds=None)
        try:
            seconds = self.seconds(plan)
        except (HardwareError, BadImage) as error:
            self._loaded = None
            return replace(tried, problem=str(error))
        return replace(tried, seconds=seconds, kept=seconds < best * MARGIN)

    def seconds(self, plan: Plan) -> float:
        """The time of one picture, after a first pass that finds kernels.

        Raises:
            BadImage: a picture is black, constant or NaN.
            HardwareError: the device fails or has no room.
        """
        pipeline = self._pipeline(plan)
        jobs = self._jobs[: plan.batch]
        self._sampled(pipeline, jobs, plan)
        began = self._clock()
        self._sampled(pipeline, jobs, plan)
        return (self._clock() - began) / len(jobs)

    def _sampled(self, pipeline: Pipeline, jobs: Sequence[Job], plan: Plan) -> None:
        for made in pipeline.sample(jobs, plan, lambda *_: False):
            if isinstance(made, BadImage):
                raise made

    def _pipeline(self, plan: Plan) -> Pipeline:
        key = (plan.dtype, plan.vae_dtype, plan.offload)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # before the next one: two may not fit
            self._loaded = (key, self._backend.load(self._checkpoint, plan))
        return self._loaded[1]


def _entry(best: Plan, seconds: float, device: Device, checkpoint: Checkpoint) -> Tuned:
    return Tuned(
        gfx=tuned.CPU if device.gpu is None else device.gpu.arch,
        torch=tuned.torch_version(),
        sdamd=sdamd.__version__,
        family=checkpoint.family.name,
        date=datetime.now(UTC).date().isoformat(),
        seconds=round(seconds, 6),
        attention=best.attention,
        batch=best.batch,
        vae_dtype=best.vae_dtype,
        vae_tile=best.vae_tile,
        miopen=best.miopen,
        channels_last=best.channels_last,
    )
