"""What a user takes for granted of plans: they take no longer than textbooks', and no longer with a
weaker barrier, more micro-batches or a wider window.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_planner import Quadratic, plan
from rollout_planner.objective import pigeonhole_bound
from rollout_planner.types import Grouping, IntArray, PlanConfig, Strategy, Sync
from tests.bench.properties import Step
from tests.support.windows import window_of

CONFIG = PlanConfig(
    dp_size=64,
    dispatch_batch_size=1024,
    cost=Quadratic(),
    micro_batch_tokens=65536,
    grouping=Grouping.IGNORE,
)


def short_and_long(long: int, count: int = 1024) -> IntArray:
    """So many of 31,000 tokens or so, two of which fit a budget, and short ones."""
    rng = np.random.default_rng(long)
    tokens = rng.integers(500, 3300, count)
    tokens[rng.permutation(count)[:long]] = rng.integers(30_500, 32_600, long)
    return tokens


@pytest.mark.parametrize("sync", Sync)
@given(st.integers(0, 2**32 - 1))
@example(1084)
@example(1113)
def test_no_textbook_takes_less_under_a_budget(sync: Sync, seed: int) -> None:
    """However little a plan waits, and also if they have other numbers of micro-batches."""
    drawn = Step.drawn(np.random.default_rng(seed))
    step = replace(drawn, config=replace(drawn.config, sync=sync))
    theirs = [step.lpt(), step.karmarkar_karp(), step.planned(strategy=Strategy.KK)[0]]
    assert step.planned()[0] <= min(theirs) * (1 + 1e-9)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_no_way_to_share_out_is_below_the_pigeonholes(costs: list[int], ranks: int) -> None:
    best = min(
        max(sum(c for c, at in zip(costs, where, strict=True) if at == r) for r in range(ranks))
        for where in product(range(ranks), repeat=len(costs))
    )
    x = -np.sort(-np.array(costs, dtype=np.float64))
    assert pigeonhole_bound(x, ranks) <= best


def test_the_pigeonholes_know_one_long_sample_too_many() -> None:
    x = np.concatenate((np.full(193, 10.0), np.ones(400)))
    assert pigeonhole_bound(x, 64) == 40
    assert pigeonhole_bound(x[1:], 64) == 31


def test_one_more_micro_batch_is_taken_where_it_pays() -> None:
    """222 long samples are 3 to 4 a rank; in pairs, as the fewest have them, 4 or 6."""
    found = plan(window_of(short_and_long(222)), CONFIG)
    fewest = plan(window_of(short_and_long(222)), replace(CONFIG, micro_batch_multiple=3))
    assert (found.num_micro_batches, fewest.num_micro_batches) == (4, 3)
    begin = 0.04 * 65536 * float(found.cost.sum()) / float(short_and_long(222).sum())
    assert found.time + 4 * begin < fewest.time + 3 * begin


def test_where_one_sample_rules_no_more_micro_batches_are_taken() -> None:
    tokens = np.full(256, 100, dtype=np.int64)
    tokens[0] = 60_000
    assert plan(window_of(tokens), replace(CONFIG, dispatch_batch_size=256)).num_micro_batches == 1


@pytest.mark.parametrize("long", [195, 205])
def test_a_window_holds_the_long_samples_that_would_be_one_too_many(long: int) -> None:
    """Of 205 over 64 ranks one has 4, and most have 3; 192 or 256 divide well."""
    arrived = plan(window_of(short_and_long(long)), CONFIG)
    chosen = plan(window_of(short_and_long(long * 5 // 4, 1280)), CONFIG)
    assert chosen.excess < max(arrived.excess / 2, 0.02)


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_wait_once_a_step_wait_no_longer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.lognormal(8.5, 1.2, 640).astype(np.int64) + 1, 65_000)
    config = replace(CONFIG, dp_size=32, dispatch_batch_size=512)
    often, once = (plan(window_of(tokens), replace(config, sync=sync)) for sync in reversed(Sync))
    assert (often.sync, once.sync) == (Sync.MICRO_STEP, Sync.STEP)
    assert once.excess <= often.excess + 1e-3
