"""Whether an error's text says that memory ran out, whoever says it; no torch.

torch, HIP, MIOpen, DirectML and onnxruntime have no common exception for it: some raise their own,
most a plain RuntimeError, and what tells them from other failures is the text alone.
"""

import re
from typing import Final

TORCH: Final = (
    r"\b(HIP|CUDA|ROCm)( error:)? out of memory"
    r"|OutOfMemory"  # hipErrorOutOfMemory, and the names of the exceptions
    r"|cudaErrorMemoryAllocation|hipErrorMemoryAllocation"
    r"|STATUS_ALLOC_FAILED|miopenStatusAllocFailed"  # rocBLAS, hipBLAS, MIOpen: their own buffers
    r"|DefaultCPUAllocator: (not enough|can't allocate) memory"
)
"""Source: c10/cuda/CUDACachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp, hip_runtime_api.h."""

DIRECTML: Final = (
    r"8007000E"  # E_OUTOFMEMORY
    r"|BucketizedBufferAllocator"
    r"|Could not allocate tensor with \d+ bytes"
    r"|not enough GPU video memory"
    r"|DML allocator out of memory"
)
"""Source: DirectML#412; onnxruntime's DirectML provider, of which this allocator says nothing
else than that a buffer could not be made."""

_OTHERS: Final = (
    r"out of memory"
    r"|Failed to allocate memory"  # onnxruntime's own allocators
    r"|bad[ _]alloc(ation)?\b"
    r"|Cannot allocate memory|Not enough memory|paging file is too small"  # Linux, Windows
)

_ANY: Final = re.compile(f"{TORCH}|{DIRECTML}|{_OTHERS}", re.IGNORECASE)

_SIZE: Final = r"(\d{1,20}(?:\.\d{1,3})?) ?(bytes|KiB|MiB|GiB)\b"
_ASKED: Final = re.compile(
    rf"(?:tried to allocate|tensor with|buffer of size) {_SIZE}", re.IGNORECASE
)
_HELD: Final = re.compile(
    rf"{_SIZE} (?:is allocated by PyTorch|already allocated)", re.IGNORECASE
)  # fmt: skip
_UNITS: Final = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_out_of_memory(said: str) -> bool:
    """Whether the text of an error, in any of the spellings, says that memory ran out."""
    return _ANY.search(said) is not None


def ran_out(error: Exception) -> bool:
    """Whether an error of torch, a driver, onnxruntime or Python says it, by name or by text."""
    if isinstance(error, MemoryError):
        return True
    return is_out_of_memory(f"{type(error).__name__}: {error}")


def asked_bytes(said: str) -> int | None:
    """What could not be allocated, where the text names it."""
    return _bytes(_ASKED.search(said))


def needed_bytes(said: str) -> int | None:
    """What torch held and what it asked for beyond, together, where the text names both.

    It had to have at least that, so it is a lower bound for what the computation needs.
    """
    asked, held = asked_bytes(said), _bytes(_HELD.search(said))
    return None if asked is None or held is None else asked + held


def in_words(said: str) -> str:
    """What is worth telling a person of such a text: how much more was asked for, if it says so."""
    asked = asked_bytes(said)
    if asked is None:
        return "ran out of memory"
    unit, name = (2**30, "GiB") if asked >= 2**30 else (2**20, "MiB")
    return f"ran out of memory when {asked / unit:.1f} {name} more were asked for"


def _bytes(found: re.Match[str] | None) -> int | None:
    return None if found is None else round(float(found[1]) * _UNITS[found[2].lower()])
