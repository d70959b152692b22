from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdamd.backends.device_memory import CudaMemory, HostMemory, memory_of

GIB = 2**30


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of torch.cuda, of a card of 8 GiB that is not there."""
    calls: list[Any] = []
    card = SimpleNamespace(total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for name, answer in {
        "set_per_process_memory_fraction": None, "empty_cache": None, "memory_allocated": 5,
        "reset_peak_memory_stats": None, "max_memory_allocated": 7, "synchronize": None,
    }.items():  # fmt: skip

        def note(*args: Any, name: str = name, answer: Any = answer) -> Any:
            calls.append((name, *args))
            return answer

        monkeypatch.setattr(torch.cuda, name, note)
    return calls


def test_a_gpu_has_torchs_figures_and_the_cpu_none(asked: list[Any]) -> None:
    device = torch.device("cuda:1")
    memory = memory_of(device)
    assert isinstance(memory, CudaMemory)
    assert (memory.held(), memory.peak()) == (5, 7)
    memory.start_peak()
    memory.wait()
    memory.trim()
    memory.give_back()
    assert asked == [
        ("memory_allocated", device), ("max_memory_allocated", device),
        ("reset_peak_memory_stats", device), ("synchronize", device),
        ("empty_cache",), ("empty_cache",),
    ]  # fmt: skip
    host = memory_of(torch.device("cpu"))
    assert isinstance(host, HostMemory)
    host.limit(GIB)
    host.start_peak()
    host.give_back()
    assert (host.held(), host.peak()) == (None, None)


@pytest.mark.report("B17")
@pytest.mark.parametrize(
    ("budget", "fraction"),
    [(6 * GIB, 0.75), (8 * GIB, 1.0), (60 * GIB, 1.0), (None, 1.0), (0, 1.0)],
)
def test_beyond_the_budget_torch_refuses_and_never_below_what_the_card_has(
    asked: list[Any], budget: int | None, fraction: float
) -> None:
    """A miss must be an error that can be caught: the driver hangs or moves memory into RAM."""
    device = torch.device("cuda")
    memory_of(device).limit(budget)
    assert asked == [("set_per_process_memory_fraction", fraction, device)]
