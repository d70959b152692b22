"""`sdamd plan`: say how a request would run, without running it."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from sdamd import batch, models
from sdamd.checkpoint import FAMILIES, Checkpoint, Layout
from sdamd.commands.arguments import asked_for
from sdamd.errors import BadRequest, unknown
from sdamd.hardware.detect import detect
from sdamd.hardware.device import Device, choose_device
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.plan import GIB, Nearest, Plan, Verdict, nearest_that_fits, plan_on
from sdamd.request import Job
from sdamd.settings import Settings, parse_number


def run(asked: argparse.Namespace) -> int:
    """Say how a request would run, without running it; status 3 when it does not fit."""
    request, settings = asked_for(asked)
    if asked.budget is not None:
        budget = parse_number("vram_budget_gb", asked.budget, shown="budget")
        settings = replace(settings, vram_budget_gb=budget)
    detection = detect()
    if asked.family:
        checkpoint = _published(asked.family)
    else:
        checkpoint = models.find(request.checkpoint, settings.models)
    device = choose_device(detection, settings.device)
    if asked.gpu:
        device = Device(gpu=find_card(asked.gpu), engine=Engine.ROCM)
    job = next(batch.expand(request, checkpoint.family))
    if asked.table:
        return _table(asked, job, device, checkpoint, settings)
    plan = plan_on(
        job, device, checkpoint, settings, count=request.count, environ=os.environ,
        here=not asked.gpu,
    )  # fmt: skip
    nearest = None
    if plan.verdict is Verdict.DOES_NOT_FIT:
        nearest = nearest_that_fits(
            job, device.gpu, checkpoint, settings, engine=device.engine,
            budget_bytes=plan.budget_bytes,
        )  # fmt: skip
    if asked.json:
        shown = plan.to_dict() | {
            "nearest": dict(nearest.request) or None if nearest else None,
            "nearest_settings": dict(nearest.settings) or None if nearest else None,
            "gpu": _shown(device.gpu),
        }
        print(json.dumps(shown))
    else:
        _print_plan(plan, job, _name(device), nearest)
    return 3 if plan.verdict is Verdict.DOES_NOT_FIT else 0


def _print_plan(plan: Plan, job: Job, where: str, nearest: Nearest | None) -> None:
    seconds = "" if plan.seconds is None else f", about {_duration(plan.seconds)} a picture"
    print(
        f"{job.width} x {job.height}, {plan.batch} at a time, on {where}: {plan.verdict}{seconds}"
    )
    for name in ("text", "encode", "denoise", "hires", "decode", "upscale"):
        size = getattr(plan.stages, name)
        if size:
            print(f"  {name:8} {size / GIB:6.2f} GiB")
    for reason in plan.reasons:
        print(f"  - {reason}")
    if nearest:
        print(f"  nearest that fits: {nearest}")


def _table(
    asked: argparse.Namespace, job: Job, device: Device, checkpoint: Checkpoint, settings: Settings
) -> int:
    """Print the grid of sizes and batches."""
    from sdamd.plan.table import in_words, table  # noqa: PLC0415  # few ask for it

    cells = list(table(job, device.gpu, checkpoint, settings, engine=device.engine))
    if asked.json:
        grid = [cell.to_dict() for cell in cells]
        shown = {"table": grid, "family": checkpoint.family.name, "gpu": _shown(device.gpu)}
        print(json.dumps(shown))
        return 0
    print(f"{checkpoint.family.title} on {_name(device)}, {job.steps} steps")
    for line in in_words({(cell.side, cell.batch): cell for cell in cells}):
        print(line)
    return 0


def _name(device: Device) -> str:
    return "the CPU" if device.gpu is None else device.gpu.name


def _shown(gpu: Gpu | None) -> dict[str, object]:
    return {"kind": "cpu", "name": "CPU"} if gpu is None else dict(gpu.to_dict())


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


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
