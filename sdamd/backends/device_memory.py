"""What can be asked of a device's memory, and done to it: all of `torch.cuda` that concerns it."""

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """The memory of one device, as one process uses it. Figures are None where none are kept."""

    def limit(self, budget_bytes: int | None) -> None:
        """Let an allocation beyond the budget fail at once, where it can be caught."""
        ...

    def give_back(self) -> None:
        """Free what nobody holds, cycles too, and return it to the driver."""
        ...

    def trim(self) -> None:
        """Return to the driver what is kept for later; quick."""
        ...

    def held(self) -> int | None:
        """Bytes of the tensors that are alive."""
        ...

    def start_peak(self) -> None:
        """Forget the highest until now."""
        ...

    def peak(self) -> int | None:
        """The most that tensors took since then."""
        ...

    def wait(self) -> None:
        """Until the device has done all that it was told to."""
        ...


class HostMemory:
    """The computer's own memory, and that of engines that say nothing about theirs."""

    def limit(self, budget_bytes: int | None) -> None:
        """Do nothing: the system decides."""

    def give_back(self) -> None:
        """Free what only cycles hold."""
        gc.collect()

    def trim(self) -> None:
        """Do nothing: what is freed is free."""

    def held(self) -> int | None:
        """Unknown."""
        return None

    def start_peak(self) -> None:
        """Do nothing."""

    def peak(self) -> int | None:
        """Unknown."""
        return None

    def wait(self) -> None:
        """Do nothing: calls return when they are done."""


class CudaMemory:
    """The memory of one GPU of CUDA or ROCm, through torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self, budget_bytes: int | None) -> None:
        """Let torch refuse what exceeds the budget: beyond it Windows would move it into RAM.

        Without a budget all of the memory may be taken, as before.
        """
        total = torch.cuda.get_device_properties(self._device).total_memory
        fraction = 1.0 if not budget_bytes else min(1.0, budget_bytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def give_back(self) -> None:
        """Free what only cycles hold, and return the allocator's cache to the driver."""
        gc.collect()
        torch.cuda.empty_cache()

    def trim(self) -> None:
        """Return the allocator's cache to the driver."""
        torch.cuda.empty_cache()

    def held(self) -> int | None:
        """Bytes of the tensors that are alive."""
        return torch.cuda.memory_allocated(self._device)

    def start_peak(self) -> None:
        """Forget the highest until now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        """The most that tensors took since then."""
        return torch.cuda.max_memory_allocated(self._device)

    def wait(self) -> None:
        """Until all kernels have run."""
        torch.cuda.synchronize(self._device)


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory that tensors on `device` take."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()
