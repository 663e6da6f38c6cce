"""Claims about the order of micro-batches: nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner import Quadratic, plan, tokens
from rollout_planner.types import (
    CostModel,
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    MicroBatchOrder,
    Oversize,
    Plan,
    PlanConfig,
    Strategy,
    Sync,
    Window,
)
from tests.support.examples import examples
from tests.support.pipeline import step_time
from tests.support.windows import window_of

COSTS: list[CostModel] = [tokens, Quadratic()]
ORDERS = (MicroBatchOrder.PEAK_FIRST, MicroBatchOrder.ENDS_SMALL)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Window, PlanConfig]:
    R, M, m = draw(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)))
    budget = draw(st.one_of(st.none(), st.integers(60, 400)))
    n = draw(st.integers(1, 48))
    config = PlanConfig(
        dp_size=R,
        dispatch_batch_size=R * M * m,
        cost=draw(st.sampled_from(COSTS)),
        micro_batch_size=m if budget is None else None,
        micro_batch_tokens=budget,
        layout=draw(st.sampled_from(Layout)) if budget is None else Layout.PACKED,
        sync=draw(st.sampled_from(Sync)),
        strategy=draw(st.sampled_from(Strategy)),
        grouping=draw(st.sampled_from((Grouping.IGNORE, Grouping.RANK))),
        oversize=Oversize.ALONE,
        micro_batch_multiple=draw(st.integers(1, 2)),
        sample_length_multiple=draw(st.sampled_from((1, 16))),
    )
    lengths = draw(st.lists(st.integers(1, 200), min_size=n, max_size=n))
    group = [at // 2 for at in range(n)] if config.dispatch_batch_size > 1 else [-1] * n
    return window_of(lengths, group), config


def in_memory(step: Plan, window: Window, config: PlanConfig) -> IntArray:
    """Tokens of each micro-batch as ranks pad them, int64[R, M]."""
    multiple = config.sample_length_multiple
    padded = -(-window.tokens // multiple) * multiple

    def held(part: IntArray) -> int:
        if not len(part):
            return 0
        each = padded[part]
        return int(each.max() * len(part) if config.layout is Layout.PADDED else each.sum())

    return np.array([[held(part) for part in rank] for rank in step.micro_batches])


def as_sets(step: Plan) -> list[list[list[int]]]:
    """Micro-batches of each rank, as what is in them."""
    return [[sorted(part.tolist()) for part in rank] for rank in step.micro_batches]


@examples(200)
@given(cases(), st.sampled_from(ORDERS))
def test_an_order_is_a_permutation_that_waits_no_longer(
    case: tuple[Window, PlanConfig], order: MicroBatchOrder
) -> None:
    window, config = case
    planned = plan(window, replace(config, micro_batch_order=MicroBatchOrder.AS_PLANNED))
    step = plan(window, replace(config, micro_batch_order=order))
    assert [sorted(rank) for rank in as_sets(step)] == [sorted(rank) for rank in as_sets(planned)]
    if config.sync is Sync.MICRO_STEP:
        columns = list(zip(*as_sets(step), strict=True))
        assert sorted(columns) == sorted(zip(*as_sets(planned), strict=True))
    assert np.array_equal(np.sort(step.cost, axis=1), np.sort(planned.cost, axis=1))
    assert step.excess == pytest.approx(planned.excess, rel=1e-12, abs=1e-12)
    assert (step.fifo_excess, step.lower_bound) == (planned.fifo_excess, planned.lower_bound)


def rows_in_order(size: FloatArray | IntArray, sync: Sync) -> IntArray | FloatArray:
    """What has to be in order: each rank's own, or each micro-step's largest."""
    return size.max(axis=0)[None] if sync is Sync.MICRO_STEP else size


@examples(200)
@given(cases())
def test_the_peak_comes_first_and_fillers_last(case: tuple[Window, PlanConfig]) -> None:
    window, config = case
    held = in_memory(plan(window, config), window, config)
    assert (np.diff(rows_in_order(held, config.sync), axis=1) <= 0).all()


@examples(200)
@given(cases())
def test_small_ends_rise_to_one_peak_and_fall(case: tuple[Window, PlanConfig]) -> None:
    """The two smallest are at the ends, the next two beside them, and so on."""
    window, config = case
    step = plan(window, replace(config, micro_batch_order=MicroBatchOrder.ENDS_SMALL))
    for row in rows_in_order(step.cost, config.sync).tolist():
        ends = row.copy()
        while len(ends) > 2:
            at_ends = [ends.pop(0), ends.pop()]
            assert max(at_ends) <= min(ends) * (1 + 1e-12)


def test_examples_by_hand() -> None:
    one = PlanConfig(
        dp_size=1,
        dispatch_batch_size=5,
        cost=tokens,
        micro_batch_size=1,
        strategy=Strategy.ROUND_ROBIN,
    )
    window = window_of([4, 9, 7, 2, 8])
    small_ends = replace(one, micro_batch_order=MicroBatchOrder.ENDS_SMALL)
    assert plan(window, one).cost.tolist() == [[9, 8, 7, 4, 2]]
    assert plan(window, small_ends).cost.tolist() == [[2, 7, 9, 8, 4]]


def test_peak_first_goes_by_padded_tokens_and_not_by_cost() -> None:
    """Four of 10 cost less than one of 38 under a steep cost, and take more memory."""
    config = PlanConfig(
        dp_size=1,
        dispatch_batch_size=5,
        cost=Quadratic(1, 0, 0),
        micro_batch_tokens=40,
        sample_length_multiple=4,
    )
    step = plan(window_of([38, 10, 10, 10, 9]), replace(config, micro_batch_tokens=48))
    assert [len(part) for part in step.micro_batches[0]] == [4, 1]
    assert step.cost[0, 0] < step.cost[0, 1]


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_on_a_clock_a_pipeline_with_small_ends_is_the_fastest(stages: int, count: int) -> None:
    """And it takes no longer than its sum and its largest once more for each further stage."""
    generator = np.random.default_rng(count)
    time: dict[MicroBatchOrder, float] = dict.fromkeys(MicroBatchOrder, 0.0)
    for _ in range(40):
        lengths = np.maximum(generator.lognormal(5, 0.8, count).astype(int), 1)
        config = PlanConfig(
            dp_size=1,
            dispatch_batch_size=count,
            cost=tokens,
            micro_batch_size=1,
            sync=Sync.STEP,
            strategy=Strategy.ROUND_ROBIN,
            pipeline_stages=stages,
        )
        for order in MicroBatchOrder:
            step = plan(window_of(lengths.tolist()), replace(config, micro_batch_order=order))
            took = step_time(step.cost[0].tolist(), stages)
            time[order] += took
            if order is not MicroBatchOrder.AS_PLANNED:
                assert took <= step.time * (1 + 1e-9)
    ends, peak, plain = (
        time[order]
        for order in (
            MicroBatchOrder.ENDS_SMALL,
            MicroBatchOrder.PEAK_FIRST,
            MicroBatchOrder.AS_PLANNED,
        )
    )
    assert ends < 0.97 * peak
    assert peak < plain
