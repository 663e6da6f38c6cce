"""Claims about partitions, packings and bounds on their own: permutations, caps, lower bounds."""

from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner.objective import column_bound, packed_time, rank_bound
from rollout_planner.split.assign import (
    best_fit,
    bins_onto_ranks,
    fill_sets,
    first_fit,
    levels,
    lpt,
    lpt_budget,
    spread_columns,
    swap_level,
)
from rollout_planner.split.groups import run_of_each
from rollout_planner.split.packing import fewest_micro_batches, pack, pack_by_count
from rollout_planner.types import FloatArray, IntArray, round_up

COSTS = st.one_of(
    st.integers(0, 3),
    st.integers(0, 1000),
    st.sampled_from([2**i for i in range(32)]),
)


def falling(values: list[int]) -> FloatArray:
    return np.sort(np.array(values, dtype=np.float64))[::-1].copy()


@st.composite
def full_batches(draw: st.DrawFn) -> tuple[FloatArray, int, int, int]:
    R, M, m = draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)))
    values = draw(st.lists(COSTS, min_size=R * M * m, max_size=R * M * m))
    return falling(values), R, M, m


def ranks_of(x: FloatArray, ranks: int, each: int) -> FloatArray:
    """What each rank has of micro-batches of these costs."""
    places = bins_onto_ranks(x, ranks, each)
    return np.bincount(places // each, weights=x, minlength=ranks).astype(np.float64)


@given(full_batches())
def test_bins_on_ranks_are_no_worse_than_greedy(batch: tuple[FloatArray, int, int, int]) -> None:
    x, R, M, m = batch
    assert sorted(bins_onto_ranks(x, R, M * m).tolist()) == list(range(len(x)))
    greedy = np.bincount(lpt(x, R, M * m), weights=x, minlength=R).max()
    largest = ranks_of(x, R, M * m).max()
    assert rank_bound(x, R, M * m) * (1 - 1e-12) <= largest <= greedy * (1 + 1e-12)


@given(full_batches())
def test_columns_of_equal_counts_are_full_and_above_their_bound(
    batch: tuple[FloatArray, int, int, int],
) -> None:
    x, R, M, m = batch
    labels = pack_by_count(x, R, M, m)
    assert np.bincount(labels, minlength=R * M).tolist() == [m] * (R * M)
    load = np.bincount(labels, weights=x, minlength=R * M).reshape(M, R)
    time = float(load.max(axis=1).sum())
    assert time >= column_bound(x, R, m) * (1 - 1e-12)
    if m == 1:
        assert time == pytest.approx(x[::R].sum())


def test_the_step_bound_is_met_exactly_where_every_split_can_be_tried() -> None:
    generator = np.random.default_rng(7)
    for _ in range(20):
        x = falling(generator.integers(0, 30, 6).tolist())
        best = min(
            max(x[[i for i in range(6) if label[i] == r]].sum() for r in range(2))
            for label in product(range(2), repeat=6)
            if sum(label) == 3
        )
        bound = rank_bound(x, 2, 3)
        reached = ranks_of(x, 2, 3).max()
        assert bound <= best <= reached
        assert reached <= best * 1.05 + 1


def test_a_crowd_of_large_samples_shares_the_smallest_company_there_is() -> None:
    assert rank_bound(np.array([10.0, 9, 4, 4, 4, 1]), 3, 2) == 12  # 10 and 9, with 4 and 1
    generator = np.random.default_rng(8)
    for _ in range(40):
        x = falling(
            np.concatenate((generator.integers(0, 9, 4), generator.integers(0, 30, 2))).tolist()
        )
        best = min(
            max(x[[i for i in range(6) if label[i] == r]].sum() for r in range(3))
            for label in product(range(3), repeat=6)
            if all(label.count(r) == 2 for r in range(3))
        )
        assert rank_bound(x, 3, 2) <= best


def test_a_heavy_tail_is_split_where_equal_size_kk_is_far_off() -> None:
    x = falling(np.random.default_rng(3).lognormal(8, 1, 256).astype(int).tolist())
    ranks = ranks_of(x, 16, 16)
    assert ranks.max() <= rank_bound(x, 16, 16) * 1.001


def test_a_rank_that_needs_the_smallest_company_gets_it() -> None:
    for seed in (1, 7):  # in both, three samples with the lightest company exceed the mean rank
        lengths = np.random.default_rng(seed).lognormal(8.85, 0.8, 256).clip(0, 40000)
        lengths[:3] = 60000, 61000, 62000
        x = falling((lengths**2 + 24576 * lengths).tolist())
        ranks = ranks_of(x, 16, 16)
        assert ranks.max() <= rank_bound(x, 16, 16) * 1.02


def test_levels_cover_the_largest_item_of_each_column_and_the_total() -> None:
    assert levels(np.array([10.0, 4, 4, 2]), R=2, M=2).tolist() == [10, 4]
    assert levels(np.array([3.0, 3, 3, 3]), R=2, M=2).tolist() == [3, 3]
    assert levels(np.array([5.0]), R=2, M=2).tolist() == [5, 0]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_swaps_keep_every_item_and_never_raise_the_largest_load(
    bins: int, slots: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    x = generator.integers(0, 50, 2 * bins * slots).astype(np.float64)
    ids = generator.permutation(len(x)).reshape(2, bins, slots)
    before = x[ids].sum(axis=2).max(axis=1)
    columns = np.sort(ids.reshape(2, -1))
    swap_level(ids, x)
    assert (x[ids].sum(axis=2).max(axis=1) <= before).all()
    assert (np.sort(ids.reshape(2, -1)) == columns).all()


def test_bins_of_which_no_pair_is_worth_a_swap_stay_as_they_are() -> None:
    """One is above the tolerance; once pairs are others each differs by less than half of it."""
    above = np.array([2.05, 0.06, 0.06, 0.06, 0.06, -0.29, -1, -1])
    ids = np.arange(8)[None, :, None]
    swap_level(ids, 1e6 + 100 * above)
    assert ids.ravel().tolist() == list(range(8))


def test_large_inputs_go_by_chunks_and_keep_their_caps() -> None:
    x = falling(np.random.default_rng(0).integers(1, 9999, 6400).tolist())
    labels = lpt(x, 64, 100)
    assert np.bincount(labels, minlength=64).tolist() == [100] * 64


@pytest.mark.parametrize("columns", [3, 300])
def test_columns_are_spread_over_all_ranks(columns: int) -> None:
    cost = np.sort(np.random.default_rng(1).random(8 * columns))[::-1].reshape(columns, 8)
    ranks = spread_columns(cost)
    assert (np.sort(ranks, axis=1) == np.arange(8)).all()
    sums = np.zeros(8)
    np.add.at(sums, ranks, cost)
    assert np.ptp(sums) <= 1


def dealt_one_by_one(cost: FloatArray) -> IntArray:
    """Column by column, of falling spread: the dearest bin to the least loaded rank, and so on."""
    ranks, loads = np.empty(cost.shape, dtype=np.int64), [0.0] * cost.shape[1]
    for j in np.argsort(-np.ptp(cost, axis=1), kind="stable").tolist():
        least = sorted(range(len(loads)), key=loads.__getitem__)
        for rank, at in zip(least, np.argsort(-cost[j], kind="stable").tolist(), strict=True):
            ranks[j, at] = rank
            loads[rank] += cost[j, at]
    return ranks


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from([2.0**-70, 1.0, 2.0**70]), st.data())
def test_columns_are_dealt_to_the_least_loaded_whatever_the_unit_of_cost(
    columns: int, ranks: int, unit: float, data: st.DataObject
) -> None:
    n = columns * ranks
    costs = data.draw(st.lists(COSTS, min_size=n, max_size=n))
    cost = np.array(costs, dtype=np.float64).reshape(columns, ranks)
    expected = dealt_one_by_one(cost)
    assert (spread_columns(cost * unit) == expected).all()


@st.composite
def packings(draw: st.DrawFn) -> tuple[FloatArray, list[int], int, int]:
    budget = draw(st.integers(1, 200))
    lengths = draw(st.lists(st.integers(1, budget + budget // 4), min_size=1, max_size=50))
    return falling(lengths) ** 2, sorted(lengths, reverse=True), draw(st.integers(1, 5)), budget


@given(packings(), st.integers(1, 3))
def test_packing_keeps_the_budget_and_lets_what_exceeds_it_go_alone(
    packing: tuple[FloatArray, list[int], int, int], multiple: int
) -> None:
    x, lengths, R, budget = packing
    s = np.array(lengths)
    labels, M = pack(x, s, R, budget, partial(round_up, multiple=multiple))
    assert M % multiple == 0
    assert round_up(fewest_micro_batches(s, R, budget), multiple) <= M
    assert labels.min() >= 0
    assert labels.max() < R * M
    counts = np.bincount(labels)
    held = np.bincount(labels, weights=s)
    assert ((held <= budget) | (counts == 1)).all()


def test_micro_batches_are_as_few_as_the_tokens_allow() -> None:
    for seed in range(20):
        s = np.sort(np.random.default_rng(seed).integers(1, 60, 120))[::-1].copy()
        _, M = pack(s.astype(np.float64) ** 2, s, 4, 200)
        assert fewest_micro_batches(s, 4, 200) == M


def test_a_budget_without_room_is_told_apart_from_a_bad_packing() -> None:
    s = np.array([8, 5, 4, 3])
    assert lpt_budget(s.astype(np.float64), s, 2, 10) is None
    assert best_fit(s, np.full(2, 10), 10).tolist() == [0, 1, 1, -1]
    assert pack(s.astype(np.float64), s, 2, 10)[1] == 2


def least_loaded_with_room(x: FloatArray, s: IntArray, bins: int, budget: int) -> list[int] | None:
    """The definition of LPT under a budget; a sample above it may have an empty bin."""
    loads, held, labels = np.zeros(bins), np.zeros(bins), []
    for cost, tokens in zip(x, s, strict=True):
        fits = (held + tokens <= budget) | ((held == 0) & (tokens > budget))
        if not fits.any():
            return None
        b = int(np.where(fits, loads, np.inf).argmin())
        loads[b] += cost
        held[b] += tokens
        labels.append(b)
    return labels


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=60),
    st.integers(1, 9),
    st.floats(0.5, 2.0),
    st.sampled_from([1.0, 2.0**-40, 2.0**40, 2.0**900]),
)
def test_largest_goes_onto_the_least_loaded_that_has_room(
    tokens: list[int], bins: int, room: float, price: float
) -> None:
    s = -np.sort(-np.array(tokens))
    x = s.astype(np.float64) ** 2 * price
    budget = max(int(room * s.sum() / bins), 1)
    found = lpt_budget(x, s, bins, budget)
    expected = least_loaded_with_room(x, s, bins, budget)
    assert (None if found is None else found.tolist()) == expected


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(1, 9))
def test_costs_of_any_precision_are_placed_within_the_budget(tokens: list[int], bins: int) -> None:
    s = -np.sort(-np.array(tokens))
    budget = int(s.max()) + int(s.sum()) // bins
    labels = lpt_budget(s**2 * 0.37 + s / 3, s, bins, budget)
    assert labels is not None
    assert np.bincount(labels, weights=s).max() <= budget


@pytest.mark.parametrize("seed", range(4))
def test_many_items_whose_tokens_do_not_fall_are_placed_within_the_budget(seed: int) -> None:
    """As whole groups in padded micro-batches: by falling cost, and samples of each for tokens."""
    rng = np.random.default_rng(seed)
    x, s = -np.sort(-rng.lognormal(6, 1, 3600)), rng.integers(1, 5, 3600)
    labels = lpt_budget(x, s, 32, int(s.sum()) // 32 + 8)
    assert labels is not None
    assert np.bincount(labels, weights=s).max() <= int(s.sum()) // 32 + 8


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1e300])
def test_costs_of_any_size_are_shared_out(unit: float) -> None:
    s = np.array([3, 2, 1])
    labels = lpt_budget(s * unit, s, 2, 10)
    assert labels is not None
    assert labels.tolist() == [0, 1, 1]


def test_sets_are_filled_each_by_itself_and_tightly_where_cost_finds_no_room() -> None:
    x, of = np.array([9.0, 9, 5, 4, 3, 2, 1]), np.array([0, 1, 0, 0, 0, 1, 1])
    s = np.array([6, 5, 4, 4, 6, 5, 4])
    labels = fill_sets(x, s, of, 2, 10)
    assert np.bincount(labels[of == 0], s[of == 0]).tolist() == [10, 10]  # by cost 6 | 4 4
    assert labels[of == 1].tolist() == [0, 1, 1]
    assert fill_sets(x, s, np.zeros_like(of), 2, 10).min() == -1


def test_best_fit_finds_a_perfect_packing() -> None:
    labels = best_fit(np.array([7, 6, 4, 3]), np.full(2, 10), 10)
    assert labels.tolist() == [0, 1, 1, 0]


@given(st.lists(st.integers(1, 14), max_size=60), st.booleans())
def test_a_run_ends_only_where_the_next_sample_does_not_fit(s: list[int], padded: bool) -> None:
    labels = run_of_each(np.array(s, int), np.zeros(len(s), int), 12, padded=padded).tolist()
    runs = [[t for t, at in zip(s, labels, strict=True) if at == run] for run in sorted({*labels})]
    assert [t for run in runs for t in run] == s
    assert labels == sorted(labels)
    assert labels[-1:] in ([], [len(runs) - 1])
    assert all(len(run) == 1 or held(run, padded) <= 12 for run in runs)
    assert all(held([*run, after[0]], padded) > 12 for run, after in pairwise(runs))


def held(run: list[int], padded: bool) -> int:
    return max(run) * len(run) if padded else sum(run)


def test_first_fit_goes_back_to_micro_batches_that_have_room() -> None:
    s = [6, 5, 4, 3]
    of = np.array([0, 0, 0, 1])
    assert run_of_each(np.array(s), 0 * of, 10, padded=False).tolist() == [0, 1, 1, 2]
    assert run_of_each(np.array(s), of, 10, padded=False).tolist() == [0, 1, 1, 0]
    assert first_fit(np.array(s), np.full(4, 10)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("n", [1024, 4096, 8192])
def test_the_estimate_of_a_packing_is_close_to_what_packing_reaches(n: int, ranks: int) -> None:
    generator = np.random.default_rng(n + ranks)
    s = np.sort(np.clip(generator.lognormal(9, 0.8, n), 16, 65536).astype(np.int64))[::-1].copy()
    x = s.astype(np.float64) ** 2 + 24576 * s
    labels, M = pack(x, s, ranks, 131072)
    reached = (
        np.bincount(labels, weights=x, minlength=ranks * M).reshape(M, ranks).max(axis=1).sum()
    )
    assert packed_time(x, s, ranks, M, 131072) == pytest.approx(reached, rel=0.015)


@pytest.mark.parametrize("seed", range(4))
def test_many_samples_are_packed_tightly_within_the_budget(seed: int) -> None:
    s = np.sort(np.random.default_rng(seed).integers(16, 8000, 8192))[::-1].copy()
    labels, M = pack(s.astype(np.float64) ** 2, s, 16, 16384)
    assert np.bincount(labels, weights=s).max() <= 16384
    assert fewest_micro_batches(s, 16, 16384) == M
