"""Whether a process that renders is slow or hangs: by how long the same took before."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sdamd.progress import duration
from sdamd.render import Event, Started, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """For how many seconds a child may show no progress before it counts as hung.

    `first` holds for what was not measured yet: a checkpoint is read from a slow disk, and the
    first pass of a size looks for its kernels, which has taken a Radeon over ten minutes
    (ROCm/TheRock#3266). After that it is `factor` times the longest that the same took, and at
    least `least`. `silent` is for a child that does not even say that it lives: its process or the
    driver stands still.
    """

    first: float = 1800.0
    factor: float = 20.0
    least: float = 120.0
    silent: float = 600.0


class Watchdog:
    """Tells a child that is slow from one that hangs, by how long the same took before."""

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._longest: dict[object, float] = {}
        self.begin()

    def begin(self) -> None:
        """Jobs were sent; what comes next is that the first of them starts."""
        self._since = self._heard = self._clock()
        self._shape: object = None
        self._waits_for: object = "a start"

    def hear(self) -> None:
        """Something came, if only that the child lives."""
        self._heard = self._clock()

    def see(self, event: Event) -> None:
        """Something was done; remember how long it took, and what is to come."""
        now = self._clock()
        if isinstance(event, Started):
            job = event.job
            self._shape = (job.checkpoint, job.width, job.height, job.hires_size, event.plan.batch)
            comes = "the first step"
        elif isinstance(event, Step):
            comes = "a picture" if event.step == event.steps else "a step"
        else:
            comes = "a start"
        waited_for = self._waits_for
        self._longest[waited_for] = max(now - self._since, self._longest.get(waited_for, 0.0))
        self._since = now
        self._waits_for = (comes, self._shape)

    def hung(self) -> str:
        """Say why it counts as hung; empty while it does not."""
        now = self._clock()
        if now - self._heard > self._patience.silent:
            return f"no sign of life for {duration(now - self._heard)}"
        waited, limit = now - self._since, self._limit()
        if waited <= limit:
            return ""
        return f"no progress for {duration(waited)}; {duration(limit)} are allowed here"

    def _limit(self) -> float:
        longest = self._longest.get(self._waits_for)
        if longest is None:
            return self._patience.first
        return max(self._patience.least, self._patience.factor * longest)
