"""From requests to jobs: every seed drawn, every default filled in."""

import secrets
from collections.abc import Iterator
from dataclasses import replace

from sdamd.checkpoint import Family
from sdamd.request import SEED_MAX, Job, Request
from sdamd.scheduler import resolve

DRAWN_SEED_MAX = 2**32 - 1
"""Drawn seeds stay below it, so that tools with 32-bit seeds can use them too."""


def expand(request: Request, family: Family) -> Iterator[Job]:
    """Yield one job per picture; picture i has seed + i, around from the largest to 0.

    Raises:
        BadRequest: the scheduler is not known.
    """
    first = secrets.randbelow(DRAWN_SEED_MAX + 1) if request.seed is None else request.seed
    default = family.defaults
    job = Job(
        index=0,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        checkpoint=request.checkpoint,
        width=request.width or family.width,
        height=request.height or family.height,
        steps=request.steps or default.steps,
        guidance_scale=request.guidance_scale or default.guidance_scale,
        scheduler=resolve(request.scheduler or default.scheduler),
        seed=first,
        upscale=request.upscale or default.upscale,
    )
    for index in range(request.count):
        yield replace(job, index=index, seed=(first + index) % (SEED_MAX + 1))
