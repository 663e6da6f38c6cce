"""Claims about balanced_partition: whole, never above KK or LPT, and clear about what cannot be."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner import (
    Quadratic,
    balanced_partition,
    karmarkar_karp,
)
from rollout_planner.objective import rank_bound
from rollout_planner.split.assign import lpt
from rollout_planner.types import FloatArray, IntArray

#: What may be lost by not looking further.
SLACK = 1 + 1e-5
COSTS = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 2**45))


def largest(costs: Any, parts: list[list[int]]) -> float:
    return max(float(sum(costs[i] for i in part)) for part in parts)


def longest_first(costs: FloatArray, k: int, cap: int) -> list[list[int]]:
    """Longest first onto the least loaded part with room: AReaL's `balanced_greedy_partition`."""
    falling = np.argsort(-costs, kind="stable")
    labels = lpt(costs[falling], k, cap)
    return [falling[labels == part].tolist() for part in range(k)]


@given(st.lists(COSTS, min_size=1, max_size=48), st.integers(1, 8), st.booleans())
def test_every_index_is_in_one_ascending_part_and_none_is_empty(
    costs: list[int], k: int, equal_size: bool
) -> None:
    costs = costs * k if equal_size else costs
    if len(costs) < k:
        with pytest.raises(ValueError, match="use fewer parts"):
            balanced_partition(costs, k, equal_size=equal_size)
        return
    parts = balanced_partition(costs, k, equal_size=equal_size)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part and part == sorted(part) for part in parts)
    assert not equal_size or len({len(part) for part in parts}) == 1
    sums = [sum(costs[i] for i in part) for part in parts]
    assert sums == sorted(sums, reverse=True)


@given(st.lists(COSTS, min_size=1, max_size=12), st.integers(1, 8), st.booleans())
def test_it_is_never_above_kk_or_lpt(costs: list[int], k: int, equal_size: bool) -> None:
    costs = costs * k
    ours = largest(costs, balanced_partition(costs, k, equal_size=equal_size))
    cap = len(costs) // k if equal_size else len(costs)
    for other in (
        karmarkar_karp(costs, k, equal_size),
        longest_first(np.array(costs, float), k, cap),
    ):
        assert ours <= largest(costs, other) * SLACK


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize(("n", "k"), [(512, 8), (1024, 64), (4096, 64)])
def test_of_heavy_tails_it_loses_less_than_a_hundredth_where_that_can_be(
    n: int, k: int, equal_size: bool
) -> None:
    rng = np.random.default_rng(n)
    costs = Quadratic()(np.clip(rng.lognormal(8, 1, n), 1, 65536).astype(np.int64))
    found = largest(costs, balanced_partition(costs, k, equal_size=equal_size))
    assert found <= 1.01 * rank_bound(-np.sort(-costs), k, n // k if equal_size else None)


def test_no_swap_of_any_pair_from_other_starts_finds_a_thousandth_more() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        k, each = int(rng.choice([2, 4, 8])), int(rng.integers(2, 8))
        costs = Quadratic()(rng.lognormal(7, rng.uniform(0.1, 1.5), k * each).astype(np.int64))
        ours = largest(costs, balanced_partition(costs, k, equal_size=True))
        x = -np.sort(-costs)
        for start in (lpt(x, k, each), np.arange(k * each) % k):
            assert ours <= swapped(x, start, k) + 1e-3 * costs.sum() / k


def swapped(x: FloatArray, labels: IntArray, k: int) -> float:
    """The largest sum once no swap of two items lowers that of the part that has it."""
    while True:
        sums = np.bincount(labels, x, k)
        high = int(sums.argmax())
        mine, theirs = np.flatnonzero(labels == high), np.flatnonzero(labels != high)
        less = x[mine, None] - x[theirs]
        after = np.maximum(sums[high] - less, sums[labels[theirs]] + less)
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= sums[high] * (1 - 1e-9):
            return float(sums[high])
        labels[mine[i]], labels[theirs[j]] = labels[theirs[j]], high


@pytest.mark.parametrize("costs", [[0] * 9, [5, 5, 0, 0, 0, 0, 0, 0, 0], [9, 4, 5] + [0] * 6])
def test_what_costs_nothing_is_spread_over_all_parts(costs: list[int]) -> None:
    parts = balanced_partition(costs, 3, equal_size=False)
    assert [len(part) for part in parts] == [3, 3, 3]


def test_one_part_of_nearly_all_items_takes_no_memory_for_what_others_do_not_have() -> None:
    costs = np.concatenate((1e9 + np.arange(999), np.ones(19_001)))
    tracemalloc.start()
    parts = balanced_partition(costs, 1000, equal_size=False)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(map(len, parts)) == [1] * 999 + [19_001]
    assert most < 2**26


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda v: list(torch.tensor(v)),
        lambda v: np.array(v, np.float32),
        lambda v: np.array(v, np.float16),
    ],
)
def test_lists_arrays_and_tensors_are_split_alike(make: Any) -> None:
    assert balanced_partition(make([8, 7, 6, 5, 4]), 2, equal_size=False) == [[2, 3, 4], [0, 1]]
    assert balanced_partition(make([0.5, 0.25, 0.25]), 2, equal_size=False) == [[0], [1, 2]]


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
@pytest.mark.parametrize(
    ("costs", "k", "said"),
    [
        ([], 2, "0 items cannot fill 2 parts"),
        ([1], 2, "1 items cannot fill 2 parts"),
        ([1, 2, 3], 2, "3 items do not split into 2 parts of equal size"),
        ([1, 2], 0, "k is 0; it must be at least 1"),
        ([1, 2], 2.0, "k is 2.0; it must be a whole number"),
        ([1, float("nan")], 2, "costs must be finite, and number 1 is nan"),
        ([float("inf"), 1], 2, "costs must be finite, and number 0 is inf"),
        ([1, -2], 2, "costs must not be negative, and number 1 is -2"),
        ([1, None], 2, "one number a sample, and number 1 is None"),
        ([[1, 2], [3, 4]], 2, "one number a sample, and number 0 is"),
        ([torch.arange(2), torch.arange(3)], 2, r"one number a sample, and number 0 is \[0, 1\]"),
        ([np.arange(2), np.arange(3)], 2, r"one number a sample, and number 0 is \[0, 1\]"),
        ([list(range(9000)), [1]], 2, r"number 0 is \[0, 1, 2, 3, 4, 5, \.\.\.\]"),
        ("ab", 2, "must be a sequence of numbers"),
    ],
)
def test_what_cannot_be_split_is_said_in_one_error(
    costs: Any, k: Any, said: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=said):
        balanced_partition(costs, k, equal_size=True)
