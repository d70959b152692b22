"""How a job will run on a device: chosen before the run, with reasons and predicted bytes.

`make_plan` is the one door; `plan_on` joins it with what was measured, learnt and is free here,
and `plan_or_refuse` refuses what no plan can run. `more_frugal` is what is next when memory runs
out all the same.
"""

from sdamd.plan.budget import Budget, budget_of
from sdamd.plan.ladder import in_figures, more_frugal
from sdamd.plan.make import BATCH_MAX, BATCH_MAX_SMALL, make_plan, plan_on
from sdamd.plan.nearest import Nearest, nearest_that_fits, plan_or_refuse, refusal
from sdamd.plan.shapes import about_shapes, rounded, shapes_of
from sdamd.plan.value import (
    BLOCK_BYTES,
    BLOCK_BYTES_CPU,
    GIB,
    Plan,
    Stage,
    Stages,
    Times,
    Verdict,
)

__all__ = [
    "BATCH_MAX",
    "BATCH_MAX_SMALL",
    "BLOCK_BYTES",
    "BLOCK_BYTES_CPU",
    "GIB",
    "Budget",
    "Nearest",
    "Plan",
    "Stage",
    "Stages",
    "Times",
    "Verdict",
    "about_shapes",
    "budget_of",
    "in_figures",
    "make_plan",
    "more_frugal",
    "nearest_that_fits",
    "plan_on",
    "plan_or_refuse",
    "refusal",
    "rounded",
    "shapes_of",
]
