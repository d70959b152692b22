"""From requests to jobs: every seed drawn, every default filled in."""

import os
from collections.abc import Iterator
from dataclasses import replace

from sdamd.checkpoint import Family
from sdamd.errors import BadRequest
from sdamd.prompt import extra_networks
from sdamd.request import SEED_MAX, Job, Request
from sdamd.scheduler import resolve

DRAWN_SEED_MAX = 2**32 - 1  # four bytes
"""Drawn seeds stay below it, so that tools with 32-bit seeds can use them too."""


def expand(request: Request, family: Family) -> Iterator[Job]:
    """Yield one job per picture; picture i has seed + i, around from the largest to 0.

    Raises:
        BadRequest: the scheduler is not known, or a prompt asks for a network.
    """
    problems = _networks("prompt", request.prompt)
    problems += _networks("negative_prompt", request.negative_prompt)
    try:
        scheduler = resolve(request.scheduler or family.defaults.scheduler)
    except BadRequest as error:
        raise BadRequest(*problems, *error.problems) from error
    if problems:
        raise BadRequest(*problems)
    first = int.from_bytes(os.urandom(4)) if request.seed is None else request.seed
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
        scheduler=scheduler,
        seed=first,
        upscale=request.upscale or default.upscale,
    )
    for index in range(request.count):
        yield replace(job, index=index, seed=(first + index) % (SEED_MAX + 1))


def _networks(name: str, text: str) -> list[str]:
    """Say which networks a prompt asks for; read as words they would only spoil the picture."""
    problems = []
    for tag in dict.fromkeys(extra_networks(text)[1]):
        kind = "LoRA" if tag.kind == "lora" else tag.kind
        shown = tag.name if len(tag.name) <= 60 else f"{tag.name[:57]}..."
        problems.append(
            f"{name} asks for the {kind} {shown!r}; this version cannot use {kind}s yet"
        )
    return problems
