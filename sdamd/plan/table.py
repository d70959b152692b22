"""Which sizes and batches a card runs: the grid of `plan --table`."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from sdamd.checkpoint import Checkpoint
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.runtime import Engine
from sdamd.plan.make import make_plan
from sdamd.plan.value import Plan, Verdict
from sdamd.request import Job
from sdamd.settings import Settings

SIDES: Final = (512, 768, 1024, 1536, 2048, 3072, 4096)
SIDES_SMALL: Final = (64, 128, 192, 256, 384, 512)
BATCHES: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How so many pictures of this size at once would run."""

    side: int
    batch: int
    plan: Plan

    @property
    def fits(self) -> bool:
        """Whether this many fit at once."""
        return self.plan.batch == self.batch and self.plan.verdict is not Verdict.DOES_NOT_FIT

    def to_dict(self) -> dict[str, object]:
        """One object of the list that `--json` gives."""
        seconds = self.plan.seconds if self.fits else None
        verdict = self.plan.verdict if self.fits else Verdict.DOES_NOT_FIT
        return {
            "width": self.side, "height": self.side, "batch": self.batch, "verdict": str(verdict),
            "peak_bytes": self.plan.stages.peak, "means": self.plan.means,
            "seconds": None if seconds is None else round(seconds, 3),
        }  # fmt: skip

    def __str__(self) -> str:
        if not self.fits:
            return "-"
        seconds = self.plan.seconds
        mark = "" if self.plan.verdict is Verdict.FITS else "~"
        return f"{mark}fits" if seconds is None else f"{mark}{_rounded(seconds)} s"


def table(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings,
    *, engine: Engine | None = None, budget_bytes: int | None = None, platform: str = sys.platform,
    **how: Any,
) -> Iterator[Cell]:  # fmt: skip
    """All cells, row by row; `job` is what is asked but for its size. As in `make_plan`."""
    sides = SIDES_SMALL if checkpoint.family.name == "tiny" else SIDES
    for side, batch in product(sides, BATCHES):
        plan = make_plan(
            replace(job, width=side, height=side), gpu, checkpoint,
            replace(settings, batch_size=batch), engine=engine, count=batch,
            budget_bytes=budget_bytes, platform=platform, exactly=True, **how,
        )  # fmt: skip
        yield Cell(side=side, batch=batch, plan=plan)


def in_words(cells: Mapping[tuple[int, int], Cell]) -> Iterator[str]:
    """The lines of the grid: sizes down, batches across, seconds of one picture in it."""
    sides, batches = ([*dict.fromkeys(key[axis] for key in cells)] for axis in (0, 1))
    yield f"{'pixels':>11} " + "".join(f"{f'batch {batch}':>11}" for batch in batches)
    for side in sides:
        shown = (str(cells[side, batch]) for batch in batches)
        yield f"{f'{side} x {side}':>11} " + "".join(f"{cell:>11}" for cell in shown)
    yield "seconds of one picture; ~ in a slower way, to fit; - does not fit"


def _rounded(seconds: float) -> str:
    digits = 2 if seconds < 1 else 1 if seconds < 100 else 0
    return f"{seconds:.{digits}f}"
