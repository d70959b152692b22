from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, SlicedAttnProcessor
from PIL.Image import Image
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from sdamd import models
from sdamd.backends import attention, means
from sdamd.backends.attention import Processor
from sdamd.backends.torch_backend import TorchBackend, TorchPipeline, device_of, translated
from sdamd.errors import HardwareError, OutOfVram
from sdamd.hardware.kernel_cache import claim
from sdamd.request import Job
from tests.fakes import A_PLAN


def test_the_plan_names_the_device() -> None:
    assert device_of(A_PLAN) == torch.device("cpu")


def test_a_gpu_that_torch_does_not_see_is_an_error_and_never_the_cpu() -> None:
    beyond = torch.cuda.device_count()
    with pytest.raises(HardwareError, match=f"sees {beyond} GPUs"):
        device_of(replace(A_PLAN, device=f"cuda:{beyond}"))


def test_an_unknown_device_says_what_is_allowed() -> None:
    with pytest.raises(HardwareError, match="device is 'gpu'; allowed are cpu, cuda and cuda:N"):
        device_of(replace(A_PLAN, device="gpu"))


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (
            torch.OutOfMemoryError("HIP out of memory. Tried\nmore"),
            OutOfVram,
            "cpu ran out of memory$",
        ),
        (torch.AcceleratorError("HIP error: out of memory"), OutOfVram, "cpu ran out of memory$"),
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
    with pytest.raises(expected, match=said) as caught, translated(A_PLAN):
        raise raised
    assert type(caught.value) is expected
    assert len(str(caught.value).splitlines()) == 1


def test_the_cpu_running_out_of_memory_is_told_as_that() -> None:
    said = r"cpu ran out of memory when \d+\.0 GiB more were asked for"
    with pytest.raises(OutOfVram, match=said), translated(A_PLAN):
        torch.empty(2**50)


def test_loading_leaves_no_lock_between_processes() -> None:
    """A semaphore of tqdm's outlived the worker, and Python warned of it at the end."""
    pipeline = TorchBackend().load(models.find("", Path("/nowhere")), A_PLAN)
    assert not isinstance(tqdm.get_lock(), TqdmDefaultWriteLock)
    assert pipeline.device == torch.device("cpu")


@pytest.fixture
def pipeline() -> TorchPipeline:
    return TorchBackend().load(models.find("", Path("/nowhere")), A_PLAN)


def processors(model: Any) -> set[type]:
    return {type(processor) for processor in model.attn_processors.values()}


def test_the_plan_says_how_unet_and_vae_attend_and_the_text_encoder_stays(
    pipeline: TorchPipeline, job: Job
) -> None:
    pipe = pipeline._pipe
    before = [type(module) for module in pipe.text_encoder.modules()]
    pictures = {}
    for unet, vae in (
        ("fused", "fused"), ("chunked", "chunked"), ("sliced", "chunked"), ("fused", "chunked"),
    ):  # fmt: skip
        plan = replace(A_PLAN, attention=unet, vae_attention=vae, block_bytes=2**16)
        (made,) = pipeline.sample([replace(job, steps=1)], plan, lambda *_: False)
        assert isinstance(made, Image)
        pictures[unet, vae] = np.asarray(made, np.int16)
        kinds = {"fused": AttnProcessor2_0, "chunked": Processor, "sliced": SlicedAttnProcessor}
        assert processors(pipe.unet) == {kinds[unet]}
        # The embedded model's VAE has no attention; tests of attention have one that has.
        assert processors(pipe.vae) <= {kinds[vae]}
    assert [type(module) for module in pipe.text_encoder.modules()] == before
    for picture in pictures.values():
        assert np.abs(picture - pictures["fused", "fused"]).max() <= 1


def test_channels_last_is_a_layout_and_no_other_picture(pipeline: TorchPipeline, job: Job) -> None:
    made = []
    weights = pipeline._pipe.unet.conv_in.weight
    for last in (False, True, False):
        plan = replace(A_PLAN, channels_last=last)
        (picture,) = pipeline.sample([replace(job, steps=1)], plan, lambda *_: False)
        assert isinstance(picture, Image)
        made.append(np.asarray(picture, np.int16))
        assert pipeline._pipe.unet.conv_in.weight.is_contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )
    assert weights.shape == pipeline._pipe.unet.conv_in.weight.shape
    assert np.abs(made[0] - made[1]).max() <= 1
    assert np.array_equal(made[0], made[2])


@pytest.mark.report("D01", "D03")
@pytest.mark.parametrize("miopen", [True, False])
def test_miopen_is_as_planned_in_the_vae_alone_and_never_searches_everything(
    pipeline: TorchPipeline, job: Job, monkeypatch: pytest.MonkeyPatch, miopen: bool
) -> None:
    """D01: with benchmark on, MIOpen tries all kernels for minutes at every new shape."""
    seen = {}
    for name, model in (("unet", pipeline._pipe.unet), ("vae", pipeline._pipe.vae.decoder)):
        forward = model.forward

        def noting(*parts: Any, name: str = name, forward: Any = forward, **asked: Any) -> Any:
            seen[name] = (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark)
            return forward(*parts, **asked)

        monkeypatch.setattr(model, "forward", noting)
    plan = replace(A_PLAN, miopen=miopen)
    pipeline.sample([replace(job, steps=1)], plan, lambda *_: False)
    assert seen == {"unet": (True, False), "vae": (miopen, False)}
    assert torch.backends.cudnn.enabled


def test_loading_turns_the_exhaustive_search_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    TorchBackend().load(models.find("", Path("/nowhere")), A_PLAN)
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.report("B12")
def test_a_torch_without_the_kernels_attends_in_blocks_and_says_so(
    pipeline: TorchPipeline, job: Job, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """B12: without AOTriton's images torch falls back in silence and holds all scores."""
    monkeypatch.setattr(means, "has_fused_kernel", lambda device, dtype: False)
    pipeline.sample([replace(job, steps=1)], A_PLAN, lambda *_: False)
    assert processors(pipeline._pipe.unet) == {Processor}
    (said,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert said == "this torch has no fused attention for the card; attending in blocks"


@pytest.mark.parametrize(("flash", "efficient"), [(True, False), (False, True), (False, False)])
def test_on_rocm_torch_is_asked_for_its_kernels(
    monkeypatch: pytest.MonkeyPatch, flash: bool, efficient: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *parts: parts)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: flash)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda asked: efficient)
    monkeypatch.setattr(torch, "empty", lambda *shape, **asked: torch.zeros(shape))
    found = attention.has_fused_kernel(torch.device("cuda"), torch.float16)
    assert found == (flash or efficient)
    assert attention.has_fused_kernel(torch.device("cpu"), torch.float32)


@pytest.mark.report("D01", "D04")
def test_the_first_run_of_each_shape_is_announced_on_rocm(
    pipeline: TorchPipeline, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """D01: the first picture at each size takes minutes and looked as if it hung."""
    claimed = claim(tmp_path, "2.9.1+rocm6.4", "gfx1201", {})
    for name, value in claimed.variables.items():
        monkeypatch.setenv(name, value)

    def announced(**changed: Any) -> int:
        caplog.clear()
        one = replace(job, steps=1, **changed)
        pipeline.sample([one], A_PLAN, lambda *_: False)
        return sum("the first run at" in record.message for record in caplog.records)

    assert announced() == 0  # no ROCm, nothing to look for
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(means, "has_fused_kernel", lambda device, dtype: True)
    assert [announced(), announced(seed=8)] == [1, 0]
    assert [announced(width=64), announced(width=64)] == [1, 0]
    claimed.close()
