"""Claims about best fit: each item goes where it leaves the least room."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner.split.assign import best_fit
from rollout_planner.types import IntArray


def by_the_book(s: list[int], room: list[int], budget: int) -> tuple[list[int], int]:
    """Room that is left in each bin, ascending, and how many items found none."""
    left, homeless = list(room), 0
    for tokens in s:
        needed = min(tokens, budget)
        fits = [b for b in range(len(left)) if left[b] >= needed]
        if fits:
            left[min(fits, key=left.__getitem__)] -= needed
        else:
            homeless += 1
    return sorted(left), homeless


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 8),
    st.lists(st.integers(0, 20), min_size=1, max_size=12),
)
def test_the_room_left_is_that_of_best_fit(lengths: list[int], times: int, room: list[int]) -> None:
    """Of few of each length, or many."""
    s = sorted(lengths * times, reverse=True)
    budget = max(room)
    expected, homeless = by_the_book(s, room, budget)
    labels = best_fit(np.array(s), np.array(room), budget)
    assert np.count_nonzero(labels < 0) == homeless
    assert left_in(np.array(s), labels, np.array(room), budget).tolist() == expected


def left_in(s: IntArray, labels: IntArray, room: IntArray, budget: int) -> IntArray:
    placed = labels >= 0
    held = np.bincount(labels[placed], weights=np.minimum(s, budget)[placed], minlength=len(room))
    return np.sort(room - held.astype(np.int64))


@pytest.mark.parametrize("times", [1, 5])
def test_an_item_above_the_budget_has_a_bin_to_itself(times: int) -> None:
    labels = best_fit(np.array([25] + [5] * times), np.full(4, 10), 10)
    assert np.count_nonzero(labels == labels[0]) == 1
