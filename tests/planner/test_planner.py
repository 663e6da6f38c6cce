"""Claims about plans, whatever the strategy, layout, sync and grouping."""

import csv
import gzip
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import PlanError, SampleTooLong
from rollout_planner import Quadratic, plan, plan_digest, tokens
from rollout_planner.types import (
    CostModel,
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    Oversize,
    Plan,
    PlanConfig,
    Strategy,
    Sync,
    Window,
)
from tests.support.examples import examples
from tests.support.windows import window_of

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


def free(counts: IntArray) -> FloatArray:
    return np.zeros(len(counts))


LENGTHS = st.one_of(
    st.lists(st.integers(1, 200), min_size=1, max_size=48),
    st.lists(st.sampled_from([1, 2, 4, 8, 16, 2**20, 2**31 - 1]), min_size=1, max_size=48),
    st.integers(1, 48).map(lambda n: [7] * n),
    st.integers(1, 48).map(lambda n: [2**31 - 1] + [1] * (n - 1)),
)
COSTS: list[CostModel] = [tokens, Quadratic(), free]


@st.composite
def windows(draw: st.DrawFn) -> Window:
    lengths = draw(LENGTHS)
    n = len(lengths)
    group = draw(st.lists(st.integers(-1, 6), min_size=n, max_size=n))
    skips = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    must_go = draw(st.lists(st.booleans(), min_size=n, max_size=n)) if draw(st.booleans()) else []
    flags = np.array(must_go or [False] * n)
    return Window(np.array(lengths), np.array(skips), np.array(group), flags)


@st.composite
def configs(draw: st.DrawFn) -> PlanConfig:
    R, M, m = draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)))
    budget = draw(st.one_of(st.none(), st.integers(1, 300)))
    return PlanConfig(
        dp_size=R,
        dispatch_batch_size=R * M * m,
        cost=draw(st.sampled_from(COSTS)),
        micro_batch_size=m if budget is None else None,
        micro_batch_tokens=budget,
        layout=draw(st.sampled_from(Layout)),
        sync=draw(st.sampled_from(Sync)),
        strategy=draw(st.sampled_from(Strategy)),
        grouping=draw(st.sampled_from(Grouping)),
        oversize=Oversize.ALONE,
        micro_batch_multiple=draw(st.integers(1, 2)),
        min_micro_batches=draw(st.sampled_from([1, 1, 2, 5])),
        max_skips=4,
    )


def grouped(window: Window, config: PlanConfig) -> bool:
    return config.grouping is not Grouping.IGNORE and bool((window.group >= 0).any())


def is_one_item(window: Window, config: PlanConfig, part: IntArray) -> bool:
    """Whether a micro-batch has a single sample, or a single group where groups stay in one."""
    if len(part) <= 1:
        return True
    groups = set(window.group[part].tolist())
    return config.grouping is Grouping.MICRO_BATCH and len(groups) == 1 and groups != {-1}


def try_plan(window: Window, config: PlanConfig) -> Plan | None:
    """The plan, or None where every group is larger than the step, or one than its micro-batch."""
    try:
        return plan(window, config)
    except PlanError as error:
        if "smallest group" not in str(error) and "stay in one micro-batch" not in str(error):
            raise
        return None


@examples(400)
@given(windows(), configs())
def test_a_plan_places_each_chosen_sample_once_and_keeps_every_cap(
    window: Window, config: PlanConfig
) -> None:
    step = try_plan(window, config)
    if step is None:
        return
    chosen = step.chosen.tolist()
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(range(len(window)))
    if not grouped(window, config):
        assert len(chosen) == min(len(window), config.dispatch_batch_size)
    assert len(step.micro_batches) == config.dp_size
    assert {len(rank) for rank in step.micro_batches} == {step.num_micro_batches}
    assert step.num_micro_batches % config.micro_batch_multiple == 0
    assert step.num_micro_batches >= config.min_micro_batches
    for part in (part for rank in step.micro_batches for part in rank):
        if config.micro_batch_size is not None:
            assert len(part) <= config.micro_batch_size
        elif not is_one_item(window, config, part):
            assert computed(window.tokens[part], config.layout) <= (config.micro_batch_tokens or 0)


def computed(tokens: IntArray, layout: Layout) -> int:
    """Tokens that a rank computes for a micro-batch of these samples."""
    return int(len(tokens) * tokens.max() if layout is Layout.PADDED else tokens.sum())


@examples(400)
@given(windows(), configs())
def test_no_micro_batch_is_empty_while_one_that_may_give_has_two_samples(
    window: Window, config: PlanConfig
) -> None:
    step = try_plan(window, config)
    if step is None or config.strategy is Strategy.ROUND_ROBIN:
        return
    if config.grouping is Grouping.MICRO_BATCH and (window.group >= 0).any():
        return  # groups are not split
    ranks = [[len(part) for part in rank] for rank in step.micro_batches]
    if config.grouping is not Grouping.RANK:  # samples may go to any rank
        ranks = [[count for rank in ranks for count in rank]]
    for counts in ranks:
        assert min(counts) > 0 or max(counts) <= 1


@examples(200)
@given(windows(), configs(), st.integers(2, 40))
def test_padding_of_samples_counts_as_tokens_do(
    window: Window, config: PlanConfig, multiple: int
) -> None:
    """In costs, in the budget, and in what is said of the plan."""
    if config.micro_batch_tokens is not None and config.micro_batch_tokens < multiple:
        config = replace(config, micro_batch_tokens=multiple)
    padded = replace(window, tokens=-(-window.tokens // multiple) * multiple)
    found = try_plan(window, replace(config, sample_length_multiple=multiple))
    expected = try_plan(padded, config)
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert plan_digest(found) == plan_digest(expected)
    assert np.array_equal(found.cost, expected.cost)
    assert (found.lower_bound, found.fifo_excess) == (expected.lower_bound, expected.fifo_excess)


def test_the_longest_sample_in_a_budget_is_the_longest_that_fits_once_padded() -> None:
    config = replace(BASE, micro_batch_size=None, micro_batch_tokens=50, sample_length_multiple=16)
    assert config.longest_in_budget == 48
    with pytest.raises(SampleTooLong, match="64"):
        plan(window_of([49, 3, 3]), config)
    assert plan(window_of([48, 3, 3]), config).num_micro_batches == 1


@examples(300)
@given(windows(), configs())
def test_the_stated_costs_and_bounds_are_those_of_the_plan(
    window: Window, config: PlanConfig
) -> None:
    step = try_plan(window, config)
    if step is None:
        return
    cost = config.cost(window.tokens)
    for r, rank in enumerate(step.micro_batches):
        for j, part in enumerate(rank):
            own = cost[part]
            padded = config.layout is Layout.PADDED and len(part)
            expected = len(part) * own.max() if padded else own.sum()
            assert step.cost[r, j] == pytest.approx(expected)
    per_step = config.sync is Sync.STEP
    time = step.cost.sum(axis=1).max() if per_step else step.cost.max(axis=0).sum()
    assert time >= step.lower_bound * (1 - 1e-9)
    assert step.fifo_excess >= -1e-9
    assert step.fifo_imbalance >= -1e-9


@examples(200)
@given(windows(), configs())
def test_groups_stay_whole_and_on_their_rank_or_in_their_micro_batch_where_asked(
    window: Window, config: PlanConfig
) -> None:
    step = try_plan(window, config)
    if step is None or not grouped(window, config):
        return
    chosen = set(step.chosen.tolist())
    for group in set(window.group[list(chosen)].tolist()) - {-1}:
        members = set(np.flatnonzero(window.group == group).tolist())
        assert members <= chosen
        homes = {
            (r, j)
            for r, rank in enumerate(step.micro_batches)
            for j, part in enumerate(rank)
            if members & set(part.tolist())
        }
        if config.grouping is Grouping.RANK:
            assert len({r for r, _ in homes}) == 1
        if config.grouping is Grouping.MICRO_BATCH:
            assert len(homes) == 1


@examples(200)
@given(windows(), configs())
def test_the_same_window_gives_the_same_plan(window: Window, config: PlanConfig) -> None:
    first, second = try_plan(window, config), try_plan(window, config)
    if first is None or second is None:
        assert first is second
        return
    assert plan_digest(first) == plan_digest(second)
    assert (first.cost == second.cost).all()


@given(windows(), configs())
def test_flagged_samples_go_whatever_their_age(window: Window, config: PlanConfig) -> None:
    config = replace(config, grouping=Grouping.IGNORE)
    window = replace(window, skips=np.zeros(len(window), np.int64))
    config = replace(config, max_skips=len(window), outlier_max_skips=None)
    flagged = set(np.flatnonzero(window.must_go).tolist())
    chosen = set(plan(window, config).chosen.tolist())
    if len(flagged) <= config.dispatch_batch_size:
        assert flagged <= chosen
    else:
        assert chosen <= flagged


def test_who_was_passed_over_often_enough_goes_before_what_is_flagged() -> None:
    """A group that had to go was the whole step, again and again, and a sample waited for ever."""
    group = [-1, -1, 28, 28, 28, 28]
    window = window_of([7, 4, 4, 4, 4, 4], group, skips=np.array([3, 1, 0, 0, 0, 0]))
    window = replace(window, must_go=window.group == 28)
    config = replace(BASE, max_skips=3, grouping=Grouping.STEP)
    assert 0 in plan(window, config, 4).chosen.tolist()


BASE = PlanConfig(dp_size=2, dispatch_batch_size=4, cost=tokens, micro_batch_size=1)


def test_round_robin_is_the_plain_split() -> None:
    step = plan(window_of([9, 1, 8, 2, 7]), replace(BASE, strategy=Strategy.ROUND_ROBIN))
    assert [[p.tolist() for p in rank] for rank in step.micro_batches] == [[[0], [2]], [[1], [3]]]
    assert step.excess == step.fifo_excess == pytest.approx((9 + 8) / 10 - 1)
    assert step.imbalance == step.fifo_imbalance == pytest.approx(17 / 10 - 1)


def test_every_other_strategy_takes_the_oldest() -> None:
    for strategy in (Strategy.ROUND_ROBIN, Strategy.GREEDY, Strategy.KK):
        step = plan(window_of([9, 1, 8, 2, 7, 7]), replace(BASE, strategy=strategy))
        assert sorted(step.chosen.tolist()) == [0, 1, 2, 3]


def test_the_window_strategy_looks_further_than_the_oldest() -> None:
    step = plan(window_of([9, 1, 1, 1, 1]), BASE)
    assert sorted(step.chosen.tolist()) == [1, 2, 3, 4]
    assert step.excess == 0
    assert step.lower_bound == 2


def test_a_step_may_be_smaller_and_is_filled_up_with_empty_micro_batches() -> None:
    config = replace(BASE, dp_size=4, dispatch_batch_size=32, micro_batch_size=2)
    step = plan(window_of([5, 6, 7]), config)
    assert step.num_micro_batches == 1
    assert sorted(len(rank[0]) for rank in step.micro_batches) == [0, 1, 1, 1]
    assert plan(window_of([1] * 20), config, take=9).num_micro_batches == 2


def test_a_count_can_be_rounded_up() -> None:
    config = replace(BASE, dispatch_batch_size=6, micro_batch_multiple=2)
    assert plan(window_of([1] * 6), config).num_micro_batches == 4
    budget = replace(config, micro_batch_size=None, micro_batch_tokens=100)
    assert plan(window_of([60] * 6), budget).num_micro_batches == 4


def test_a_sample_over_the_budget_is_refused_or_goes_alone() -> None:
    config = replace(BASE, micro_batch_size=None, micro_batch_tokens=10)
    with pytest.raises(SampleTooLong, match="11 tokens exceeds the micro-batch budget of 10"):
        plan(window_of([3, 11, 3, 3]), config)
    step = plan(window_of([3, 11, 3, 3]), replace(config, oversize=Oversize.ALONE))
    assert [1] in [part.tolist() for rank in step.micro_batches for part in rank]


def test_an_impossible_window_is_an_error_with_facts() -> None:
    with pytest.raises(PlanError, match="0 samples to plan"):
        plan(window_of([]), BASE)
    with pytest.raises(PlanError, match="smallest group has 5 samples and the step takes 4"):
        plan(window_of([1] * 5, [0] * 5), BASE)
    short = replace(window_of([1, 2]), skips=np.zeros(1, dtype=np.int64))
    with pytest.raises(PlanError, match="columns differ"):
        plan(short, BASE)
    for wrong in (np.nan, np.inf, -1.0, 1e300):
        config = replace(BASE, cost=partial(np.multiply, wrong))
        with pytest.raises(PlanError, match=r"negative, no number or above 1e\+280"):
            plan(window_of([1, 2]), config)


def test_whole_groups_are_chosen_up_to_the_largest_total_that_fits() -> None:
    config = replace(BASE, dispatch_batch_size=8)
    step = plan(window_of([1] * 9, [0] * 3 + [1] * 3 + [2] * 3), config)
    assert len(step.chosen) == 6
    mixed = plan(window_of([1] * 10, [0] * 3 + [1] * 3 + [2] * 3 + [-1]), config, take=7)
    assert len(mixed.chosen) == 7


def test_digests_differ_when_anybody_trains_on_something_else() -> None:
    plans = [
        plan(window_of([9, 1, 8, 2]), replace(BASE, strategy=strategy))
        for strategy in (Strategy.ROUND_ROBIN, Strategy.WINDOW)
    ]
    other = replace(BASE, dp_size=1, strategy=Strategy.ROUND_ROBIN)
    plans.append(plan(window_of([9, 1, 8, 2]), other))
    assert len({plan_digest(step) for step in plans}) == 3
    assert all(len(plan_digest(step)) == 32 for step in plans)


def trace(name: str) -> IntArray:
    path = TRACES / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"no length traces at ../shared/traces ({name}): this check needs real ones")
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    return np.array([int(row["prompt_tokens"]) + int(row["response_tokens"]) for row in rows])


@pytest.mark.parametrize(
    ("name", "budget", "ceiling"),
    [
        ("lineage_open_reasoning", 131072, 0.005),
        ("azure2023_conv", 32768, 0.003),
        ("reasoning_gym_rlvr_g3", 16384, 0.08),
    ],
)
def test_real_lengths_are_balanced_in_a_steady_state(
    name: str, budget: int, ceiling: float
) -> None:
    lengths = np.maximum(trace(name), 1)
    config = PlanConfig(
        dp_size=64,
        dispatch_batch_size=1024,
        cost=Quadratic(),
        micro_batch_tokens=budget,
        max_skips=8,
    )
    generator = np.random.default_rng(1)
    held, skips = np.empty(0, np.int64), np.empty(0, np.int64)
    upcoming = np.concatenate([generator.permutation(lengths) for _ in range(30)])
    time = work = 0.0
    for turn in range(45):
        fresh, upcoming = np.split(upcoming, [1280 - len(held)])
        held = np.concatenate((held, fresh))
        skips = np.concatenate((skips, np.zeros(len(fresh), dtype=np.int64)))
        none = np.full(1280, -1)
        step = plan(Window(held, skips, none, np.zeros(1280, dtype=bool)), config)
        assert skips.max() <= 8
        if turn >= 15:
            time += float(step.cost.max(axis=0).sum())
            work += float(step.cost.sum()) / 64
        keep = np.ones(1280, dtype=bool)
        keep[step.chosen] = False
        held, skips = held[keep], skips[keep] + 1
    assert time / work - 1 <= ceiling
