from dataclasses import replace

import pytest
import torch

from sdamd.backends.torch_backend import device_of
from sdamd.errors import HardwareError
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
