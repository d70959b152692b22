"""The rules of torch's caching allocator, as `scripts.allocator_replay` plays them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.allocator_replay import (
    GRAIN,
    Allocate,
    EmptyCache,
    Event,
    Free,
    OutOfMemory,
    fits,
    replay,
    segment_bytes,
    smallest_card,
)

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_the_driver_is_asked_for_segments(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment
    assert replay([Allocate(1, size)]).reserved == segment


@pytest.mark.parametrize(("size", "taken"), [(0, 512), (1, 512), (512, 512), (513, 1024)])
def test_blocks_are_multiples_of_512_bytes(size: int, taken: int) -> None:
    assert replay([Allocate(1, size)]).allocated == taken


def test_small_requests_share_a_segment() -> None:
    four = [Allocate(number, 512 * KIB) for number in range(4)]
    assert replay(four).reserved == 2 * MIB
    assert replay([*four, Allocate(5, 1)]).reserved == 4 * MIB


def test_small_and_large_requests_never_share_one() -> None:
    freed: list[Event] = [Allocate(1, 10 * MIB), Free(1), Allocate(2, MIB)]
    assert replay(freed).reserved == 12 * MIB


def test_a_large_block_is_not_cut_for_a_rest_of_at_most_a_mebibyte() -> None:
    assert replay([Allocate(1, 20 * MIB), Free(1), Allocate(2, 19 * MIB)]).allocated == 20 * MIB
    cut: list[Event] = [Allocate(1, 20 * MIB), Free(1), Allocate(2, 19 * MIB - 512)]
    assert replay(cut).allocated == 19 * MIB - 512


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    blocks: list[Event] = [Allocate(1, 40 * MIB), Allocate(2, 20 * MIB), Free(1), Free(2)]
    after = replay([*blocks, Allocate(3, 20 * MIB), Allocate(4, 40 * MIB)])
    assert after.reserved == 60 * MIB


def test_free_neighbours_become_one_again() -> None:
    thirds: list[Event] = [Allocate(0, 30 * MIB), Free(0)]
    thirds += [Allocate(number, 10 * MIB) for number in (1, 2, 3)]
    for order in ((1, 2, 3), (2, 1, 3), (3, 1, 2), (1, 3, 2)):
        after = replay([*thirds, *(Free(number) for number in order), Allocate(4, 30 * MIB)])
        assert after.reserved == 30 * MIB


def test_a_freed_block_between_others_serves_nothing_larger() -> None:
    """What fragmentation is: 20 MiB are free, and 20 MiB do not fit."""
    halves: list[Event] = [Allocate(number, 10 * MIB) for number in range(4)]
    between = [*halves, Free(1), Free(3), Allocate(5, 20 * MIB)]
    assert replay(between, 50 * MIB).reserved == 40 * MIB  # both were whole: given back
    one: list[Event] = [
        Allocate(0, 40 * MIB),
        Free(0),
        *(Allocate(n, 10 * MIB) for n in (1, 2, 3, 4)),
    ]
    with pytest.raises(OutOfMemory, match=r"tried to allocate 20971520 bytes; of 41943040 "):
        replay([*one, Free(1), Free(3), Allocate(5, 20 * MIB)], 40 * MIB)


def test_what_is_cached_is_given_back_before_it_fails() -> None:
    trace: list[Event] = [Allocate(1, 20 * MIB), Free(1), Allocate(2, 30 * MIB)]
    assert replay(trace, 30 * MIB).reserved == 30 * MIB
    assert replay(trace, 50 * MIB).reserved == 50 * MIB
    assert not fits(trace, 29 * MIB)


def test_an_emptied_cache_keeps_what_is_in_use() -> None:
    trace: list[Event] = [Allocate(1, 20 * MIB), Allocate(2, 20 * MIB), Free(1), EmptyCache()]
    assert replay(trace).reserved == 20 * MIB


def traces() -> st.SearchStrategy[list[Event]]:
    def made(seed: int) -> list[Event]:
        drawn = random.Random(seed)
        alive: list[int] = []
        trace: list[Event] = []
        for name in range(200):
            trace.append(Allocate(name, round(2 ** drawn.uniform(6, 26))))
            alive.append(name)
            while alive and drawn.random() < 0.45:
                trace.append(Free(alive.pop(drawn.randrange(len(alive)))))
        return [*trace, *map(Free, alive)]

    return st.integers(0, 2**32).map(made)


@given(traces())
def test_whatever_the_order_all_comes_back_as_whole_segments(trace: list[Event]) -> None:
    after = replay([*trace, EmptyCache()])
    assert (after.allocated, after.reserved) == (0, 0)


@given(traces())
def test_a_card_of_the_smallest_size_runs_and_one_step_less_does_not(trace: list[Event]) -> None:
    least = smallest_card(trace, step=2 * MIB)
    live = most = 0
    sizes: dict[int, int] = {}
    for event in trace:
        if isinstance(event, Allocate):
            sizes[event.name] = -(-event.size // GRAIN) * GRAIN
            live += sizes[event.name]
        elif isinstance(event, Free):
            live -= sizes[event.name]
        most = max(most, live)
    assert fits(trace, least)
    assert not fits(trace, least - 2 * MIB)
    assert most <= least


@given(traces())
def test_what_is_reserved_lies_between_what_is_used_and_what_there_is(trace: list[Event]) -> None:
    # A little more memory may let the allocator keep blocks that fit nothing later, and fail; so
    # nothing is said of cards that are larger than the smallest.
    least = smallest_card(trace)
    cards = [least, *(c for n in (1, 2) if fits(trace, c := least + n * 64 * MIB))]
    for card in cards:
        done = replay(trace, card)
        assert done.most_allocated <= done.most_reserved <= card
