import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdamd.tiles import Span, cut, grid

contexts = st.integers(0, 40)
lengths = st.integers(1, 3000)
rooms = st.integers(1, 500)
unhurried = settings(deadline=None)  # a busy machine is no fault of the code


@unhurried
@given(length=lengths, context=contexts, room=rooms)
def test_the_kept_parts_are_the_whole_length_once_and_in_order(
    length: int, context: int, room: int
) -> None:
    spans = cut(length, tile=2 * context + room, context=context)
    kept = [pixel for span in spans for pixel in range(span.keep, span.keep_stop)]
    assert kept == list(range(length))


@unhurried
@given(length=lengths, context=contexts, room=rooms)
def test_every_tile_is_inside_and_of_one_length(length: int, context: int, room: int) -> None:
    tile = 2 * context + room
    for span in cut(length, tile=tile, context=context):
        assert 0 <= span.start <= span.keep < span.keep_stop <= span.stop <= length
        assert span.stop - span.start == min(tile, length)


@unhurried
@given(length=lengths, context=contexts, room=rooms)
def test_what_is_kept_has_its_context_in_the_tile_or_ends_with_the_picture(
    length: int, context: int, room: int
) -> None:
    for span in cut(length, tile=2 * context + room, context=context):
        assert span.keep - span.start >= context or span.keep == 0
        assert span.stop - span.keep_stop >= context or span.keep_stop == length


@unhurried
@given(length=lengths, context=contexts, room=rooms)
def test_one_tile_fewer_would_not_cover_the_length(length: int, context: int, room: int) -> None:
    count = len(cut(length, tile=2 * context + room, context=context))
    assert count == 1 or (count - 1) * room + 2 * context < length


@unhurried
@given(width=lengths, height=lengths, context=contexts, room=st.integers(100, 500))
def test_a_grid_keeps_every_pixel_once(width: int, height: int, context: int, room: int) -> None:
    tiles = grid(width, height, tile=2 * context + room, context=context)
    corners = {(t.x.keep, t.y.keep) for t in tiles}
    area = sum((t.x.keep_stop - t.x.keep) * (t.y.keep_stop - t.y.keep) for t in tiles)
    assert len(corners) == len(tiles)
    assert area == width * height


@pytest.mark.parametrize(
    ("length", "tile", "context", "expected"),
    [
        pytest.param(5, 8, 2, [(0, 5, 0, 5)], id="shorter than a tile"),
        pytest.param(8, 8, 2, [(0, 8, 0, 8)], id="exactly a tile"),
        pytest.param(9, 8, 2, [(0, 8, 0, 4), (1, 9, 4, 9)], id="a pixel more"),
        pytest.param(12, 8, 2, [(0, 8, 0, 6), (4, 12, 6, 12)], id="two tiles"),
        pytest.param(16, 8, 0, [(0, 8, 0, 8), (8, 16, 8, 16)], id="no context, no overlap"),
    ],
)
def test_cut(
    length: int, tile: int, context: int, expected: list[tuple[int, int, int, int]]
) -> None:
    spans = [Span(start=a, stop=b, keep=c, keep_stop=d) for a, b, c, d in expected]
    assert list(cut(length, tile=tile, context=context)) == spans


def test_a_grid_goes_row_by_row() -> None:
    tiles = grid(9, 12, tile=8, context=2)
    assert [(t.x.start, t.y.start) for t in tiles] == [(0, 0), (1, 0), (0, 4), (1, 4)]


def test_a_tile_has_its_place_in_a_larger_picture() -> None:
    span = Span(start=4, stop=12, keep=6, keep_stop=10)
    assert span.times(3) == Span(start=12, stop=36, keep=18, keep_stop=30)


@pytest.mark.parametrize(
    ("length", "tile", "context"), [(0, 8, 2), (10, 4, 2), (10, 8, -1), (-3, 8, 2)]
)
def test_impossible_tilings_are_refused(length: int, tile: int, context: int) -> None:
    with pytest.raises(ValueError, match=f"length is {length}, tile {tile}, context {context}"):
        cut(length, tile=tile, context=context)
