"""Claims about Karmarkar-Karp: the textbook method's sums, verl's interface, whole partitions."""

import heapq
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import PlanError
from rollout_planner import get_seqlen_balanced_partitions, karmarkar_karp

SumCountMembers = tuple[int, int, tuple[int, ...]]


def textbook_sums(lengths: list[int], k: int, equal_size: bool) -> list[int]:
    """Largest differencing on a heap of k-tuples of (sum, count, members), nothing clever."""

    def priority(state: list[SumCountMembers]) -> tuple[int, int, int, tuple[int, ...]]:
        total, count, members = state[0]
        return state[-1][0] - total, -total, -count, tuple(-i - 1 for i in members)

    items = sorted((length, i) for i, length in enumerate(lengths))
    singles: list[SumCountMembers] = [(length, 1, (i,)) for length, i in items]
    if equal_size:
        states = [sorted(singles[i : i + k], reverse=True) for i in range(0, len(items), k)]
    else:
        states = [[single] + [(0, 0, ())] * (k - 1) for single in singles]
    heap = [(priority(state), state) for state in states]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        pairs = zip(first, reversed(second), strict=True)
        merged = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
        merged.sort(reverse=True)
        heapq.heappush(heap, (priority(merged), merged))
    return sorted(total for total, _, _ in heap[0][1])


LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 2**31 - 1))


@given(st.lists(LENGTHS, min_size=1, max_size=40), st.integers(1, 8))
def test_unequal_sums_are_those_of_the_textbook_method(lengths: list[int], k: int) -> None:
    partitions = karmarkar_karp(lengths, k, equal_size=False)
    sums = sorted(sum(lengths[i] for i in part) for part in partitions)
    assert sums == textbook_sums(lengths, k, equal_size=False)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_equal_sums_are_those_of_the_textbook_method(k: int, p: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(LENGTHS, min_size=k * p, max_size=k * p))
    partitions = karmarkar_karp(lengths, k, equal_size=True)
    sums = sorted(sum(lengths[i] for i in part) for part in partitions)
    assert sums == textbook_sums(lengths, k, equal_size=True)
    assert {len(part) for part in partitions} == {p}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 9))
def test_every_index_is_in_one_ascending_partition(lengths: list[int], k: int) -> None:
    partitions = karmarkar_karp(lengths, k, equal_size=False)
    assert len(partitions) == k
    assert sorted(i for part in partitions for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in partitions)


@pytest.mark.parametrize("equal_size", [True, False])
def test_ties_merge_as_in_the_textbook(equal_size: bool) -> None:
    for lengths in ([5] * 24, [1, 2, 4, 8] * 6, [0] * 12 + [7] * 12):
        sums = [sum(lengths[i] for i in p) for p in karmarkar_karp(lengths, 4, equal_size)]
        assert sorted(sums) == textbook_sums(lengths, 4, equal_size)


@pytest.mark.parametrize(
    "make",
    [
        list,
        np.array,
        torch.tensor,
        lambda v: np.array(v, np.float16),
        lambda v: [torch.tensor(x) for x in v],
    ],
)
def test_lists_arrays_and_tensors_give_the_same_lists(make: Any) -> None:
    lengths = [8, 7, 6, 5, 4, 4]
    partitions = get_seqlen_balanced_partitions(make(lengths), 3, equal_size=True)
    assert partitions == get_seqlen_balanced_partitions(lengths, 3, equal_size=True)
    assert all(type(i) is int for part in partitions for i in part)


def test_fractions_are_summed_exactly() -> None:
    assert karmarkar_karp([0.1, 0.2, 0.3, 0.4], 2, equal_size=False) == [[0, 3], [1, 2]]


def test_squares_of_long_lengths_do_not_overflow() -> None:
    squares = [(2**31 - 1) ** 2, (2**31 - 2) ** 2, 1, 2]
    assert karmarkar_karp(squares, 2, equal_size=True) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("error", [AssertionError, ValueError, PlanError])
def test_impossible_requests_raise_what_verl_callers_expect(error: type[Exception]) -> None:
    with pytest.raises(error, match="2 items cannot fill 3 partitions"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(error, match="3 items do not split into 2"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
    with pytest.raises(error, match="not be negative"):
        karmarkar_karp([1, -2], 2, equal_size=False)
    for odd, said in ((float("nan"), "finite"), (float("inf"), "finite"), (None, "one number")):
        with pytest.raises(error, match=f"{said}.* and number 1 is {odd}"):
            karmarkar_karp([1, odd], 2, equal_size=False)
    with pytest.raises(error, match="at least one set"):
        karmarkar_karp([1, 2], 0, equal_size=False)


def test_more_sets_than_items_stay_empty_only_where_that_is_allowed() -> None:
    assert karmarkar_karp([3, 1], 4, equal_size=False) == [[0], [1], [], []]
    assert karmarkar_karp([], 2, equal_size=False) == [[], []]
