"""`sdamd plan`: say how a request would run, without running it."""

import argparse
import json
import os
from pathlib import Path

from sdamd import batch, models, tuned
from sdamd.checkpoint import FAMILIES, Checkpoint, Layout
from sdamd.commands.arguments import asked_for
from sdamd.errors import BadRequest, unknown
from sdamd.hardware.detect import detect
from sdamd.hardware.device import choose_device
from sdamd.hardware.products import find_card
from sdamd.plan import GIB, Plan, Verdict, make_plan, nearest_that_fits
from sdamd.request import Job


def run(asked: argparse.Namespace) -> int:
    """Say how a request would run, without running it; status 3 when it does not fit."""
    request, settings = asked_for(asked)
    detection = detect()
    if asked.family:
        checkpoint = _published(asked.family)
    else:
        checkpoint = models.find(request.checkpoint, settings.models)
    here = choose_device(detection, settings.device)
    gpu, engine = (find_card(asked.gpu), None) if asked.gpu else (here.gpu, here.engine)
    job = next(batch.expand(request, checkpoint.family))
    budget = _budget(asked.budget)
    family = checkpoint.family.name
    plan = make_plan(
        job, gpu, checkpoint, settings, engine=engine, count=request.count, budget_bytes=budget,
        tuned=None if asked.gpu else tuned.for_device(settings.cache, gpu, here.engine, family),
        environ=None if asked.gpu else os.environ,
    )  # fmt: skip
    nearest = None
    if plan.verdict is Verdict.DOES_NOT_FIT and gpu is not None:
        nearest = nearest_that_fits(
            job, gpu, checkpoint, settings, engine=engine, budget_bytes=budget
        )
    if asked.json:
        shown = gpu.to_dict() if gpu is not None else {"kind": "cpu", "name": "CPU"}
        print(json.dumps(plan.to_dict() | {"nearest": nearest, "gpu": shown}))
    else:
        _print_plan(plan, job, "the CPU" if gpu is None else gpu.name, nearest)
    return 3 if plan.verdict is Verdict.DOES_NOT_FIT else 0


def _print_plan(plan: Plan, job: Job, where: str, nearest: dict[str, int] | None) -> None:
    print(f"{job.width} x {job.height}, {plan.batch} at a time, on {where}: {plan.verdict}")
    for name in ("text", "denoise", "decode"):
        print(f"  {name:8} {getattr(plan.stages, name) / GIB:6.2f} GiB")
    for reason in plan.reasons:
        print(f"  - {reason}")
    if nearest:
        print(f"  nearest that fits: {nearest['width']} x {nearest['height']}")


def _published(name: str) -> Checkpoint:
    """A checkpoint of the family as it was published, for plans without a file."""
    if name not in FAMILIES or name == "tiny":
        raise BadRequest(unknown(name, [n for n in FAMILIES if n != "tiny"], "family"))
    family = FAMILIES[name]
    return Checkpoint(
        name=family.name, path=Path(), layout=Layout.FILE, family=family,
        bytes=family.parameters.total * 2, prediction_type=family.prediction_type,
        dtype="float16", parameters=family.parameters,
    )  # fmt: skip


def _budget(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = -1
    if not 0.25 <= gib <= 1024:
        raise BadRequest(f"budget is {text!r}; allowed 0.25 to 1024 GiB")
    return round(gib * GIB)
