"""Claims about selection: counts, deadlines, the lane and the column DP."""

import tracemalloc
from dataclasses import replace
from itertools import combinations_with_replacement, cycle, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner import Quadratic, plan, selection
from rollout_planner.order import among, by_falling_tokens, group_index, group_max
from rollout_planner.selection import Pool, due, fill_exactly, keep_oldest, tightest
from rollout_planner.types import (
    BoolArray,
    FloatArray,
    Grouping,
    IntArray,
    PlanConfig,
    Sync,
    Window,
)
from tests.bench.constants import set_to
from tests.support.windows import refilled


def test_due_counts_the_steps_that_remain() -> None:
    none, one = np.zeros(4, dtype=bool), np.ones(4, dtype=np.int64)
    assert due(np.array([0, 1, 1, 1]), none, 2, one).tolist() == [True, True, False, False]
    assert due(np.array([3, 3, 3, 3]), none, 2, one).tolist() == [False] * 4
    assert due(np.array([1, 0, 1, 2]), none, 1, one).tolist() == [False, True, False, False]


def test_a_flag_comes_after_those_with_no_skip_left_and_before_all_others() -> None:
    flags, one = np.array([False, False, True]), np.ones(3, dtype=np.int64)
    assert due(np.array([0, 9, 9]), flags, 1, one).tolist() == [True, False, False]
    assert due(np.array([0, 9, 9]), flags, 2, one).tolist() == [True, False, True]
    assert due(np.array([1, 9, 9]), flags, 1, one).tolist() == [False, False, True]


def test_where_the_first_deadline_leaves_room_for_all_nothing_is_sorted() -> None:
    n = 100_000
    left, must_go, size = np.full(n, 5), np.zeros(n, dtype=bool), np.ones(n, dtype=np.int64)
    tracemalloc.start()
    forced = due(left, must_go, n // 5, size)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not forced.any()
    assert most < 2 * n
    assert due(left, must_go, n // 5 - 1, size).sum() == 5


@given(
    st.lists(
        st.tuples(st.integers(-2, 5) | st.just(10**6), st.booleans(), st.integers(1, 4)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 8),
    st.booleans(),
)
def test_so_many_are_due_as_no_later_step_can_take(
    items: list[tuple[int, bool, int]], take: int, in_groups: bool
) -> None:
    left, must_go, size = (np.array(column) for column in zip(*items, strict=True))
    size = size if in_groups else np.ones_like(size)
    urgency = np.maximum(left, 0)
    need = max(int(size[urgency <= j].sum()) - j * take for j in range(7))
    goes, held = np.zeros(len(left), dtype=bool), 0
    for i in np.lexsort((np.arange(len(left)), urgency)):
        goes[i] = held < min(need, take)
        held += size[i]
    held = int(size[goes].sum())
    for i in np.flatnonzero(must_go & ~goes):
        goes[i] = held < take
        held += size[i]
    forced = due(left, must_go, take, size)
    assert forced.tolist() == goes.tolist()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 8))
def test_what_is_due_leaves_a_schedule_that_can_be_kept(left: list[int], take: int) -> None:
    forced = due(
        np.array(left), np.zeros(len(left), dtype=bool), take, np.ones(len(left), dtype=np.int64)
    )
    feasible = all(sum(v <= j for v in left) <= (j + 1) * take for j in range(5))
    assert forced.sum() <= take
    if feasible:
        rest = [v - 1 for v, gone in zip(left, forced, strict=True) if not gone]
        assert all(sum(v <= j for v in rest) <= (j + 1) * take for j in range(4))


def test_the_oldest_are_kept_after_what_is_forced_and_wanted() -> None:
    forced = np.array([False, False, False, False, True])
    assert keep_oldest(forced, 2).tolist() == [True, False, False, False, True]
    last = np.array([0, 1])
    assert keep_oldest(forced, 2, last=last).tolist() == [False, False, True, False, True]
    assert keep_oldest(forced, 4, last=last).tolist() == [True, False, True, True, True]
    assert keep_oldest(forced, 2, first=np.array([3])).tolist()[3:] == [True, True]


@given(st.lists(st.booleans(), min_size=1), st.data())
def test_who_is_forced_goes_first_then_who_is_wanted_then_the_oldest_and_the_held_last(
    forced: list[bool], data: st.DataObject
) -> None:
    n = len(forced)
    some = st.lists(st.integers(0, n - 1), unique=True)
    first, last, take = data.draw(some), data.draw(some), data.draw(st.integers(0, n))

    def turn(i: int) -> int:
        return 0 if forced[i] else 1 if i in first else 3 if i in last else 2

    found = keep_oldest(
        np.array(forced),
        take,
        first=np.array(first, dtype=np.int64),
        last=np.array(last, dtype=np.int64),
    )
    assert np.flatnonzero(found).tolist() == sorted(sorted(range(n), key=turn)[:take])


@given(st.integers(1, 60), st.integers(1, 9), st.floats(0, 9), st.data())
def test_the_column_dp_keeps_the_count(
    items: int, neighbours: int, price: float, data: st.DataObject
) -> None:
    take = data.draw(st.integers(1, items))
    costs = data.draw(st.lists(st.integers(0, 99), min_size=items, max_size=items))
    x = np.sort(np.array(costs))[::-1].astype(float)
    kept = tightest(x, np.zeros(items), take, neighbours, price)
    assert len(kept) == take
    assert kept.tolist() == sorted(set(kept.tolist()) & set(range(items)))


def test_the_column_dp_skips_what_makes_a_column_uneven() -> None:
    x = np.array([9.0, 5, 5, 1, 1])
    assert tightest(x, np.zeros(5), 4, 2).tolist() == [1, 2, 3, 4]


def test_what_the_column_dp_skips_is_spread_where_it_costs_nothing() -> None:
    kept = tightest(np.ones(100), np.zeros(100), 80, 4)
    ahead = np.cumsum(~np.isin(np.arange(100), kept)) - np.arange(1, 101) / 5
    assert np.abs(ahead).max() <= 4  # of 20; any order would do without a price


def test_the_column_dp_skips_several_at_a_time_when_there_are_many() -> None:
    x = np.arange(5000.0)[::-1]
    assert len(tightest(x, np.ones(5000), 2000, 8)) == 2000


@given(st.lists(st.integers(0, 9), min_size=3, max_size=9), st.integers(1, 4), st.data())
def test_the_column_dp_finds_what_waits_least_in_a_wide_band(
    costs: list[int], neighbours: int, data: st.DataObject
) -> None:
    x = -np.sort(-np.array(costs, dtype=np.float64))
    take = data.draw(st.integers(1, len(x) - 1))
    penalty = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(x), max_size=len(x))))

    def price(kept: list[int]) -> float:
        skipped = float(penalty.sum() - penalty[kept].sum())
        return neighbours * float(x[kept[::neighbours]].sum()) - float(x[kept].sum()) + skipped

    with set_to("BAND", 1.0):
        kept = tightest(x, penalty * 1.0, take, neighbours, 0.0)
    columns = [range(at, min(at + neighbours, take)) for at in range(0, take, neighbours)]
    ways = combinations_with_replacement(range(len(x) - take + 1), len(columns))
    least = min(
        price([at + skipped for column, skipped in zip(columns, way, strict=True) for at in column])
        for way in ways  # skips before each column
    )
    assert price(kept.tolist()) == least


def steady(
    tokens: IntArray, config: PlanConfig, window: int, steps: int
) -> tuple[list[int], list[IntArray]]:
    """Excess per step in basis points, and skips of what left, with a window refilled each step."""
    excess, left = [], []
    for held, step in islice(refilled(cycle(tokens.tolist()), window, config), steps):
        assert len(step.chosen) == config.dispatch_batch_size
        assert len(held) == window
        excess.append(round(step.excess * 1e4))
        left.append(held.skips[step.chosen])
    return excess, left


def heavy_tail(n: int) -> IntArray:
    lengths = np.random.default_rng(11).lognormal(6, 1, n).astype(np.int64) + 1
    lengths[::97] = 40000  # now and then one that rules its step
    return lengths


STEP = PlanConfig(
    dp_size=8, dispatch_batch_size=32, cost=Quadratic(), micro_batch_size=1, sync=Sync.STEP
)


@pytest.mark.parametrize("sync", list(Sync))
@pytest.mark.parametrize(("window", "max_skips"), [(40, 1), (40, 3), (64, 4), (128, 3)])
def test_nobody_is_skipped_beyond_the_bound(sync: Sync, window: int, max_skips: int) -> None:
    config = replace(STEP, dp_size=4, sync=sync, max_skips=max_skips)
    _, left = steady(heavy_tail(1000), config, window, steps=40)
    assert max(int(skips.max()) for skips in left) <= max_skips


def test_outliers_may_have_a_bound_of_their_own() -> None:
    config = replace(STEP, max_skips=2, outlier_max_skips=9)
    _, left = steady(heavy_tail(1000), config, 48, steps=60)
    assert 2 < max(int(skips.max()) for skips in left) <= 9


def test_the_lane_makes_outliers_leave_together() -> None:
    config = replace(STEP, dispatch_batch_size=64, max_skips=8)
    alone, _ = steady(heavy_tail(1000), config, 64, steps=60)
    together, left = steady(heavy_tail(1000), config, 96, steps=60)
    assert sum(together) < sum(alone) / 4
    assert max(int(skips.max()) for skips in left) <= config.max_skips


def pool_of(cost: FloatArray, forced: BoolArray | None = None) -> Pool:
    n = len(cost)
    return Pool(
        cost=cost,
        order=np.argsort(-cost, kind="stable"),
        age=np.zeros(n),
        forced=np.zeros(n, dtype=bool) if forced is None else forced,
        neighbours=8,
        columns=False,
        share=10.0,
    )


@given(st.lists(st.sampled_from([1, 2, 2**16, 2**16 + 1, 2**17, 2**32, 2**32 + 1, 2**61])))
def test_positions_are_sorted_by_falling_tokens_however_long_these_are(tokens: list[int]) -> None:
    found = by_falling_tokens(np.array(tokens, dtype=np.int64)).tolist()
    assert found == sorted(range(len(tokens)), key=lambda i: -tokens[i])


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1))
def test_the_chosen_keep_the_order_of_their_window(samples: list[tuple[int, bool]]) -> None:
    tokens, keep = map(np.array, zip(*samples, strict=True))
    expected = by_falling_tokens(tokens[keep])
    assert among(by_falling_tokens(tokens), keep).tolist() == expected.tolist()


def test_outliers_are_held_many_before_few_and_others_few_before_many() -> None:
    def held(heaviest: float) -> list[int]:
        """How many of the heaviest each candidate of the lane leaves behind."""
        cost = np.concatenate((np.ones(98), np.linspace(heaviest, 2, 32), np.ones(30)))
        pool = pool_of(cost)
        masks = list(selection.of(pool, 128))[1:-1]  # between the oldest and the DP
        return [int(np.argmax(keep[pool.order])) for keep in masks]

    assert held(12.0) == [0, 0, 16, 4, 1]
    assert held(9.0) == [0, 0, 1, 4]


def test_to_hold_what_has_a_column_of_company_is_no_debt() -> None:
    def debt(heavy: int, age: float) -> float:
        """Of holding the first of the heavy while another sample in the lane is due."""
        cost = np.concatenate((np.full(heavy, 20.0), np.ones(100 - heavy)))
        pool = replace(pool_of(cost, np.arange(100) == 12), age=np.full(100, age))
        return selection.debt(pool, np.arange(100) != 0)

    assert debt(heavy=9, age=0.5) == debt(heavy=8, age=0.0) == 0  # a column has 8 places
    assert debt(heavy=8, age=1.0) > debt(heavy=8, age=0.5) > 0


def test_every_candidate_takes_what_is_forced_and_the_right_number() -> None:
    cost = np.random.default_rng(2).lognormal(1, 1, 100)
    forced = np.arange(100) % 9 == 0
    for keep in selection.of(pool_of(cost, forced), 64):
        assert keep.sum() == 64
        assert keep[forced].all()


def test_groups_are_numbered_by_first_arrival() -> None:
    assert group_index(np.array([7, -1, 7, 3, -1])).tolist() == [0, 1, 0, 2, 3]
    index = np.array([0, 1, 0, 2])
    assert group_max(np.array([5, 1, 9, 2]), index).tolist() == [9, 1, 2]


def test_whole_groups_fill_a_step_exactly_where_their_sizes_allow() -> None:
    none = np.zeros(3, dtype=bool)
    size = np.array([3, 2, 2])
    assert fill_exactly(np.arange(3), none, size, 4).tolist() == [False, True, True]
    assert fill_exactly(np.arange(3), none, size, 5).tolist() == [True, True, False]
    assert fill_exactly(np.arange(3), none, size, 6).tolist() == [True, True, False]
    first = np.array([True, False, False])
    assert fill_exactly(np.arange(3), first, size, 4).tolist() == [True, False, False]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 20))
def test_no_choice_of_whole_groups_comes_closer(sizes: list[int], take: int) -> None:
    size = np.array(sizes)
    chosen = fill_exactly(np.arange(len(size)), np.zeros(len(size), dtype=bool), size, take)
    reachable = {0}
    for count in sizes:
        reachable |= {total + count for total in reachable}
    assert size[chosen].sum() == max(total for total in reachable if total <= take)


@pytest.mark.parametrize("sizes", [(4,), (1, 2, 3, 5)])
def test_groups_keep_their_deadline_too(sizes: tuple[int, ...]) -> None:
    config = PlanConfig(
        dp_size=2,
        dispatch_batch_size=16,
        cost=Quadratic(),
        micro_batch_size=1,
        grouping=Grouping.STEP,
        max_skips=3,
    )
    generator = np.random.default_rng(5)
    group, tokens, skips = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    upcoming, seen = 0, 0
    for _ in range(60):
        while len(group) < 24:
            count = int(generator.choice(sizes))
            group = np.concatenate((group, np.full(count, upcoming)))
            tokens = np.concatenate((tokens, generator.integers(1, 5000, count)))
            skips = np.concatenate((skips, np.zeros(count, dtype=np.int64)))
            upcoming += 1
        step = plan(Window(tokens, skips, group, np.zeros(len(group), dtype=bool)), config)
        seen = max(seen, int(skips[step.chosen].max()))
        keep = np.ones(len(group), dtype=bool)
        keep[step.chosen] = False
        assert set(group[keep].tolist()).isdisjoint(group[step.chosen].tolist())
        group, tokens, skips = group[keep], tokens[keep], skips[keep] + 1
    assert seen <= 3


@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 6)), min_size=4, max_size=9),
    st.integers(3, 12),
)
def test_a_step_of_whole_groups_is_as_full_as_they_can_make_it(
    groups: list[tuple[int, int]], take: int
) -> None:
    """Also where some are due, by their deadline or by the bound on a step's loss tokens."""
    lengths, skips = (np.repeat(column, 3) for column in zip(*groups, strict=True))
    window = Window(
        lengths, skips, np.repeat(np.arange(len(groups)), 3), np.zeros(len(lengths), dtype=bool)
    )
    config = PlanConfig(
        dp_size=1, dispatch_batch_size=take, cost=Quadratic(), micro_batch_size=1, max_skips=6
    )
    assert len(plan(window, config, take).chosen) == 3 * min(len(groups), take // 3)
