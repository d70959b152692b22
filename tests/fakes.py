"""A backend that makes pictures at once and fails as it is told to; it needs no torch."""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from io import StringIO

from PIL import Image

from sdamd.backends.backend import Made, Outcome, Watch
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadCheckpoint, BadImage, OutOfVram, SdamdError, Stopped
from sdamd.plan import Plan, Stages
from sdamd.request import Job

A_PLAN = Plan(
    device="cpu",
    dtype="float32",
    vae_dtype="float32",
    batch=1,
    vae_tile=0,
    attention="fused",
    offload="none",
    stages=Stages(text=0, denoise=0, decode=0),
    budget_bytes=None,
    reasons=(),
)
"""The plainest way on the CPU; tests replace what they are about."""


class Fault(StrEnum):
    """What goes wrong with a picture."""

    BAD_IMAGE = "bad image"
    OUT_OF_VRAM = "out of memory, whatever the plan"
    ABORT = "abort the process, as a driver does"
    KILL = "kill the process, as the system does when memory runs out"
    HANG = "hang after the first step"
    CRASH = "raise what nobody expected"
    CHATTER = "print to stdout, from Python and from below it"


@dataclass(kw_only=True)
class FakeBackend:
    """Makes pictures whose colours tell their seed.

    `faults` are by seed, so they strike again in another process. `out_of_vram` are numbers of
    passes, from 1. `largest_batch` is what fits into the memory. After `leaks_after` pictures in
    one process nothing fits any more. `ends` gives how a run under a plan went.
    """

    faults: Mapping[int, Fault] = field(default_factory=dict)
    out_of_vram: Collection[int] = ()
    largest_batch: int = 64
    leaks_after: int | None = None
    ends: Callable[[Plan], Outcome] = lambda plan: Outcome(plan=plan)
    loads: list[tuple[str, Plan]] = field(default_factory=list)
    passes: list[tuple[tuple[int, ...], Plan]] = field(default_factory=list)

    def load(self, checkpoint: Checkpoint, plan: Plan) -> "FakePipeline":
        self.loads.append((checkpoint.name, plan))
        return FakePipeline(self)


made_here: list[int] = []
"""Pictures that this process has tried, with any backend: what a driver would not give back."""


class FakePipeline:
    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self.outcome: Outcome | None = None

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Made]:
        backend = self._backend
        self.outcome = backend.ends(plan)
        backend.passes.append((tuple(job.seed for job in jobs), plan))
        if len(backend.passes) in backend.out_of_vram or len(jobs) > backend.largest_batch:
            raise OutOfVram(f"no room for {len(jobs)}")
        if backend.leaks_after is not None:
            made_here.append(len(jobs))
            if sum(made_here) > backend.leaks_after:
                raise OutOfVram("the memory is gone", stage="decode")
        made: list[Made] = []
        for step in range(1, jobs[0].steps + 1):
            if watch(step, jobs[0].steps):
                raise Stopped
            for job in jobs:
                _strike(backend.faults.get(job.seed))
        for job in jobs:
            if backend.faults.get(job.seed) is Fault.BAD_IMAGE:
                made.append(BadImage("the picture is black throughout"))
            else:
                made.append(picture(job))
        return made


def picture(job: Job) -> Image.Image:
    """A gradient in red and green, with the seed's last byte in blue."""
    size = (job.width * job.upscale, job.height * job.upscale)
    ramp = Image.linear_gradient("L")
    across = ramp.transpose(Image.Transpose.ROTATE_90)
    blue = Image.new("L", size, job.seed % 256)
    return Image.merge("RGB", (ramp.resize(size), across.resize(size), blue))


def _strike(fault: Fault | None) -> None:
    match fault:
        case Fault.OUT_OF_VRAM:
            raise OutOfVram("no room")
        case Fault.ABORT:
            os.abort()
        case Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Fault.HANG:
            time.sleep(600)
        case Fault.CRASH:
            raise RuntimeError("nobody expected this")
        case Fault.CHATTER:
            sys.stdout.write("chatter from Python\n")
            sys.stdout.flush()
            os.write(1, b"chatter from a driver\n")


def seeds(job: Job, *numbers: int) -> list[Job]:
    """Jobs that differ by seed and index alone."""
    return [replace(job, index=index, seed=seed) for index, seed in enumerate(numbers)]


def never() -> bool:
    return False


class Terminal(StringIO):
    """A stream that says that it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]  # StringIO's is None and read-only
        return self._encoding

    def isatty(self) -> bool:
        return True


@dataclass
class Clock:
    """Time that passes only when it is told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def stop_after(calls: int) -> Callable[[], bool]:
    """A watch that says stop from the given call on."""
    count = 0

    def watch() -> bool:
        nonlocal count
        count += 1
        return count >= calls

    return watch


def report_variable(name: str) -> FakeBackend:
    """In the place of a backend: fail with what the environment says."""
    raise BadCheckpoint(f"{name} is {os.environ.get(name)}")


def fail(error: SdamdError) -> FakeBackend:
    """In the place of a backend: the error."""
    raise error
