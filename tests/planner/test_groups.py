"""Claims about groups that stay together: on one rank, or in one micro-batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import GroupTooLong, PlanError
from rollout_planner import Quadratic, plan, tokens
from rollout_planner.split.assign import lpt_budget, swap_level
from rollout_planner.split.groups import (
    alike,
    by_differences,
    by_neighbours,
    in_turn,
    layers_of,
)
from rollout_planner.types import (
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    Oversize,
    Plan,
    PlanConfig,
    Strategy,
    Sync,
    straggler_excess,
)
from tests.support.examples import examples
from tests.support.groups import KINDS, cut_by_count, cut_by_tokens, lengths_of, window_of

SHAPES = [(32, 4), (64, 8), (64, 16), (128, 32), (96, 32)]


CASES = [(kind, size, *shape) for kind in KINDS for size in (4, 8, 16) for shape in SHAPES]


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize(("kind", "size", "groups", "dp_size"), CASES)
def test_ranks_of_whole_groups_wait_no_longer_than_by_kk_on_their_sums(
    kind: str, size: int, groups: int, dp_size: int, sync: Sync
) -> None:
    lengths = lengths_of(kind, groups, size)
    config = PlanConfig(
        dp_size=dp_size,
        dispatch_batch_size=lengths.size,
        cost=Quadratic(),
        grouping=Grouping.RANK,
        sync=sync,
        oversize=Oversize.ALONE,
    )
    by_count = plan(window_of(lengths), replace(config, micro_batch_size=4))
    peer = cut_by_count(lengths, dp_size, 4)
    assert by_count.num_micro_batches == peer.shape[1]
    assert by_count.excess <= straggler_excess(peer, sync) + 1e-9
    budget = max(KINDS[kind], int(lengths.max()))
    by_tokens = plan(window_of(lengths), replace(config, micro_batch_tokens=budget))
    packed = cut_by_tokens(lengths, dp_size, budget)
    assert by_tokens.num_micro_batches <= packed.shape[1]
    if by_tokens.num_micro_batches == packed.shape[1]:
        assert by_tokens.excess <= straggler_excess(packed, sync) + 1e-3


RANK = PlanConfig(
    dp_size=2,
    dispatch_batch_size=8,
    cost=tokens,
    micro_batch_size=1,
    grouping=Grouping.RANK,
)
WHOLE = replace(RANK, grouping=Grouping.MICRO_BATCH, micro_batch_size=4)


def groups_of(step: Plan, size: int) -> list[list[set[int]]]:
    """Groups of each micro-batch, where every group has so many neighbours in the window."""
    return [[set((part // size).tolist()) for part in rank] for rank in step.micro_batches]


def test_swaps_of_whole_groups_level_what_greedy_leaves() -> None:
    lengths = np.array([[50, 50], [40, 30], [35, 35], [30, 30], [20, 30]])  # sums 100 70 70 60 50
    step = plan(window_of(lengths), replace(RANK, dispatch_batch_size=10, sync=Sync.STEP))
    # Greedy ends with 160 and 190, equal-count KK with 170 and 180.
    assert sorted(step.cost.sum(axis=1).tolist()) == [170, 180]


def test_micro_steps_of_ranks_that_hold_groups_are_alike() -> None:
    """Two ranks of equal sums may have 9 beside 5, micro-step after micro-step."""
    lengths = np.array([[9, 8], [9, 8], [2, 1], [2, 1]])
    step = plan(window_of(lengths), RANK)
    assert step.cost.tolist() == [[9, 8, 2, 1], [9, 8, 2, 1]]


def test_a_window_holds_a_heavy_group_back() -> None:
    """What rules a rank is a group's sum: none of these samples does on its own."""
    lengths = np.array([[4] * 4, [1] * 4, [1] * 4])
    step = plan(window_of(lengths), replace(RANK, sync=Sync.STEP, micro_batch_size=4))
    assert set((step.chosen // 4).tolist()) == {1, 2}
    assert step.excess == 0


def test_a_lower_bound_knows_that_a_group_is_on_one_rank() -> None:
    lengths = np.array([[4] * 4, [1] * 4])
    step = plan(window_of(lengths), replace(RANK, sync=Sync.STEP))
    assert step.lower_bound == 16


def test_a_micro_batch_takes_as_many_whole_groups_as_fit() -> None:
    lengths = np.array([[5, 5], [4, 4], [3, 3], [2, 2]])
    step = plan(window_of(lengths), WHOLE)
    assert groups_of(step, 2) == [[{0, 3}], [{1, 2}]] or groups_of(step, 2) == [[{1, 2}], [{0, 3}]]
    odd = plan(window_of(lengths), replace(WHOLE, micro_batch_size=3, sync=Sync.MICRO_STEP))
    assert odd.num_micro_batches == 2
    assert [sorted(map(max, rank)) for rank in zip(*groups_of(odd, 2), strict=True)] == [
        [0, 1],
        [2, 3],
    ]


def test_groups_of_different_sizes_share_micro_batches() -> None:
    group = np.array([0] * 4 + [1] * 3 + [2] + [3] * 2 + [-1] * 2)
    window = replace(window_of(np.ones((12, 1), dtype=np.int64)), group=group)
    step = plan(window, replace(WHOLE, dispatch_batch_size=12, dp_size=3))
    assert step.num_micro_batches == 1
    assert sorted(len(part) for rank in step.micro_batches for part in rank) == [4, 4, 4]


def test_padded_groups_of_like_lengths_share_a_micro_batch() -> None:
    lengths = np.array([[9, 1], [2, 2], [8, 8], [2, 1]])
    step = plan(window_of(lengths), replace(WHOLE, layout=Layout.PADDED))
    assert sorted(step.cost.ravel().tolist()) == [8, 36]


def test_a_group_too_large_for_a_micro_batch_is_an_error_that_says_so() -> None:
    lengths = np.full((2, 4), 10)
    with pytest.raises(
        PlanError, match=r"a group has 4 samples and a micro-batch holds 3; .*raise"
    ):
        plan(window_of(lengths), replace(WHOLE, micro_batch_size=3))
    budget = replace(WHOLE, micro_batch_size=None, micro_batch_tokens=39)
    with pytest.raises(GroupTooLong, match=r"a group of 4 samples has 40 tokens.*budget of 39"):
        plan(window_of(lengths), budget)
    assert plan(window_of(lengths), replace(budget, micro_batch_tokens=40)).num_micro_batches == 1
    with pytest.raises(GroupTooLong, match="has 48 tokens"):
        plan(window_of(lengths), replace(budget, micro_batch_tokens=47, sample_length_multiple=12))
    alone = plan(window_of(lengths), replace(budget, oversize=Oversize.ALONE))
    assert sorted(map(len, (part for rank in alone.micro_batches for part in rank))) == [4, 4]


def test_thousands_of_samples_that_are_dealt_as_they_came_keep_to_the_budget() -> None:
    """They were dealt by rounds, as large ones first, though small ones may come first."""
    lengths = np.random.default_rng(0).integers(1, 1000, (1600, 2))
    config = replace(RANK, dp_size=1, micro_batch_size=None, micro_batch_tokens=20_000)
    config = replace(config, strategy=Strategy.ROUND_ROBIN, dispatch_batch_size=3200)
    window = window_of(lengths)
    fewest = plan(window, config).num_micro_batches
    step = plan(window, replace(config, min_micro_batches=fewest + 1))
    assert step.num_micro_batches == fewest + 1
    assert max(int(window.tokens[part].sum()) for part in step.micro_batches[0]) <= 20_000


# -- the parts ------------------------------------------------------------------------------

LOADS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=24)


@examples(200)
@given(LOADS, st.integers(1, 5), st.integers(0, 20))
def test_swaps_after_every_way_to_share_groups_out_keep_to_the_cap(
    groups: list[tuple[int, int]], dp_size: int, spare: int
) -> None:
    groups.sort(reverse=True)
    load, weight = (np.array(column) for column in zip(*groups, strict=True))
    cap = max(-(-int(weight.sum()) // dp_size) + spare, int(weight.max()))
    costs = load.astype(np.float64)
    for share in (lpt_budget, by_neighbours, by_differences, in_turn):
        way = share(costs, weight, dp_size, cap)
        if way is None or np.bincount(way, weights=weight).max() > cap:
            continue
        for each in (way, alike(way, costs[:, None], weight, dp_size, cap)):
            assert len(each) == len(load)
            assert set(each.tolist()) <= set(range(dp_size))
            assert np.bincount(each, weights=weight).max() <= cap


@examples(200)
@given(LOADS, st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_ranks_become_alike_within_the_cap_and_never_less_so(
    groups: list[tuple[int, int]], dp_size: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    size = np.array([count for _, count in groups])
    group = np.repeat(np.arange(len(groups)), size)
    cost = generator.integers(1, 100, len(group)).astype(np.float64)
    before = generator.integers(0, dp_size, len(groups))
    cap = int(np.bincount(before, weights=size).max())
    layers = layers_of(cost, group)
    assert layers.sum(axis=1) == pytest.approx(np.bincount(group, weights=cost))
    after = alike(before, layers, size, dp_size, cap)

    def measure(way: IntArray) -> float:
        return float(max_of([layers[way == r].sum(axis=0) for r in range(dp_size)]).sum())

    assert np.bincount(after, weights=size).max() <= cap
    assert measure(after) <= measure(before) * (1 + 1e-9)


def max_of(rows: list[FloatArray]) -> FloatArray:
    found: FloatArray = np.array(rows).max(axis=0)
    return found


def test_bins_that_should_cost_less_count_as_loaded() -> None:
    x, s = np.array([9.0, 2, 1]), np.array([1, 1, 1])
    labels = lpt_budget(x, s, 2, 3, start=np.array([0.0, 6]))
    assert labels is not None
    assert labels.tolist() == [0, 1, 1]
    ids = np.array([[[0, 1, 3], [2, 3, 3]]])
    swap_level(ids, np.array([9.0, 2, 1, 0]), np.array([1, 1, 1, 0]), 3, base=np.array([[0.0, 6]]))
    assert sorted(ids[0, 1].tolist()) == [1, 2, 3]
