from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from sdamd import models
from sdamd.backends.torch_backend import TorchBackend, device_of, translated
from sdamd.errors import HardwareError, OutOfVram
from sdamd.plan import Plan, Stages

PLAN = Plan(
    device="cpu",
    dtype="float32",
    vae_dtype="float32",
    batch=1,
    vae_tile=0,
    attention="sdpa",
    offload="none",
    stages=Stages(text=0, denoise=0, decode=0),
    budget_bytes=None,
    reasons=(),
)


def test_the_plan_names_the_device() -> None:
    assert device_of(PLAN) == torch.device("cpu")


def test_a_gpu_that_torch_does_not_see_is_an_error_and_never_the_cpu() -> None:
    beyond = torch.cuda.device_count()
    with pytest.raises(HardwareError, match=f"sees {beyond} GPUs"):
        device_of(replace(PLAN, device=f"cuda:{beyond}"))


def test_an_unknown_device_says_what_is_allowed() -> None:
    with pytest.raises(HardwareError, match="device is 'gpu'; allowed are cpu, cuda and cuda:N"):
        device_of(replace(PLAN, device="gpu"))


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (torch.OutOfMemoryError("HIP out of memory. Tried\nmore"), OutOfVram, "HIP out of memory"),
        (torch.AcceleratorError("HIP error: launch\nmore"), HardwareError, "failed: HIP error"),
        (torch.AcceleratorError(""), HardwareError, "cpu failed: "),
        (RuntimeError("unexpected"), RuntimeError, "unexpected"),
    ],
    ids=repr,
)
def test_errors_of_torch_get_names_of_sdamd(
    raised: Exception, expected: type[Exception], said: str
) -> None:
    """C18 and E-series: what the driver says comes in one line, without a traceback."""
    with pytest.raises(expected, match=said) as caught, translated(PLAN):
        raise raised
    assert type(caught.value) is expected
    assert len(str(caught.value).splitlines()) == 1


def test_the_cpu_running_out_of_memory_is_told_as_that() -> None:
    with pytest.raises(OutOfVram, match="cpu ran out of memory: "), translated(PLAN):
        torch.empty(2**50)


def test_loading_leaves_no_lock_between_processes() -> None:
    """A semaphore of tqdm's outlived the worker, and Python warned of it at the end."""
    pipeline = TorchBackend().load(models.find("", Path("/nowhere")), PLAN)
    assert not isinstance(tqdm.get_lock(), TqdmDefaultWriteLock)
    assert pipeline.device == torch.device("cpu")
