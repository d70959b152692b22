"""The seam between engines: what a backend must do, and the only door to torch."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from PIL.Image import Image

from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, Unfinished
from sdamd.hardware.kernel_cache import KernelCache, claim
from sdamd.hardware.runtime import Engine
from sdamd.plan import Plan
from sdamd.request import Job
from sdamd.tuned import torch_version

log = logging.getLogger(__name__)

Watch: TypeAlias = Callable[[int, int], bool]
"""Called after each step with (step, steps); returns True to stop."""


Made: TypeAlias = Image | BadImage | Unfinished
"""What becomes of a job: a picture, none, or that of the first pass alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a stage took.

    `bytes` is what its network took beyond what lay on the device when it was called, at least;
    None where the device keeps no count. `seconds` is wall time, of all steps and pictures.
    """

    bytes: int | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run went: `plan` is the one that it ended with, if not the one that it began with.

    `fell` are the stages in which memory ran out, once for each time; `measured` is by stage.
    `on_cpu` is whether the CPU had to decode, since the device could not.
    """

    plan: Plan
    fell: tuple[str, ...] = ()
    measured: Mapping[str, Measured] = field(default_factory=dict)
    on_cpu: bool = False

    @property
    def means(self) -> str:
        """What was done to spare memory, in words; empty for nothing."""
        return ", ".join(filter(None, (self.plan.means, "decoded on the CPU" * self.on_cpu)))


class Pipeline(Protocol):
    """A checkpoint that is loaded and ready."""

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Made]:
        """Make one RGB picture per job; all jobs are equal but for prompts, seed and index."""
        ...

    @property
    def outcome(self) -> Outcome | None:
        """How the last run went, also one that failed; None before the first."""
        ...


class Backend(Protocol):
    """One engine on one device; the sole owner of that device's memory."""

    def load(self, checkpoint: Checkpoint, plan: Plan) -> Pipeline:
        """Load the weights, offline."""
        ...


def open_backend(
    engine: Engine = Engine.CPU, cache: Path | None = None, gfx: str = ""
) -> Backend:  # fmt: skip
    """Load the engine, and torch with it, which takes seconds.

    `cache` is the folder for what an engine makes once and reads again: of a checkpoint, or its
    own kernels for the GPU's target `gfx`.
    """
    # They talk while they are imported and later, of what sdamd says itself or does not use.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    # The only door to torch and onnxruntime.
    if engine in {Engine.DIRECTML, Engine.DIRECTML_CPU}:
        from sdamd.backends.directml import DirectMLBackend  # noqa: PLC0415

        return DirectMLBackend(cache)
    kernels = KernelCache(variables={})
    if engine is Engine.ROCM and cache is not None:
        kernels = claim(cache, torch_version(), gfx, os.environ)
        for sentence in kernels.said:
            log.warning(sentence)
        # MIOpen reads it when torch is loaded.
        os.environ.update(kernels.variables)
    from sdamd.backends.torch_backend import TorchBackend  # noqa: PLC0415

    return TorchBackend(kernels)
