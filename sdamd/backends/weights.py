"""Where the numbers of a weight come from while they are not on the device: RAM, or their file."""

import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from sdamd.checkpoint.header import read_header


class Source(Protocol):
    """Has a weight, as it was stored; on the CPU."""

    def read(self, *, alone: bool = False) -> torch.Tensor:
        """The weight. Whoever changes it changes nothing that is read later.

        `alone` is for one that is let go soon: its memory then does not wait for other weights.
        """
        ...


Sources: TypeAlias = Mapping[str, Source]
"""The name of a parameter -> where it is read."""


@dataclass(frozen=True, slots=True, eq=False)
class InRam:
    """A weight that waits in RAM."""

    tensor: torch.Tensor

    def read(self, *, alone: bool = False) -> torch.Tensor:  # noqa: ARG002  # the same either way
        """The tensor itself: what computes with weights does not change them."""
        return self.tensor


class File:
    """An open file of weights; what was opened is read, even after its name went elsewhere.

    Its pages are mapped once for all views that live together: each mapping of Python's takes a
    file descriptor, of which a process has about a thousand.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            OSError: it cannot be read.
        """
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._descriptor)
        self.bytes = os.fstat(self._descriptor).st_size
        self._pages: weakref.ref[mmap.mmap] | None = None

    def view(self, start: int, count: int, *, alone: bool) -> torch.Tensor:
        """`count` bytes as a tensor: pages of the file, which go when they have no view any more.

        With `alone` they are mapped for this view only.
        """
        if alone:
            before = start % mmap.ALLOCATIONGRANULARITY
            pages = self._mapped(start - before, count + before)
            return torch.frombuffer(pages, dtype=torch.uint8, count=count, offset=before)
        whole = self._pages() if self._pages is not None else None
        if whole is None:
            whole = self._mapped(0, self.bytes)
            self._pages = weakref.ref(whole)
        return torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=start)

    def _mapped(self, start: int, count: int) -> mmap.mmap:
        # A private copy on writing, since torch knows no tensor that cannot be written.
        return mmap.mmap(self._descriptor, count, access=mmap.ACCESS_COPY, offset=start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFile:
    """A weight that lies in a file, in the shape in which a model wants it."""

    file: File
    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def read(self, *, alone: bool = False) -> torch.Tensor:
        """Pages of the file: nothing is in RAM but what the system keeps of it."""
        elements = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        flat = self.file.view(self.start, elements * self.dtype.itemsize, alone=alone)
        return flat.view(self.dtype).as_strided(self.size, self.stride)


def sources_of(
    wanted: Mapping[str, torch.Tensor], path: Path, read: Mapping[str, torch.Tensor]
) -> dict[str, Source]:
    """Where each of the `wanted` tensors is read again: its file, or else RAM.

    Args:
        wanted: what a model takes: views of what was read, or made of it.
        path: a `.safetensors` file.
        read: tensors of the file under their names there, as views of one mapping of it.
    """
    header = read_header(path)
    begin = header.bytes - max((entry.end for entry in header.tensors.values()), default=0)
    starts = {
        tensor.data_ptr() - begin - header.tensors[name].begin
        for name, tensor in read.items()
        if tensor.numel()
    }
    if len(starts) != 1:  # not one mapping, so nothing is known of where it lies
        return {name: InRam(tensor) for name, tensor in wanted.items()}
    (mapped,) = starts
    file = File(path)
    return {name: _source(tensor, mapped, file) for name, tensor in wanted.items()}


def _source(tensor: torch.Tensor, mapped: int, file: File) -> Source:
    start = tensor.data_ptr() - mapped
    if not 0 <= start < file.bytes or start % tensor.dtype.itemsize:
        return InRam(tensor)
    return InFile(
        file=file, start=start, dtype=tensor.dtype, size=tensor.shape, stride=tensor.stride()
    )
