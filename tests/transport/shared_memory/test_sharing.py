"""Sharing: which spans of a micro-batch go as descriptors, and that these are where they lie."""

import os
from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.transport.shared_memory.segments import Segment, write_segment
from rollout_dispatcher.transport.shared_memory.sharing import (
    LEAST_BYTES,
    LEAST_BYTES_EACH,
    share,
)

MOST = 64


def spans_of(sizes: Sequence[int]) -> list[memoryview]:
    """Spans of one segment."""
    content = [os.urandom(size) for size in sizes]
    return Segment.received(write_segment(content), sum(sizes)).cut(sizes)


def in_memory(nbytes: int) -> memoryview:
    return memoryview(bytes(nbytes))


@given(
    lots=st.lists(
        st.lists(st.integers(1, LEAST_BYTES // 16).map(lambda n: 8 * n), min_size=1, max_size=8),
        min_size=1,
        max_size=6,
    ),
    most=st.integers(0, 6),
    chance=st.randoms(),
)
def test_what_is_shared_is_found_where_it_is_said_to_be(
    lots: list[list[int]], most: int, chance: Random
) -> None:
    spans = [span for sizes in lots for span in spans_of(sizes)] + [in_memory(4096)]
    chance.shuffle(spans)
    found = share(spans, most)
    if found is None:
        return
    (sizes, places, _), descriptors = found.shared, found.descriptors
    assert len(sizes) == len(descriptors) <= most
    by_segment = dict.fromkeys(range(len(sizes)), 0)
    for span, place in zip(spans, places, strict=True):
        if place is not None:
            index, offset = place
            assert os.pread(descriptors[index], len(span), offset) == span
            assert offset + len(span) <= sizes[index]
            by_segment[index] += len(span)
    assert min(by_segment.values()) >= LEAST_BYTES_EACH
    assert sum(by_segment.values()) >= LEAST_BYTES


def test_what_lies_in_no_segment_is_sent() -> None:
    assert share([in_memory(LEAST_BYTES)], MOST) is None


def test_little_is_sent() -> None:
    assert share(spans_of([LEAST_BYTES - 8]), MOST) is None
    assert share(spans_of([LEAST_BYTES]), MOST) is not None


def test_few_bytes_of_a_segment_are_sent_beside_what_is_shared() -> None:
    [small], [large] = spans_of([LEAST_BYTES_EACH - 8]), spans_of([LEAST_BYTES])
    found = share([small, large], MOST)
    assert found is not None
    assert found.shared.places == [None, (0, 0)]


def test_of_too_many_segments_those_with_the_most_are_shared() -> None:
    spans = [span for size in (1, 3, 2) for span in spans_of([size * LEAST_BYTES])]
    found = share(spans, 2)
    assert found is not None
    assert [place is not None for place in found.shared.places] == [False, True, True]
    assert share(spans, 0) is None


def test_an_empty_span_lies_nowhere() -> None:
    spans = spans_of([LEAST_BYTES, 0])
    found = share(spans, MOST)
    assert found is not None
    assert found.shared.places == [(0, 0), None]


def test_what_the_rank_has_kept_is_not_sent_again() -> None:
    first, second, third = (spans_of([LEAST_BYTES] * 2) for _ in range(3))
    before = share([first[0], second[0]], MOST)
    assert before is not None
    found = share([third[0], second[1]], MOST, before.numbers)
    assert found is not None
    assert found.shared.sizes == [2 * LEAST_BYTES]  # the third's alone
    assert found.shared.places == [(2, 0), (1, LEAST_BYTES)]
    [descriptor] = found.descriptors
    assert os.pread(descriptor, LEAST_BYTES, 0) == third[0]
    again = share([first[1], third[1]], 0, found.numbers)
    assert again is not None
    assert (again.shared.sizes, again.descriptors) == ([], [])
    assert again.shared.places == [(0, LEAST_BYTES), (2, LEAST_BYTES)]


def test_of_what_the_rank_has_kept_few_bytes_are_shared_too() -> None:
    [large, small] = spans_of([LEAST_BYTES, 8])
    before = share([large], MOST)
    assert before is not None
    [other] = spans_of([LEAST_BYTES])
    found = share([small, other], MOST, before.numbers)
    assert found is not None
    assert found.shared.places == [(0, LEAST_BYTES), (1, 0)]
