"""Claims about token budgets: few micro-batches, even ranks, no fillers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner.objective import rank_bound
from rollout_planner.planner import plan
from rollout_planner.split.packing import pack, pack_ranks
from rollout_planner.split.parts import Batch, Parts, without_fillers
from rollout_planner.types import (
    FloatArray,
    Grouping,
    IntArray,
    Oversize,
    PlanConfig,
    Sync,
    Window,
    round_up,
)
from tests.support.examples import examples


def squares(tokens: IntArray) -> FloatArray:
    return tokens.astype(np.float64) ** 2


def falling(lengths: list[int]) -> IntArray:
    return np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()


def best_fit(lengths: list[int], budget: int) -> int:
    """Bins that best fit opens, as anybody would write it."""
    rooms: list[int] = []
    for tokens in lengths:
        fitting = [b for b, room in enumerate(rooms) if room >= tokens]
        if fitting:
            rooms[min(fitting, key=lambda b: rooms[b])] -= tokens
        else:
            rooms.append(max(budget - tokens, 0))
    return len(rooms)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int]:
    budget = draw(st.integers(1, 200))
    lengths = draw(st.lists(st.integers(1, budget + budget // 8), min_size=1, max_size=60))
    return lengths, budget


@examples(300)
@given(batches(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_there_are_no_more_micro_batches_than_best_fit_needs(
    batch: tuple[list[int], int], ranks: int, multiple: int, minimum: int
) -> None:
    lengths, budget = batch
    s = falling(lengths)
    bins = best_fit(s.tolist(), budget)
    most = round_up(max(-(-bins // ranks), minimum), multiple)

    def allowed(needed: int) -> int:
        return round_up(max(needed, minimum), multiple)

    for way in (pack, pack_ranks):
        labels, M = way(squares(s), s, ranks, budget, allowed)
        assert minimum <= M <= most
        assert M % multiple == 0
        counts = np.bincount(labels)
        assert len(counts) <= ranks * M
        assert ((np.bincount(labels, weights=s) <= budget) | (counts <= 1)).all()


def test_tight_bins_are_as_few_as_best_fit_finds_however_many_samples_there_are() -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        s = falling(np.clip(rng.lognormal(7, 1, 4096), 1, 14336).astype(int).tolist())
        budget = -(-int(s.sum()) // (8 * 48)) + 40  # 99.4 to 99.8 % full
        for way in (pack, pack_ranks):
            assert way(squares(s), s, 8, budget)[1] <= -(-best_fit(s.tolist(), budget) // 8)


def planned(
    lengths: list[int], dp_size: int, budget: int, sync: Sync, **more: Any
) -> list[list[int]]:
    """Lengths of each micro-batch, rank after rank."""
    n = len(lengths)
    config = PlanConfig(
        dp_size=dp_size,
        dispatch_batch_size=n,
        cost=squares,
        micro_batch_tokens=budget,
        sync=sync,
        grouping=Grouping.IGNORE,
        oversize=Oversize.ALONE,
        **more,
    )
    zeros = np.zeros(n, dtype=np.int64)
    step = plan(Window(np.array(lengths), zeros, zeros - 1, zeros > 0), config)
    return [[lengths[i] for i in part] for rank in step.micro_batches for part in rank]


def test_ranks_that_meet_once_a_step_share_the_work_under_their_budgets() -> None:
    parts = planned([1, 3, 6, 5, 5, 2, 10], 2, 10, Sync.STEP)
    assert len(parts) == 4
    work = [sum(length**2 for part in rank for length in part) for rank in (parts[:2], parts[2:])]
    assert sorted(work) == [96, 104]


@pytest.mark.parametrize(("n", "ranks"), [(1024, 64), (2048, 32)])
@pytest.mark.parametrize("budget", [65536, 90000, 131072])
def test_tight_budgets_leave_ranks_that_meet_once_a_step_even(
    n: int, ranks: int, budget: int
) -> None:
    lengths = np.random.default_rng(3).lognormal(np.log(8192), 0.8, n)
    s = falling(np.clip(lengths, 16, 65536).astype(int).tolist())
    x = squares(s) + 24576 * s
    labels, M = pack_ranks(x, s, ranks, budget)
    assert np.bincount(labels, weights=s).max() <= budget
    assert np.bincount(labels // M, weights=x).max() <= rank_bound(x, ranks) * 1.001


@pytest.mark.parametrize("sync", Sync)
def test_a_multiple_splits_micro_batches_instead_of_leaving_some_empty(sync: Sync) -> None:
    lengths = [100, 20, 20, 20, 20, 10, 5, 5]
    parts = planned(lengths, 2, 128, sync, micro_batch_multiple=4)
    assert [len(part) for part in parts] == [1] * 8
    giant = [4000] + [100 + i for i in range(63)]
    parts = planned(giant, 4, 8192, sync, micro_batch_multiple=4)
    assert len(parts) == 16
    assert all(parts)


@pytest.mark.parametrize("sync", Sync)
def test_a_minimum_spreads_samples_over_so_many_micro_batches(sync: Sync) -> None:
    lengths = np.random.default_rng(0).integers(90, 110, 64).tolist()
    parts = planned(lengths, 4, 8192, sync, min_micro_batches=3, micro_batch_multiple=2)
    tokens = [sum(part) for part in parts]
    assert len(parts) == 16
    assert max(tokens) <= 1.1 * min(tokens)
    fewer = planned(lengths[:6], 4, 8192, sync, min_micro_batches=3)
    assert sorted(len(part) for part in fewer) == [0] * 6 + [1] * 6


def filled(cost: FloatArray, counts: IntArray, group: IntArray | None = None) -> Parts:
    n = len(cost)
    batch = Batch(cost, np.ones(n, dtype=np.int64), group, np.argsort(-cost, kind="stable"))
    return without_fillers(batch, Parts(np.arange(n), counts))


def test_an_empty_micro_batch_gets_the_cheapest_sample() -> None:
    parts = filled(np.array([9.0, 4, 3, 1]), np.array([[1, 3, 0]]))
    assert (parts.sequence.tolist(), parts.counts.tolist()) == ([0, 1, 2, 3], [[1, 2, 1]])


def test_a_rank_with_few_samples_gets_the_cheapest_of_others_if_they_may_change_ranks() -> None:
    cost, counts = np.array([9.0, 4, 3, 1]), np.array([[1, 0], [2, 1]])
    parts = filled(cost, counts)
    assert parts.counts.tolist() == [[1, 1], [1, 1]]
    assert parts.sequence[:2].tolist() == [0, 3]
    parts = filled(cost, counts, np.array([0, 1, 1, 1]))
    assert (parts.sequence.tolist(), parts.counts.tolist()) == ([0, 1, 2, 3], [[1, 0], [2, 1]])


def test_ranks_that_lack_nothing_stay_as_they_are() -> None:
    cost = np.array([1.0, 9, 2, 8, 3, 7, 4, 6])
    parts = filled(cost, np.array([[2, 1], [0, 3], [1, 1]]))
    assert parts.counts.sum(axis=1).tolist() == [3, 3, 2]
    assert parts.counts[[0, 2]].tolist() == [[2, 1], [1, 1]]
    assert parts.sequence[[0, 1, 2, 6, 7]].tolist() == [0, 1, 2, 6, 7]
    assert sorted(parts.sequence[3:6].tolist()) == [3, 4, 5]


@given(st.lists(st.integers(0, 4), min_size=12, max_size=12), st.integers(1, 4))
def test_filling_keeps_every_sample_and_no_micro_batch_gains_but_empty_ones(
    sizes: list[int], ranks: int
) -> None:
    before = np.array(sizes).reshape(ranks, -1)
    n = int(before.sum())
    cost = np.random.default_rng(n).integers(0, 50, n).astype(np.float64)
    parts = filled(cost, before)
    assert sorted(parts.sequence.tolist()) == list(range(n))
    assert parts.counts.shape == before.shape
    assert (parts.counts <= np.maximum(before, 1)).all()
    assert n == 0 or parts.counts.min() > 0 or parts.counts.max() <= 1
