"""Claims about pack: within the budget, no more bins than anybody's fit, and as even as can be."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import SampleTooLong
from rollout_planner import Quadratic, karmarkar_karp, pack, tokens

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


def first_fit(lengths: list[int], budget: int) -> int:
    """Bins that a plain first fit needs."""
    room: list[int] = []
    for length in lengths:
        b = next((b for b, left in enumerate(room) if length <= left), len(room))
        room[b : b + 1] = [(room[b] if b < len(room) else budget) - length]
    return len(room)


@given(LENGTHS, st.integers(100, 400), st.integers(1, 4), st.integers(0, 9))
def test_bins_keep_to_the_budget_and_to_the_count_that_is_asked_for(
    lengths: list[int], budget: int, multiple: int, minimum: int
) -> None:
    bins = pack(lengths, budget, multiple=multiple, minimum=minimum)
    assert sorted(i for part in bins for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= budget for part in bins)
    assert len(bins) >= minimum
    assert len(bins) % multiple == 0
    assert sum(1 for part in bins if part) == min(len(bins), len(lengths))


@given(LENGTHS, st.integers(100, 400), st.integers(0, 3), st.integers(1, 3))
def test_no_more_bins_come_than_are_asked_for_if_these_are_enough(
    lengths: list[int], budget: int, more: int, multiple: int
) -> None:
    asked = len(pack(lengths, budget)) + more
    bins = pack(lengths, budget, minimum=asked, multiple=multiple)
    assert len(bins) == -(-asked // multiple) * multiple


@given(LENGTHS, st.integers(100, 400))
def test_no_plain_fit_needs_fewer_bins(lengths: list[int], budget: int) -> None:
    found = len(pack(lengths, budget))
    assert found <= first_fit(lengths, budget)
    assert found <= first_fit(sorted(lengths, reverse=True), budget)


def test_a_differencing_that_needs_fewer_bins_than_any_fit_is_found() -> None:
    lengths, budget = [6, 5, 4, 3, 3, 3], 12
    assert first_fit(lengths, budget) == 3
    parts = karmarkar_karp(lengths, 2, equal_size=False)
    assert [sum(lengths[i] for i in part) for part in parts] == [12, 12]
    assert len(pack(lengths, budget)) == 2


def test_bins_are_even_in_cost_and_the_dearest_comes_first() -> None:
    lengths = np.clip(np.random.default_rng(3).lognormal(8, 1, 256), 1, 40_000).astype(np.int64)
    bins = pack(lengths, 80_000, cost=tokens)
    held = [int(lengths[part].sum()) for part in bins]
    assert held == sorted(held, reverse=True)
    assert len(bins) == -(-int(lengths.sum()) // 80_000)
    assert max(held) <= 1.01 * np.mean(held)


def test_two_samples_for_one_make_nearly_full_bins_more_even() -> None:
    """Levelling by single samples stops at 47 38 as the dearest, which is 1.41 of an even share."""
    lengths = np.array([32, 31, 15, 24, 37, 6, 7, 23, 47, 11, 38, 38, 16, 11])
    bins = pack(lengths, 85, cost=Quadratic(1, 0))
    assert len(bins) == 4
    assert max(lengths[each].sum() for each in bins) <= 85
    dearest = max((lengths[each] ** 2).sum() for each in bins)
    assert dearest / ((lengths**2).sum() / 4) < 1.05


def test_small_bins_are_at_both_ends_where_that_is_asked_for() -> None:
    bins = pack([9, 8, 7, 6, 5], 9, order="ends-small")
    assert bins == [[4], [2], [0], [1], [3]]


@given(LENGTHS, st.integers(1, 5))
def test_groups_share_a_bin(lengths: list[int], size: int) -> None:
    groups = [f"p{at // size}" for at in range(len(lengths))]
    bins = pack(lengths, 500, groups=groups)
    homes: dict[str, set[int]] = {}
    for number, part in enumerate(bins):
        assert sum(lengths[i] for i in part) <= 500
        for i in part:
            homes.setdefault(groups[i], set()).add(number)
    assert all(len(home) == 1 for home in homes.values())


def test_a_sample_without_a_name_is_in_no_group() -> None:
    assert pack([6, 6, 6, 6], 12, groups=["a", None, "a", None]) == [[0, 2], [1, 3]]
    assert len(pack([6, 6, 6], 6, groups=[None] * 3)) == 3


def test_a_sample_counts_as_many_tokens_as_it_is_padded_to() -> None:
    assert len(pack([5, 5, 5, 5], 20)) == 1
    assert len(pack([5, 5, 5, 5], 20, pad_to=8)) == 2


def test_what_is_above_the_budget_is_an_error_or_goes_alone() -> None:
    with pytest.raises(SampleTooLong, match=r"a sample of 15 tokens .* it is number 1: raise"):
        pack([3, 15, 3], 10)
    assert pack([3, 15, 3], 10, oversize="alone") == [[1], [0, 2]]
    assert pack([0, 15], 10, oversize="alone") == [[1], [0]]
    with pytest.raises(ValueError, match=r"2 samples has 12 tokens.* it is that of number 0"):
        pack([6, 1, 6], 10, groups=["a", "b", "a"])
    assert pack([6, 1, 6], 10, groups=["a", "b", "a"], oversize="alone") == [[0, 2], [1]]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_lists_arrays_and_tensors_are_packed_alike(make: Any) -> None:
    assert pack(make([9, 2, 6, 4, 5]), 10) == [[0], [3, 4], [1, 2]]


def test_a_budget_that_nobody_can_fill_is_none() -> None:
    assert pack([9, 2, 6], sys.maxsize, minimum=2) == pack([9, 2, 6], 1000, minimum=2)
    assert pack([9, 2, 6], sys.maxsize, groups="aba") == [[0, 1, 2]]


VALID: dict[str, Any] = {"lengths": [3, 4], "budget": 10}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0}, "budget is 0; it must be at least 1"),
        ({"budget": 10.0}, "budget is 10.0; it must be a whole number"),
        ({"budget": 2**63}, "budget is 9223372036854775808; it must be at most"),
        ({"multiple": None}, "multiple is None; it must be a whole number"),
        ({"multiple": 0}, "multiple is 0"),
        ({"minimum": -1}, "minimum is -1"),
        ({"minimum": 3, "fillers": False}, "2 samples or groups cannot fill 3 bins"),
        ({"multiple": 4, "groups": "aa", "fillers": False}, "1 samples or groups cannot fill 4"),
        ({"order": "sorted"}, "order is 'sorted'; use 'peak-first' or 'ends-small'"),
        ({"oversize": "drop"}, "oversize is 'drop'; use 'error' or 'alone'"),
        ({"groups": 5}, "groups must be one hashable name a sample"),
        ({"groups": [[1], [2]]}, "groups must be one hashable name a sample"),
        ({"cost": 3}, "cost is 3; it must be a function of lengths"),
        ({"groups": ["a"]}, "1 groups for 2 lengths"),
        ({"cost": "cubic"}, "unknown cost model 'cubic'"),
        ({"lengths": [1, 2.5]}, "must be whole numbers, and number 1 is 2.5"),
        ({"lengths": [1, float("nan")]}, "must be finite, and number 1 is nan"),
        ({"lengths": [1, -1]}, "must not be negative"),
        ({"lengths": [1, 2**60]}, "must be at most"),
        ({"pad_to": 2**60}, "pad_to is 1152921504606846976; it must be at most"),
        ({"minimum": 10**9}, "make 1000000000 micro-batches of 2 samples, .* at most 65536"),
        ({"multiple": 10**9}, "make 1000000000 micro-batches of 2 samples, .* at most 65536"),
    ],
)
def test_what_cannot_be_packed_is_said_in_one_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pack(**VALID | options)
