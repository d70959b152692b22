"""The accountant against the real allocator of the CPU, allocation by allocation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch.autograd.profiler import profile
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts import architectures
from scripts.architectures import Size
from scripts.fake_gpu import DEVICE, FUSED, MATH, Attention, FakeGpu, aside, placed


def really(family: str, component: str) -> Any:
    """A network with weights that nobody writes: pages of zeros, that take no memory to read."""
    return architectures.build(family, component).to_empty(device="cpu")


def most_allocated(call: Callable[[], object]) -> int:
    """Bytes of the CPU's allocator at their highest, above those at the start."""
    with torch.no_grad(), profile(profile_memory=True, use_kineto=True) as found:
        call()
    changes = [
        event.nbytes()
        for event in sorted(found.kineto_results.events(), key=lambda event: event.start_ns())
        if event.name() == "[memory]"
    ]
    assert changes, "the profiler saw no memory"
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most


def predicted(call: Callable[[Any, dict[str, Any]], object], gpu: FakeGpu, size: Size) -> int:
    with gpu:
        with aside():
            model = architectures.build("sd15", "unet")
        placed(model, torch.float32)
        inputs = architectures.denoise_inputs(model, size, torch.float32, DEVICE)
        with gpu.measured() as peak:
            call(model, inputs)
    return peak.extra


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "attention", "samples"),
    [(AttnProcessor2_0, FUSED, 2), (AttnProcessor, MATH, 1)],
    ids=["fused, with guidance", "eager, without"],
)
def test_a_step_of_sd15_takes_what_the_real_allocator_says(
    processor: type, attention: Attention, samples: int
) -> None:
    size = Size(width=512, height=512, samples=samples)

    def step(model: Any, inputs: dict[str, Any]) -> object:
        model.set_attn_processor(processor())
        return model(**inputs)

    model = really("sd15", "unet")
    inputs = architectures.denoise_inputs(model, size, torch.float32, torch.device("cpu"))
    real = most_allocated(lambda: step(model, inputs))
    assert predicted(step, FakeGpu(attention), size) == pytest.approx(real, rel=0.001)


def test_torch_s_own_attention_takes_what_the_real_allocator_says() -> None:
    """Nine bytes a score: its softmax makes a mask within itself, which no fake tensor shows."""

    def attend(device: torch.device) -> object:
        query = torch.empty(2, 4, 512, 40, dtype=torch.bfloat16, device=device)
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query, query, query)

    real = most_allocated(lambda: attend(torch.device("cpu")))
    with FakeGpu(MATH) as gpu, gpu.measured() as peak:
        attend(DEVICE)
    assert peak.extra == pytest.approx(real, rel=0.001)
    assert peak.extra > 9 * 2 * 4 * 512 * 512
