"""Overlapping tiles: how a picture that is too large for one pass is cut, and put together again.

    read   |<-------- tile -------->|
                        |<-------- tile -------->|
    keep   |<-------------->|<------------------>|
                        |<->|<->|
                  context   context

A tile is read whole and kept without its rim. Where the rim (`context`) is at least as wide as a
network can see, the kept pixels are those of the whole picture in one pass, so there is no seam.
"""

from dataclasses import dataclass
from itertools import pairwise, product


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A tile along one axis, in pixels: it reads [start, stop) and is kept in [keep, keep_stop)."""

    start: int
    stop: int
    keep: int
    keep_stop: int

    def times(self, factor: int) -> "Span":
        """Give the same tile of a picture that is `factor` times as large."""
        return Span(
            start=self.start * factor,
            stop=self.stop * factor,
            keep=self.keep * factor,
            keep_stop=self.keep_stop * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A tile of a picture, along both axes."""

    x: Span
    y: Span


def cut(length: int, *, tile: int, context: int) -> tuple[Span, ...]:
    """Cover [0, length) with the fewest tiles, evenly spread.

    All tiles are `tile` long, since a GPU searches its kernels anew for each shape; only a `length`
    below `tile` is one tile of its own length. What is kept is each pixel once, and at least
    `context` away from the ends of its tile, save where the tile ends with the picture.

    Raises:
        ValueError: if nothing remains of a tile without its context.
    """
    if length < 1 or context < 0 or tile <= 2 * context:
        raise ValueError(
            f"length is {length}, tile {tile}, context {context}; "
            "allowed a length from 1, a context from 0 and a tile of more than twice the context"
        )
    if length <= tile:
        return (Span(start=0, stop=length, keep=0, keep_stop=length),)
    steps = -(-(length - tile) // (tile - 2 * context))
    starts = [step * (length - tile) // steps for step in range(steps + 1)]
    # Neighbours share [next start, start + tile), at least twice the context; they part halfway.
    cuts = [(start + tile + following) // 2 for start, following in pairwise(starts)]
    return tuple(
        Span(start=start, stop=start + tile, keep=keep, keep_stop=keep_stop)
        for start, keep, keep_stop in zip(starts, [0, *cuts], [*cuts, length], strict=True)
    )


def grid(width: int, height: int, *, tile: int, context: int) -> tuple[Tile, ...]:
    """Cover a picture, row by row from the top left, as `cut` covers each axis."""
    rows, columns = (cut(length, tile=tile, context=context) for length in (height, width))
    return tuple(Tile(x=x, y=y) for y, x in product(rows, columns))
