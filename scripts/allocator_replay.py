"""Whether a card of a given size could run a trace of allocations: torch's caching allocator.

A sum of live bytes says what a run needs; torch takes more, since it asks the driver for segments
and cuts blocks out of them. This plays a trace through the same rules.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp, with default settings and one stream.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

GRAIN: Final = 512
"""Every block is a multiple of it (kMinBlockSize)."""
SMALL: Final = 2**20
"""Up to this a request is small, and has its own pool (kSmallSize)."""
SMALL_SEGMENT: Final = 2 * 2**20
"""What the driver is asked for then (kSmallBuffer)."""
LARGE_SEGMENT: Final = 20 * 2**20
"""And for a large request (kLargeBuffer) below `LARGE` bytes."""
LARGE: Final = 10 * 2**20
"""From here on a request gets a segment of its own size (kMinLargeAlloc) ..."""
LARGE_GRAIN: Final = 2 * 2**20
"""... rounded up to this (kRoundLarge)."""


class Allocate(NamedTuple):
    """A tensor of `size` bytes is made; `name` is new."""

    name: int
    size: int


class Free(NamedTuple):
    """Its last use is over."""

    name: int


class EmptyCache(NamedTuple):
    """torch gives back the segments that are free."""


Event = Allocate | Free | EmptyCache


class OutOfMemory(MemoryError):
    """Where torch would say "HIP out of memory"."""


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of a segment; its neighbours are those of the same segment."""

    size: int
    address: int
    small: bool
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = False


class _Pool:
    """Free blocks by size, then address."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, int], _Block] = {}

    def add(self, block: _Block) -> None:
        key = (block.size, block.address)
        insort(self._keys, key)
        self._blocks[key] = block

    def remove(self, block: _Block) -> None:
        key = (block.size, block.address)
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]

    def smallest(self, size: int) -> _Block | None:
        at = bisect_left(self._keys, (size, -1))
        return self._blocks[self._keys[at]] if at < len(self._keys) else None

    def whole(self) -> list[_Block]:
        """Those that are all of their segment."""
        return [b for b in self._blocks.values() if b.before is None and b.after is None]


@dataclass(slots=True)
class Allocator:
    """torch's caching allocator on a card with `capacity` bytes; None is no limit."""

    capacity: int | None = None
    reserved: int = 0
    allocated: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    _small: _Pool = field(default_factory=_Pool)
    _large: _Pool = field(default_factory=_Pool)
    _next: int = 0

    def allocate(self, size: int) -> _Block:
        """Find or make a block.

        Raises:
            OutOfMemory: not even after giving back all that is cached.
        """
        size = max(GRAIN, -(-size // GRAIN) * GRAIN)
        small = size <= SMALL
        pool = self._small if small else self._large
        block = pool.smallest(size)
        if block is None:
            block = self._segment(size, small=small)
        else:
            pool.remove(block)
        remaining = block.size - size
        if remaining >= GRAIN if small else remaining > SMALL:
            rest = _Block(remaining, block.address + size, small, block, block.after, free=True)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            pool.add(rest)
        block.free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        """Put a block back, as one with its free neighbours."""
        pool = self._small if block.small else self._large
        self.allocated -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            pool.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        block.free = True
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment back that is free as a whole."""
        for pool in (self._small, self._large):
            for block in pool.whole():
                pool.remove(block)
                self.reserved -= block.size

    def _segment(self, size: int, *, small: bool) -> _Block:
        asked = segment_bytes(size)
        if self._exceeds(asked):
            self.empty_cache()
            if self._exceeds(asked):
                raise OutOfMemory(
                    f"tried to allocate {asked} bytes; of {self.capacity} are {self.allocated} "
                    f"allocated and {self.reserved} reserved"
                )
        self.reserved += asked
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._next += asked
        return _Block(asked, self._next - asked, small)

    def _exceeds(self, asked: int) -> bool:
        return self.capacity is not None and self.reserved + asked > self.capacity


def segment_bytes(size: int) -> int:
    """What the driver is asked for when no free block of `size` bytes is there."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE:
        return LARGE_SEGMENT
    return -(-size // LARGE_GRAIN) * LARGE_GRAIN


def replay(trace: Iterable[Event], capacity: int | None = None) -> Allocator:
    """Play a trace, and return the allocator at its end.

    Raises:
        OutOfMemory: the card is too small for it.
    """
    allocator = Allocator(capacity)
    blocks: dict[int, _Block] = {}
    for event in trace:
        match event:
            case Allocate(name, size):
                blocks[name] = allocator.allocate(size)
            case Free(name):
                allocator.free(blocks.pop(name))
            case EmptyCache():
                allocator.empty_cache()
    return allocator


def fits(trace: Iterable[Event], capacity: int) -> bool:
    """Whether a card with `capacity` bytes left for torch runs the trace to its end."""
    try:
        replay(trace, capacity)
    except OutOfMemory:
        return False
    return True


def smallest_card(trace: Sequence[Event], *, step: int = 2 * 2**20) -> int:
    """The least capacity with which the trace runs, to within `step` bytes."""
    free = replay(trace)
    low, high = free.most_allocated // step, -(-free.most_reserved // step)
    while low < high:
        middle = (low + high) // 2
        if fits(trace, middle * step):
            high = middle
        else:
            low = middle + 1
    return high * step
