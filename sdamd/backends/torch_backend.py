"""The engine on PyTorch: ROCm, CUDA and the CPU are the same code."""

import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
import transformers
from PIL.Image import Image
from tqdm import tqdm

from sdamd import upscale
from sdamd.backends.backend import Watch
from sdamd.backends.loading import load_components
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, HardwareError, OutOfVram
from sdamd.plan import Plan
from sdamd.request import Job
from sdamd.sampling.sample import sample

log = logging.getLogger(__name__)


class TorchBackend:
    """PyTorch on the device that the plan names."""

    def load(self, checkpoint: Checkpoint, plan: Plan) -> "TorchPipeline":
        """Load the weights, offline.

        Raises:
            BadCheckpoint: a component is incomplete.
            HardwareError: this build of torch does not reach the device.
            OutOfVram: there is no room for the weights.
        """
        _silence()
        device = device_of(plan)
        _give_back(device)
        with translated(plan):
            if plan.offload == "none":
                pipe = load_components(checkpoint, plan, device)
            else:
                pipe = load_components(checkpoint, plan, torch.device("cpu"))
                pipe.enable_model_cpu_offload(device=device)
        return TorchPipeline(pipe, device)


class TorchPipeline:
    """An unchanged diffusers pipeline, and the upscaler once a job needs it."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self.device = device
        self._pipe = pipe
        self._pipe.set_progress_bar_config(disable=True)
        self._training = dict(pipe.scheduler.config)
        self._upscaler: upscale.Upscaler | None = None

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Image | BadImage]:
        """Make one RGB picture per job, or say why it is none.

        Raises:
            OutOfVram: the device ran out of memory.
            Stopped: `watch` returned True.
        """
        if plan.attention == "sliced":
            self._pipe.enable_attention_slicing("max")
        with translated(plan):
            made = sample(self._pipe, jobs, plan, self._training, watch)
            return [
                self._enlarged(image, job.upscale) for image, job in zip(made, jobs, strict=True)
            ]

    def _enlarged(self, image: Image | BadImage, scale: int) -> Image | BadImage:
        if isinstance(image, BadImage) or scale == 1:
            return image
        if self._upscaler is None:
            self._upscaler = upscale.load(self.device)
        try:
            return self._upscaler.upscale(image, scale)
        except BadImage as error:
            return error


@contextmanager
def translated(plan: Plan) -> Iterator[None]:
    """Give torch's errors sdamd's names.

    Raises:
        OutOfVram: the device ran out of memory.
        HardwareError: the driver or the device failed.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfVram(_in_a_line(plan, "ran out of memory", error)) from error
    except torch.AcceleratorError as error:
        raise HardwareError(_in_a_line(plan, "failed", error)) from error
    except RuntimeError as error:
        # On the CPU torch has no exception of its own for it.
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfVram(_in_a_line(plan, "ran out of memory", error)) from error


def _in_a_line(plan: Plan, what: str, error: RuntimeError) -> str:
    first_line = next(iter(str(error).splitlines()), "")
    return f"{plan.device} {what}: {first_line}"


def _silence() -> None:
    """Keep bars and locks of the libraries' loading away, which takes no time anyway."""
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    # Without this the first bar, drawn or not, makes a lock between processes: a semaphore that
    # outlives a worker that is killed.
    tqdm.set_lock(threading.RLock())


def _give_back(device: torch.device) -> None:
    """Free what an earlier pipeline left: offloading makes cycles, and torch caches memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_of(plan: Plan) -> torch.device:
    """Turn the plan's device (`cpu`, `cuda`, `cuda:1`; ROCm is `cuda` too) into torch's.

    Raises:
        HardwareError: this build of torch does not reach it.
    """
    try:
        device = torch.device(plan.device)
    except RuntimeError as error:
        raise HardwareError(
            f"device is {plan.device!r}; allowed are cpu, cuda and cuda:N"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise HardwareError(
                f"device is {plan.device}; torch {torch.__version__} sees {count} GPUs"
            )
    return device
