"""Claims about plans for pipelines: the formula, its bound, and what a splitter makes of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner import Quadratic, plan, tokens
from rollout_planner.split.assign import bins_onto_ranks
from rollout_planner.types import (
    CostModel,
    FloatArray,
    Grouping,
    Layout,
    Oversize,
    PlanConfig,
    Strategy,
    Sync,
    straggler_excess,
)
from tests.planner.test_partition import full_batches
from tests.support.examples import examples
from tests.support.windows import window_of

FOUR = PlanConfig(
    dp_size=4,
    dispatch_batch_size=64,
    cost=tokens,
    micro_batch_size=2,
    sync=Sync.STEP,
    pipeline_stages=4,
)


def pipeline_time(load: FloatArray, stages: int) -> float:
    """By the definition: a rank's sum, and its largest once more for each further stage."""
    return max(float(sum(rank) + (stages - 1) * max(rank)) for rank in load.tolist())


@given(full_batches(), st.integers(2, 9))
def test_a_split_for_pipelines_is_a_permutation_no_worse_than_equal_sums(
    batch: tuple[FloatArray, int, int, int], stages: int
) -> None:
    x, R, M, m = batch
    load, times = x.reshape(R * M, m).sum(axis=1), []
    for place in (bins_onto_ranks(load, R, M, each) for each in (stages, 1)):
        assert sorted(place.tolist()) == list(range(R * M))
        times.append(pipeline_time(load[np.argsort(place)].reshape(R, M), stages))
    assert times[0] <= times[1] * (1 + 1e-12)


COSTS: list[CostModel] = [tokens, Quadratic()]


@st.composite
def configs(draw: st.DrawFn) -> PlanConfig:
    R, M, m = draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)))
    by_count = draw(st.booleans())
    return PlanConfig(
        dp_size=R,
        dispatch_batch_size=R * M * m,
        cost=draw(st.sampled_from(COSTS)),
        micro_batch_size=m if by_count else None,
        micro_batch_tokens=None if by_count else 300,
        layout=draw(st.sampled_from(Layout)) if by_count else Layout.PACKED,
        sync=draw(st.sampled_from(Sync)),
        strategy=draw(st.sampled_from(Strategy)),
        grouping=draw(st.sampled_from((Grouping.IGNORE, Grouping.RANK))),
        oversize=Oversize.ALONE,
        pipeline_stages=draw(st.integers(2, 8)),
    )


LENGTHS = st.lists(st.one_of(st.integers(1, 200), st.just(5000)), min_size=1, max_size=48)


@examples(300)
@given(LENGTHS, configs())
def test_time_excess_and_bound_follow_the_formula(lengths: list[int], config: PlanConfig) -> None:
    step = plan(window_of(lengths), config)
    stages = config.pipeline_stages
    paces = step.cost if config.sync is Sync.STEP else step.cost.max(axis=0)[None]
    assert step.time == pytest.approx(pipeline_time(paces, stages))
    even = step.cost.sum() / config.dp_size * (1 + (stages - 1) / step.num_micro_batches)
    assert step.even_time == pytest.approx(even)
    assert step.excess == pytest.approx(step.time / even - 1, abs=1e-12)
    assert step.excess >= -1e-12
    assert step.lower_bound <= step.time * (1 + 1e-12)


def test_micro_batches_that_are_alike_waste_nothing() -> None:
    step = plan(window_of([7] * 64), FOUR)
    assert step.excess == 0
    assert step.time == step.lower_bound == 7 * 2 * (8 + 3)


def test_with_one_stage_it_is_what_it_was() -> None:
    cost = np.array([[3.0, 1.0], [2.0, 4.0]])
    assert straggler_excess(cost, Sync.STEP) == pytest.approx(0.2)
    assert straggler_excess(cost, Sync.MICRO_STEP) == pytest.approx(0.4)
    assert straggler_excess(cost, Sync.STEP, 3) == pytest.approx((6 + 8) / (5 * 2) - 1)
    assert straggler_excess(np.zeros((2, 2)), Sync.STEP, 3) == 0


@pytest.mark.parametrize("ranks", [2, 3, 6, 7])
@pytest.mark.parametrize("sync", Sync)
def test_an_excess_is_never_below_0(ranks: int, sync: Sync) -> None:
    """Of samples all alike rounding would have it there, and a counter that it is added to fall."""
    for length in range(1000, 1200):
        for micro_batches in (1, 3, 5):
            cost = np.full((ranks, micro_batches), 1.37e-3 * length)
            assert 0 <= straggler_excess(cost, sync) < 1e-9


@pytest.mark.parametrize(
    ("form", "share"),
    [({}, 0.97), ({"micro_batch_size": None, "micro_batch_tokens": 2000}, 1.0)],
)
def test_micro_batches_are_levelled_on_each_rank(form: dict[str, Any], share: float) -> None:
    """At the price that ranks' sums differ: it is the time of the pipeline that counts."""
    generator = np.random.default_rng(3)
    config = replace(FOUR, **form)
    time = plain = 0.0
    for _ in range(20):
        lengths = np.clip(generator.lognormal(5.5, 0.9, 64), 1, 1900).astype(int)
        window = window_of(lengths.tolist())
        time += plan(window, config).time
        plain += pipeline_time(plan(window, replace(config, pipeline_stages=1)).cost, 4)
    assert time < share * plain


def test_what_is_no_outlier_for_one_stage_is_one_for_eight() -> None:
    """The largest micro-batch counts eight times, so it is held back for others like it."""
    lengths = [10] * 320
    lengths[3] = 170
    config = replace(
        FOUR,
        dispatch_batch_size=256,
        micro_batch_size=None,
        micro_batch_tokens=100,
        oversize=Oversize.ALONE,
    )
    assert 3 in plan(window_of(lengths), replace(config, pipeline_stages=1)).chosen
    assert 3 not in plan(window_of(lengths), replace(config, pipeline_stages=8)).chosen
