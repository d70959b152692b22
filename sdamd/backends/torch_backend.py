"""The engine on PyTorch: ROCm, CUDA and the CPU are the same code."""

import gc
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from PIL.Image import Image
from tqdm import tqdm

from sdamd import upscale
from sdamd.backends.attention import attend_with, has_fused_kernel
from sdamd.backends.backend import Watch
from sdamd.backends.loading import load_components
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, HardwareError, OutOfVram
from sdamd.hardware.kernel_cache import KernelCache, leave, mark_of
from sdamd.plan import Plan
from sdamd.request import Job
from sdamd.sampling.sample import sample

log = logging.getLogger(__name__)


class TorchBackend:
    """PyTorch on the device that the plan names. `kernels` stay locked while it lives."""

    def __init__(self, kernels: KernelCache | None = None) -> None:
        self._kernels = kernels

    def load(self, checkpoint: Checkpoint, plan: Plan) -> "TorchPipeline":
        """Load the weights, offline.

        Raises:
            BadCheckpoint: a component is incomplete.
            HardwareError: this build of torch does not reach the device.
            OutOfVram: there is no room for the weights.
        """
        silence()
        device = device_of(plan)
        _give_back(device)
        with translated(plan):
            if plan.offload == "none":
                pipe = load_components(checkpoint, plan, device)
            else:
                pipe = load_components(checkpoint, plan, torch.device("cpu"))
                pipe.enable_model_cpu_offload(device=device)
        # With it MIOpen searches all of its kernels for minutes at each new shape, and torch's
        # own default may change.
        torch.backends.cudnn.benchmark = False
        return TorchPipeline(pipe, device)


class TorchPipeline:
    """An unchanged diffusers pipeline, and the upscaler once a job needs it."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self.device = device
        self._pipe = pipe
        self._pipe.set_progress_bar_config(disable=True)
        self._training = dict(pipe.scheduler.config)
        self._upscaler: upscale.Upscaler | None = None
        self._followed: tuple[str, str, int, bool] | None = None

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Image | BadImage]:
        """Make one RGB picture per job, or say why it is none.

        Raises:
            OutOfVram: the device ran out of memory.
            Stopped: `watch` returned True.
        """
        mark = _announced(jobs, plan)
        with translated(plan):
            self._follow(plan)
            made = sample(self._pipe, jobs, plan, self._training, watch)
            if mark is not None:
                leave(mark)
            return [
                self._enlarged(image, job.upscale) for image, job in zip(made, jobs, strict=True)
            ]

    def _follow(self, plan: Plan) -> None:
        """Let UNet and VAE attend and lie in memory as planned; the text encoders stay as are."""
        chosen = (plan.attention, plan.vae_attention, plan.block_bytes, plan.channels_last)
        if chosen == self._followed:
            return
        unet, vae = self._pipe.unet, self._pipe.vae
        kind = plan.attention
        if kind == "fused" and not has_fused_kernel(self.device, unet.dtype):
            log.warning("this torch has no fused attention for the card; attending in blocks")
            kind = "chunked"
        attend_with(unet, kind, block_bytes=plan.block_bytes)
        # One head for the whole picture, whose scores leave float16's range in some VAEs.
        attend_with(vae, plan.vae_attention, block_bytes=plan.block_bytes, upcast=True)
        layout = torch.channels_last if plan.channels_last else torch.contiguous_format
        if plan.channels_last or self._followed is not None:
            unet.to(memory_format=layout)
            vae.to(memory_format=layout)
        self._followed = chosen

    def _enlarged(self, image: Image | BadImage, scale: int) -> Image | BadImage:
        if isinstance(image, BadImage) or scale == 1:
            return image
        if self._upscaler is None:
            self._upscaler = upscale.load(self.device)
        try:
            return self._upscaler.upscale(image, scale)
        except BadImage as error:
            return error


def _announced(jobs: Sequence[Job], plan: Plan) -> Path | None:
    """Say that the first run at a size takes longer, and give the mark to leave after it."""
    if torch.version.hip is None:
        return None
    size = f"{jobs[0].width}x{jobs[0].height}x{len(jobs)}"
    mark = mark_of(os.environ, f"{size}-{plan.dtype}-{plan.vae_dtype}-{plan.vae_tile}")
    if mark is not None:
        log.warning(
            "the first run at %d x %d, %d at a time: the GPU looks for its kernels, which can take "
            "minutes and happens once; 'sdamd warmup' does it beforehand",
            jobs[0].width, jobs[0].height, len(jobs),
        )  # fmt: skip
    return mark


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


def silence() -> None:
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
