"""`python -m tests.fake_sdamd ...`: sdamd whose engine draws at once, or as slowly as it is told.

The command, the queue, the child process and the disk are real; only torch is left out, whose
start takes longer than many such batches. FAKE_SECONDS is for one pass; FAKE_FAULTS maps seeds to
faults, as JSON; FAKE_FULL is a file that fills its disk when the picture of seed 3 is made.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

from sdamd import cli, studio
from sdamd.backends.backend import Watch
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, Unfinished
from sdamd.plan import Plan
from sdamd.request import Job
from tests.fakes import FakeBackend, FakePipeline, Fault


class SlowBackend(FakeBackend):
    def load(self, checkpoint: Checkpoint, plan: Plan) -> "SlowPipeline":
        return SlowPipeline(self)


class SlowPipeline(FakePipeline):
    def sample(
        self, jobs: Sequence[Job], plan: Plan, watch: Watch
    ) -> list[Image.Image | BadImage | Unfinished]:
        seconds = float(os.environ.get("FAKE_SECONDS", "0")) / jobs[0].steps

        def slowly(step: int, steps: int) -> bool:
            time.sleep(seconds)
            return watch(step, steps)

        full = os.environ.get("FAKE_FULL")
        if full and any(job.seed == 3 for job in jobs):
            fill(Path(full))
        return super().sample(jobs, plan, slowly)


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def open_fake(*_: object) -> FakeBackend:
    faults = json.loads(os.environ.get("FAKE_FAULTS", "{}"))
    return SlowBackend(faults={int(seed): Fault[name] for seed, name in faults.items()})


def main() -> int:
    vars(studio)["open_backend"] = open_fake
    return cli.main()


if __name__ == "__main__":
    # By its name, so that the child finds it there.
    from tests import fake_sdamd

    sys.exit(fake_sdamd.main())
