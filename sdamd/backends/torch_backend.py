"""The engine on PyTorch: ROCm, CUDA and the CPU are the same code."""

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from PIL.Image import Image
from tqdm import tqdm

from sdamd import upscale
from sdamd.backends import means
from sdamd.backends.backend import Outcome, Watch
from sdamd.backends.device_memory import DeviceMemory, memory_of
from sdamd.backends.guard import Guard
from sdamd.backends.loading import load_components
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, HardwareError, OutOfVram, Unfinished
from sdamd.hardware.kernel_cache import KernelCache, leave, mark_of
from sdamd.out_of_memory import in_words, needed_bytes, ran_out
from sdamd.plan import Plan
from sdamd.request import Job
from sdamd.sampling.sample import Made, sample

log = logging.getLogger(__name__)


class TorchBackend:
    """PyTorch on the device that the plan names. `kernels` stay locked while it lives."""

    def __init__(self, kernels: KernelCache | None = None) -> None:
        self._kernels = kernels

    def load(self, checkpoint: Checkpoint, plan: Plan) -> "TorchPipeline":
        """Open the weights, offline. They come to the device with the first sample, as planned.

        Raises:
            BadCheckpoint: a component is incomplete.
            HardwareError: this build of torch does not reach the device.
        """
        silence()
        device = device_of(plan)
        _give_back(device)
        with translated(plan):
            pipe = load_components(checkpoint, plan, device, waiting=True)
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
        self._memory: DeviceMemory = memory_of(device)
        self._upscaler: upscale.Upscaler | None = None
        self._outcome: Outcome | None = None

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Made]:
        """Make one RGB picture per job, or say why it is none.

        Raises:
            OutOfVram: the device ran out of memory, in the most frugal way too.
            Stopped: `watch` returned True.
        """
        mark = _announced(jobs, plan)
        guard = Guard(
            plan=plan, apply=self._follow, memory=self._memory, on_cpu=self._on_cpu(),
            base=(jobs[0].height // 8, jobs[0].width // 8),
        )  # fmt: skip
        try:
            with translated(plan), guard.over(self._pipe):
                made = sample(self._pipe, jobs, plan, self._training, watch, self._network)
                if mark is not None:
                    leave(mark)
                if jobs[0].upscale > 1:
                    guard.enter("upscale")
                return [
                    self._enlarged(image, job.upscale)
                    for image, job in zip(made, jobs, strict=True)
                ]
        finally:
            if self._upscaler is not None and self._upscaler.fell:
                self._upscaler.fell = False
                guard.fell.append("upscale")
            self._outcome = guard.outcome

    @property
    def outcome(self) -> Outcome | None:
        """How the last run went; None before the first."""
        return self._outcome

    def _on_cpu(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What decodes when the device cannot, or nothing where the CPU is the device."""
        return None if self.device.type == "cpu" else self._decode_on_cpu

    def _decode_on_cpu(self, latents: torch.Tensor) -> torch.Tensor:
        vae = means.on_cpu(self._pipe.vae)
        pictures = torch.split(latents.to("cpu", torch.float32), 1)
        return torch.cat([vae.decode(each, return_dict=False)[0] for each in pictures])

    def _follow(self, plan: Plan) -> None:
        """Let the components compute, and lie in memory, as planned."""
        means.apply(self._pipe, plan, self.device)

    def _enlarged(self, made: Made, scale: int) -> Made:
        if isinstance(made, BadImage) or scale == 1:
            return made
        try:
            if isinstance(made, Unfinished):
                return Unfinished(str(made), self._network(made.image, scale))
            return self._network(made, scale)
        except BadImage as error:
            return error

    def _network(self, image: Image, scale: int) -> Image:
        if self._upscaler is None:
            self._upscaler = upscale.load(self.device)
        return self._upscaler.upscale(image, scale)


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
    except (RuntimeError, MemoryError) as error:
        said = str(error)
        if ran_out(error):
            raise OutOfVram(
                f"{plan.device} {in_words(said)}", needed_bytes=needed_bytes(said)
            ) from error
        if isinstance(error, torch.AcceleratorError):
            raise HardwareError(_in_a_line(plan, "failed", error)) from error
        raise


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
