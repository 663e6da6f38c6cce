"""Claims about padded micro-batches under a budget of padded tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_planner import Quadratic, plan, tokens
from rollout_planner.objective import estimate
from rollout_planner.split.assign import places_of
from rollout_planner.split.padded import (
    Counts,
    Items,
    begin_cost,
    fewest_runs,
    level_of,
    most_in_run,
    padded_runs,
)
from rollout_planner.types import (
    CostModel,
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    Oversize,
    PlanConfig,
    Sync,
    Window,
    round_up,
)
from tests.support.examples import examples
from tests.support.windows import refilled

LENGTHS = st.one_of(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.lists(st.sampled_from([1, 2, 40, 2000]), min_size=1, max_size=60),
    st.integers(1, 60).map(lambda n: [9000] + [3] * (n - 1)),
)
COSTS = st.sampled_from([tokens, Quadratic(), Quadratic(0.001, 1.0), lambda s: np.zeros(len(s))])


def falling(lengths: list[int], cost: CostModel) -> tuple[FloatArray, IntArray]:
    s = np.sort(np.array(lengths))[::-1].copy()
    return cost(s), s


class Runs(NamedTuple):
    """Where runs begin, and the end; place, rank * M + micro-step, of each; M."""

    starts: IntArray
    place: IntArray
    M: int


def runs_of(
    x: FloatArray,
    s: IntArray,
    ranks: int,
    budget: int,
    allowed: Callable[[int], int] = int,
    *,
    per_step: bool,
) -> Runs:
    """As the splitter has them."""
    fewest = allowed(-(-max(fewest_runs(s, budget), 1) // ranks))
    multiple = allowed(fewest + 1) - fewest or 1
    last = fewest
    if allowed(fewest + multiple) > fewest:
        last = max(min(2 * fewest, len(x) // ranks), fewest)
    counts = Counts(ranks, fewest, last - last % multiple, multiple, begin_cost(x, s, budget))
    items = Items(x, most_in_run(s, budget))
    starts = padded_runs(items, counts, per_step=per_step)
    assert starts is not None
    M = max(-(-(len(starts) - 1) // ranks), fewest)
    load = np.zeros(ranks * M)
    load[: len(starts) - 1] = items.costs(starts)
    return Runs(starts, places_of(load, ranks, M, per_step)[: len(starts) - 1], M)


def exactly(count: int) -> Callable[[int], int]:
    return lambda _fewest: count


def matrix(runs: Runs, x: FloatArray, ranks: int) -> FloatArray:
    cost = np.zeros(ranks * runs.M)
    cost[runs.place] = np.diff(runs.starts) * x[runs.starts[:-1]]
    return cost.reshape(ranks, runs.M)


def time_of(cost: FloatArray, per_step: bool) -> float:
    return float(cost.sum(axis=1).max() if per_step else cost.max(axis=0).sum())


def check(runs: Runs, s: IntArray, ranks: int, budget: int, multiple: int) -> None:
    counts = np.diff(runs.starts)
    assert runs.starts[0] == 0
    assert runs.starts[-1] == len(s)
    assert counts.min() >= 1
    assert len(set(runs.place.tolist())) == len(runs.place)
    assert runs.M % multiple == 0
    assert len(runs.place) == min(ranks * runs.M, len(s))  # fillers only where samples are fewer
    longest = s[runs.starts[:-1]]
    assert ((counts == 1) | (counts * longest <= budget)).all()


@examples(400)
@given(
    LENGTHS,
    COSTS,
    st.integers(1, 5),
    st.tuples(st.integers(1, 4000), st.sampled_from([1, 2, 3])),
    st.booleans(),
)
@example([1, 1, 1, 1, 1, 40, 2000, 2000], tokens, 3, (80, 1), False)
def test_runs_hold_every_item_within_the_budget(
    lengths: list[int], cost: CostModel, ranks: int, limit: tuple[int, int], per_step: bool
) -> None:
    x, s, (budget, multiple) = *falling(lengths, cost), limit
    allowed = partial(round_up, multiple=multiple)
    check(runs_of(x, s, ranks, budget, allowed, per_step=per_step), s, ranks, budget, multiple)


@examples(200)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(0, 4),
    st.booleans(),
)
def test_runs_of_groups_hold_no_more_samples_than_they_may(
    groups: list[tuple[int, int]], ranks: int, more: int, per_step: bool
) -> None:
    longest, size = np.array(sorted(groups, reverse=True)).T
    M = -(-int(size.sum()) // (6 * ranks)) + more
    items = Items(longest.astype(np.float64), np.full(len(size), 6), size)
    starts = padded_runs(items, Counts(ranks, M, M), per_step=per_step)
    if starts is None:
        assert more == 0 or len(size) > ranks * M
        return
    assert (starts[0], starts[-1]) == (0, len(size))
    assert len(starts) == min(len(size), ranks * M) + 1
    assert np.diff(starts).min() >= 1
    assert np.diff(items.held[starts]).max() <= 6


@pytest.mark.parametrize("per_step", [False, True])
def test_costs_on_another_scale_have_the_same_runs(per_step: bool) -> None:
    x, s = falling(lognormal(200, 3), Quadratic())
    once, twice = (
        runs_of(x * by, s, 8, 100_000, per_step=per_step).starts for by in (1.0, 2.0**40)
    )
    assert once.tolist() == twice.tolist()


@examples(200)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 60))
def test_no_way_to_pad_needs_fewer_micro_batches(lengths: list[int], budget: int) -> None:
    s = falling(lengths, tokens)[1]
    assert fewest_runs(s, budget) == _fewest(tuple(s.tolist()), budget)


def _fewest(s: tuple[int, ...], budget: int) -> int:
    """By trying every set that may share a micro-batch with the longest item."""
    if not s:
        return 0
    most = max(budget // s[0], 1)
    best = len(s)
    for mask in range(1 << (len(s) - 1)):
        rest = tuple(v for i, v in enumerate(s[1:]) if not mask >> i & 1)
        if len(s) - len(rest) <= most:
            best = min(best, 1 + (_greedy(rest, budget)))
    return best


def _greedy(s: tuple[int, ...], budget: int) -> int:
    return 0 if not s else 1 + _greedy(s[max(budget // s[0], 1) :], budget)


def test_the_example_of_the_module() -> None:
    x, s = falling([8, 7, 3, 3, 2, 2], tokens)
    runs = runs_of(x, s, 2, 16, partial(round_up, multiple=2), per_step=False)
    assert runs.starts.tolist() == [0, 1, 2, 4, 6]
    assert time_of(matrix(runs, x, 2), per_step=False) == 8 + 6


def lognormal(n: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(8192), 0.8, n)
    lengths: list[int] = np.clip(drawn, 16, 65536).astype(np.int64).tolist()
    return lengths


def test_a_run_takes_the_level_that_it_fills_best() -> None:
    x = np.array([8, 3, 3, 2, 2, 2, 2.0])
    items = Items(x, np.full(7, 9))
    starts = padded_runs(items, Counts(2, 2, 2), per_step=False)
    assert starts is not None
    assert level_of(items.costs(starts), 2).tolist() == pytest.approx([8, 3])


def every_time(starts: IntArray, x: FloatArray, ranks: int) -> FloatArray:
    cost = np.diff(starts, axis=1) * x[starts[:, :-1]]
    times: FloatArray = level_of(cost.T, ranks).sum(axis=0)
    return times


@pytest.mark.parametrize("ranks", [2, 3])
def test_of_few_samples_hardly_a_cut_is_better(ranks: int) -> None:
    """Beside all ways to cut 12 sorted samples into two micro-steps."""
    rng = np.random.default_rng(0)
    cuts = np.array(list(combinations(range(1, 12), 2 * ranks - 1)))
    every = np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, 12))
    over = []
    for _ in range(50):
        x, s = falling(np.ceil(rng.lognormal(4, 1, 12)).astype(int).tolist(), Quadratic(1, 100))
        runs = runs_of(x, s, ranks, 10**6, lambda fewest: max(fewest, 2), per_step=False)
        assert runs.M == 2
        best = float(every_time(every, x, ranks).min())
        over.append(time_of(matrix(runs, x, ranks), per_step=False) / best - 1)
    assert np.mean(over) < 0.003


SHORT = [2264, 2245, 2234, 2229, 2224, 2224, 2217, 2209, 2207, 2185, 2182, 2164, 2150, 2150, 2146]
SHORT += [2140, 2134, 2134, 2113, 2113, 2111, 2110, 2106, 2099, 2095, 2072, 2055, 2054, 2042]


def test_short_samples_go_beside_long_ones() -> None:
    """Three long samples, and a rank that takes as many short ones as the longest lasts."""
    x, s = falling([22061, 21831, 20738, *SHORT], Quadratic(1, 1000))
    runs = runs_of(x, s, 4, 56125, lambda fewest: max(fewest, 2), per_step=False)
    longest, shortest = matrix(runs, x, 4).max(axis=0)
    assert longest == x[0]
    assert shortest <= x[3]


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_any_count_pads_far_less_than_a_fixed_one(seed: int, per_step: bool) -> None:
    """128 samples, 4 ranks, 4 micro-batches of 8, beside the same room for any number."""
    x, s = falling(lognormal(128, seed), Quadratic())
    fixed = 8 * x[::32].sum()
    runs = runs_of(x, s, 4, 8 * int(s[0]), partial(round_up, multiple=4), per_step=per_step)
    assert runs.M == 4
    time = time_of(matrix(runs, x, 4), per_step)
    assert time < 0.7 * fixed
    assert time < (1.2 if per_step else 1.35) * x.sum() / 4


@pytest.mark.parametrize("per_step", [False, True])
def test_more_micro_batches_are_made_only_while_they_pay(per_step: bool) -> None:
    x, s = falling(lognormal(512, 1), Quadratic())
    runs = runs_of(x, s, 16, 131072, per_step=per_step)
    fewest, begin = -(-fewest_runs(s, 131072) // 16), begin_cost(x, s, 131072)
    assert fewest <= runs.M <= 2 * fewest
    price = time_of(matrix(runs, x, 16), per_step) + begin * runs.M
    for count in range(fewest, 2 * fewest + 1):
        other = runs_of(x, s, 16, 131072, exactly(count), per_step=per_step)
        assert price <= 1.01 * (time_of(matrix(other, x, 16), per_step) + begin * count)
    alike = runs_of(x * 0 + 1, s * 0 + 8192, 16, 131072, per_step=per_step)
    assert alike.M == 2  # 512 samples of 8,192 tokens fill 2 x 16 micro-batches, and none pads


@examples(200)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 4000), st.sampled_from(Sync))
def test_a_plan_has_at_most_twice_the_fewest_micro_batches(
    lengths: list[int], ranks: int, budget: int, sync: Sync
) -> None:
    """Whatever it was compared with: what is dealt by work alone may need more."""
    config = replace(
        PADDED,
        dp_size=ranks,
        dispatch_batch_size=len(lengths),
        micro_batch_tokens=budget,
        oversize=Oversize.ALONE,
        sync=sync,
    )
    none = np.full(len(lengths), -1)
    step = plan(Window(np.array(lengths), none + 1, none, none > 0), config)
    fewest = -(-fewest_runs(np.sort(np.array(lengths))[::-1], budget) // ranks)
    assert fewest <= step.num_micro_batches <= 2 * fewest


def test_many_samples_are_split_without_following_each_run() -> None:
    x, s = falling(lognormal(6000, 2), Quadratic())
    for budget in (65536, 1 << 20):
        runs = runs_of(x, s, 8, budget, per_step=False)
        check(runs, s, 8, budget, 1)
        assert time_of(matrix(runs, x, 8), per_step=False) < 1.06 * x.sum() / 8


@examples(50)
@given(st.integers(20, 300), st.integers(0, 99), st.integers(2, 8), st.booleans())
def test_the_estimate_is_close_to_the_split(n: int, seed: int, ranks: int, per_step: bool) -> None:
    x, s = falling(lognormal(n, seed), Quadratic())
    config = replace(PADDED, dp_size=ranks, sync=Sync.STEP if per_step else Sync.MICRO_STEP)
    budget = config.micro_batch_tokens or 1
    time = time_of(matrix(runs_of(x, s, ranks, budget, per_step=per_step), x, ranks), per_step)
    assert 0.6 * time < estimate(x, s, config) < 1.7 * time


PADDED = PlanConfig(
    dp_size=4,
    dispatch_batch_size=64,
    cost=Quadratic(),
    micro_batch_tokens=131072,
    layout=Layout.PADDED,
    grouping=Grouping.IGNORE,
)


@pytest.mark.parametrize("sync", Sync)
def test_a_window_makes_padded_micro_batches_shorter(sync: Sync) -> None:
    """The same stream of samples, from the oldest batch and from a window of 1.5."""

    def time(window: int) -> float:
        spent = work = 0.0
        config = replace(PADDED, sync=sync)
        for held, step in islice(refilled(lognormal(4096, 5), window, config), 24):
            spent += time_of(step.cost, sync is Sync.STEP)
            work += float(Quadratic()(held.tokens[step.chosen]).sum()) / 4
        return spent / work

    assert time(96) < time(64)
