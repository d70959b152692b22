"""Sizes of a batch: a Radeon looks for its kernels anew for every one of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from sdamd.request import Job

MANY: Final = 8
"""From here on the number of sizes is worth a word."""


def shapes_of(jobs: Iterable[Job]) -> tuple[tuple[int, int], ...]:
    """The distinct sizes of the jobs, as they come."""
    return tuple(dict.fromkeys((job.width, job.height) for job in jobs))


def rounded(jobs: Sequence[Job], multiple: int) -> tuple[Job, ...]:
    """The jobs with sides rounded to the nearest multiple, at least one; 0 changes nothing."""
    if not multiple:
        return tuple(jobs)
    return tuple(
        replace(job, width=_nearest(job.width, multiple), height=_nearest(job.height, multiple))
        for job in jobs
    )


def about_shapes(jobs: Iterable[Job]) -> str | None:
    """The sentence about a batch of many sizes; None for few."""
    number = len(shapes_of(jobs))
    if number < MANY:
        return None
    return (
        f"{number} different sizes: a Radeon looks for its kernels anew for each; "
        "round_sizes 64 makes them fewer"
    )


def _nearest(side: int, multiple: int) -> int:
    return max(multiple, (side + multiple // 2) // multiple * multiple)
