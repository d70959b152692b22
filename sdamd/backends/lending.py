"""Weights that a layer has only while it computes, and how they come in time."""

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from sdamd.backends.weights import InRam, Source

ALIGNMENT: Final = 256
"""Bytes; what torch's allocator gives to each tensor of a GPU is aligned to more."""


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter, and where its numbers are while it has none.

    `shelf` is a copy that is nearer than `source`: pinned in RAM, or narrower on the device.
    `storage` is a narrower dtype that the numbers go through, whether they are kept in it or not.
    """

    parameter: torch.nn.Parameter
    source: Source | None = None
    shelf: torch.Tensor | None = None
    storage: torch.dtype | None = None
    count: int = 0
    """How many numbers it has."""

    def __post_init__(self) -> None:
        """Count once, while it is known without reading much."""
        self.count = self.read().numel()

    @property
    def is_here(self) -> bool:
        """Whether the parameter has its numbers."""
        return self.parameter.numel() > 0

    def read(self, *, alone: bool = False) -> torch.Tensor:
        """The numbers, wherever they are; `alone` as in `Source`."""
        if self.is_here:
            return self.parameter.data
        assert self.source is not None
        return self.source.read(alone=alone)

    def bring(self, device: torch.device, layout: torch.memory_format) -> None:
        """Put the numbers on the device, in the dtype of the parameter."""
        numbers = self.read()
        if self.storage is not None and not self.is_here:
            numbers = numbers.to(self.storage)
        self.parameter.data = laid(numbers.to(device=device, dtype=self.parameter.dtype), layout)

    def leave(self, device: torch.device) -> None:
        """Take the numbers away, after keeping them in RAM if they are nowhere else."""
        if not self.is_here and self.parameter.device == device:
            return
        if self.source is None:
            self.source = InRam(self.parameter.data.to("cpu"))
        self.empty(device)

    def empty(self, device: torch.device) -> None:
        """Leave the parameter without numbers, but with its dtype and the device."""
        self.parameter.data = torch.empty(0, dtype=self.parameter.dtype, device=device)


def laid(tensor: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """The same numbers in this layout, which only weights of convolutions have."""
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


@dataclass(slots=True, eq=False, kw_only=True)
class Piece:
    """What is lent at a time: the weights of one layer."""

    name: str
    module: torch.nn.Module
    weights: Sequence[Weight]
    is_vocabulary: bool = False

    @property
    def bytes(self) -> int:
        """What it takes on the device while it is lent."""
        return sum(w.parameter.dtype.itemsize * w.count for w in self.weights)


class Lender(Protocol):
    """Brings weights for the time of a call."""

    def lend(self, piece: Piece) -> None:
        """Give the parameters of a piece their numbers."""
        ...

    def take_back(self, piece: Piece) -> None:
        """Leave them empty again."""
        ...

    def close(self) -> None:
        """Let go of what is on the device."""
        ...


class Direct:
    """Brings a piece when it is called. With `keep`, from narrower copies on the device."""

    def __init__(
        self, pieces: Iterable[Piece], device: torch.device, layout: torch.memory_format, *,
        keep: bool,
    ) -> None:  # fmt: skip
        self._pieces = tuple(pieces)
        self._device = device
        self._layout = layout
        if keep:
            for piece in self._pieces:
                for weight in piece.weights:
                    narrow = weight.storage or weight.parameter.dtype
                    weight.shelf = laid(weight.read(alone=True).to(device).to(narrow), layout)

    def lend(self, piece: Piece) -> None:
        """Give the parameters of a piece their numbers."""
        for weight in piece.weights:
            numbers = weight.shelf
            if numbers is None:
                numbers = weight.read(alone=True)
                numbers = numbers if weight.storage is None else numbers.to(weight.storage)
            made = numbers.to(device=self._device, dtype=weight.parameter.dtype)
            weight.parameter.data = laid(made, self._layout)

    def take_back(self, piece: Piece) -> None:
        """Leave them empty again."""
        for weight in piece.weights:
            weight.empty(self._device)

    def close(self) -> None:
        """Let go of what is on the device."""
        for piece in self._pieces:
            for weight in piece.weights:
                weight.shelf = None


class Ring:
    """Two places on the device in turn: the next piece comes while this one computes.

    Places are given once and not asked of the allocator, so that the device's memory stays the
    same however far Python runs ahead of it. What comes next is what came next the last time.
    """

    def __init__(
        self, pieces: Iterable[Piece], device: torch.device, layout: torch.memory_format,
        follows: MutableMapping[Piece, Piece],
    ) -> None:  # fmt: skip
        self._device = device
        self._follows = follows
        size = 0
        for piece in pieces:
            for weight in piece.weights:
                _put_on_shelf(weight, layout)
            size = max(size, sum(_aligned(_of(w).nbytes) for w in piece.weights))
        self._places = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._holds: list[Piece | None] = [None, None]
        self._recent = 1
        self._last: Piece | None = None
        # Without a GPU there are no streams, and copies are made at once.
        self._copying: Any = None
        self._came: list[Any] = [None, None]
        self._free: list[Any] = [None, None]
        if torch.cuda.is_available():
            self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copying.wait_stream(torch.cuda.current_stream(device))

    def lend(self, piece: Piece) -> None:
        """Give the parameters of a piece their numbers, and let the one after it come."""
        at = self._holds.index(piece) if piece in self._holds else self._fetch(piece)
        self._recent = at
        if self._copying is not None:
            torch.cuda.current_stream(self._device).wait_event(self._came[at])
        for weight, there in zip(piece.weights, self._views(piece, at), strict=True):
            weight.parameter.data = there.to(weight.parameter.dtype)
        if self._last is not None:
            self._follows[self._last] = piece
        self._last = piece
        following = self._follows.get(piece)
        if following is not None and following not in self._holds and self._copying is not None:
            self._fetch(following)

    def take_back(self, piece: Piece) -> None:
        """Leave them empty again; their place is free when the device has used it."""
        for weight in piece.weights:
            weight.empty(self._device)
        if self._copying is not None:
            self._free[self._recent] = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        """Let go of the places."""
        if self._copying is not None:
            # What still comes must not be written to what the memory is used for next.
            torch.cuda.current_stream(self._device).wait_stream(self._copying)
        self._places.clear()
        self._holds = [None, None]

    def _fetch(self, piece: Piece) -> int:
        at = 1 - self._recent
        self._holds[at] = piece
        if self._copying is None:
            for weight, there in zip(piece.weights, self._views(piece, at), strict=True):
                there.copy_(_of(weight))
            return at
        with torch.cuda.stream(self._copying):
            if self._free[at] is not None:
                self._copying.wait_event(self._free[at])
            for weight, there in zip(piece.weights, self._views(piece, at), strict=True):
                there.copy_(_of(weight), non_blocking=True)
            self._came[at] = self._copying.record_event()
        return at

    def _views(self, piece: Piece, at: int) -> list[torch.Tensor]:
        """The weights of a piece in one of the places, in their layout."""
        views, start = [], 0
        for weight in piece.weights:
            kept = _of(weight)
            flat = self._places[at].narrow(0, start, kept.nbytes).view(kept.dtype)
            views.append(flat.as_strided(kept.shape, kept.stride(), flat.storage_offset()))
            start += _aligned(kept.nbytes)
        return views


def _of(weight: Weight) -> torch.Tensor:
    assert weight.shelf is not None
    return weight.shelf


def _put_on_shelf(weight: Weight, layout: torch.memory_format) -> None:
    """Keep a copy in RAM that the device can fetch by itself."""
    dtype = weight.storage or weight.parameter.dtype
    if weight.shelf is None or weight.shelf.dtype != dtype:
        kept = laid(weight.read(alone=True).to(dtype), layout)
        weight.shelf = kept.pin_memory() if torch.cuda.is_available() else kept


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
