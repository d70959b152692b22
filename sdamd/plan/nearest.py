"""What would fit where a job does not, and the sentence that refuses it before anything loads."""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from sdamd.checkpoint import Checkpoint
from sdamd.errors import DoesNotFit
from sdamd.hardware.device import Device
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.memory import read_memory
from sdamd.hardware.runtime import Engine
from sdamd.plan.ladder import in_figures
from sdamd.plan.make import make_plan, plan_on
from sdamd.plan.value import GIB, Plan, Verdict
from sdamd.plan.ways import final_size
from sdamd.request import Job
from sdamd.settings import Attention, Offload, Settings, VaeTiling, VramMode

log = logging.getLogger(__name__)

_LEFT_OPEN: Final[Mapping[str, Any]] = {
    "vram_mode": VramMode.AUTO, "offload": Offload.AUTO, "vae_tiling": VaeTiling.AUTO,
    "vae_tile": 0, "vae_bands": 0, "passes": 0, "feed_forward_chunks": 0,
    "attention": Attention.AUTO,
}  # fmt: skip
_SMALLER: Final = range(95, 5, -5)
"""Percent of the sides that are tried, one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """What to change so that it fits: fields of the request, or settings that stand in the way."""

    request: Mapping[str, int | float]
    settings: Mapping[str, str | int]

    def __str__(self) -> str:
        changes = dict(self.request)
        said = []
        if "width" in changes:
            said.append(f"{changes.pop('width')} x {changes.pop('height')}")
        said += [f"{name} {value:g}" for name, value in changes.items()]
        said += [f"{name} {value}" for name, value in self.settings.items()]
        return ", ".join(said)


def nearest_that_fits(
    job: Job, gpu: Gpu | None, checkpoint: Checkpoint, settings: Settings,
    *, engine: Engine | None = None, budget_bytes: int | None = None, platform: str = sys.platform,
    **how: Any,
) -> Nearest | None:  # fmt: skip
    """The smallest change that makes the job fit; None where no size does.

    First the settings that stand in the way, then less of a second pass, then the largest size of
    about the same shape. `how` is what else `make_plan` takes.
    """

    def fits(tried: Job, under: Settings) -> bool:
        plan = make_plan(
            tried, gpu, checkpoint, under, engine=engine, budget_bytes=budget_bytes,
            platform=platform, **how,
        )  # fmt: skip
        return plan.verdict is not Verdict.DOES_NOT_FIT

    open_again = {n: v for n, v in _LEFT_OPEN.items() if getattr(settings, n) != v}
    if open_again and fits(job, replace(settings, **open_again)):
        return Nearest(request={}, settings=open_again)
    for changes in _smaller(job):
        if fits(replace(job, **changes), settings):
            return Nearest(request=changes, settings={})
    return None


def _smaller(job: Job) -> Iterator[dict[str, Any]]:
    quarters = int((job.hires_scale - 1) * 4)
    for quarter in range(quarters, -1, -1):
        scale = 1 + quarter / 4
        if scale < job.hires_scale:
            yield {"hires_scale": scale}
    before = (job.width, job.height)
    for percent in _SMALLER:
        width, height = (max(64, side * percent // 100 // 64 * 64) for side in before)
        if (width, height) != (job.width, job.height):
            yield {"width": width, "height": height}


def plan_or_refuse(
    job: Job, device: Device, checkpoint: Checkpoint, settings: Settings,
    *, count: int = 1, environ: Mapping[str, str] | None = None, root: Path = Path("/"),
    platform: str = sys.platform,
) -> Plan:  # fmt: skip
    """`plan_on`, and the refusal of what no plan can run, before any weight is loaded.

    What is free now decides how a job runs, and what the machine has whether it can at all: other
    programs may end before memory is short. A mode or a budget in the settings lets one try all
    the same.

    Raises:
        BadRequest: a setting asks for what the device cannot do.
        DoesNotFit: it needs more than a run may take, whatever the way.
    """
    plan = plan_on(
        job, device, checkpoint, settings, count=count, environ=environ, root=root,
        platform=platform,
    )  # fmt: skip
    tries = settings.vram_mode is not VramMode.AUTO or settings.vram_budget_gb is not None
    if plan.verdict is not Verdict.DOES_NOT_FIT or tries:
        return plan
    gpu, engine = device.gpu, device.engine
    now = read_memory(root, gpu)
    alone = replace(now, used_bytes=0, gtt_used_bytes=0, available_bytes=now.ram_bytes)
    most = make_plan(job, gpu, checkpoint, settings, engine=engine, memory=alone, platform=platform)
    if most.verdict is not Verdict.DOES_NOT_FIT:
        log.warning("%s is short of memory now: %s", _name(gpu), in_figures(plan, _peak_of(plan)))
        return plan
    nearest = nearest_that_fits(
        job, gpu, checkpoint, settings, engine=engine, budget_bytes=most.budget_bytes,
        platform=platform,
    )  # fmt: skip
    raise DoesNotFit(refusal(most, job, checkpoint, _name(gpu), nearest))


def _name(gpu: Gpu | None) -> str:
    return "the CPU" if gpu is None else gpu.name


def _peak_of(plan: Plan) -> str:
    """The stage that needs the most."""
    sizes: dict[str, int] = asdict(plan.stages)
    return max(sizes, key=lambda name: sizes[name])


def refusal(
    plan: Plan, job: Job, checkpoint: Checkpoint, where: str, nearest: Nearest | None
) -> str:
    """One sentence: what, how much it needs, how much there is, and what would fit."""
    width, height = final_size(job)
    budget = (plan.budget_bytes or 0) / GIB
    hints = [r for r in plan.reasons if "BIOS" in r or r.startswith("an APU")]
    said = (
        f"{width} x {height} with {checkpoint.family.title} needs {plan.stages.peak / GIB:.1f} GiB "
        f"on {where} in the most frugal way, and a run may take {budget:.1f} GiB"
    )
    fitting = "no size fits" if nearest is None else f"nearest that fits: {nearest}"
    return "; ".join([said, fitting, *hints])
