"""Claims about the cap on tokens of a rank and step: kept, by a smaller step if need be."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ConfigError
from rollout_planner import Quadratic, plan, plan_digest, tokens
from rollout_planner.errors import validate_config
from rollout_planner.types import (
    CostModel,
    Grouping,
    Oversize,
    PlanConfig,
    Strategy,
    Sync,
    Window,
)
from tests.planner.test_ordering import cases, in_memory
from tests.support.examples import examples
from tests.support.windows import window_of

SQUARE: CostModel = Quadratic(1, 0, 0)
TWO = PlanConfig(
    dp_size=2,
    dispatch_batch_size=8,
    cost=SQUARE,
    micro_batch_tokens=8,
    sync=Sync.STEP,
)


@examples(300)
@given(cases(), st.integers(1, 1200), st.booleans())
def test_no_rank_is_above_the_cap_but_with_one_sample_or_group(
    case: tuple[Window, PlanConfig], cap: int, whole: bool
) -> None:
    """Where nothing has to go; `whole` steps have all that was asked for."""
    window, config = case
    budget, nothing = config.micro_batch_tokens or 0, np.zeros(len(case[0]), np.bool_)
    config = replace(config, rank_tokens=max(cap, budget, 16), max_skips=10**6)
    config = replace(config, outlier_max_skips=None)
    window = replace(window, must_go=nothing, skips=np.zeros(len(window), np.int64))
    step = plan(window, config, whole=whole)
    chosen = step.chosen.tolist()
    assert 0 < len(chosen) == len(set(chosen)) <= min(len(window), config.dispatch_batch_size)
    assert {len(rank) for rank in step.micro_batches} == {step.num_micro_batches}
    if whole:
        assert plan(window, replace(config, rank_tokens=None), whole=True).chosen.size == len(
            chosen
        )
        return
    held = in_memory(step, window, config).sum(axis=1)
    above = np.flatnonzero(held > (config.rank_tokens or 0))
    alone = 1 if config.grouping is Grouping.IGNORE else 2
    assert all(sum(map(len, step.micro_batches[r])) <= alone for r in above) or len(chosen) <= alone


@examples(100)
@given(cases())
def test_a_cap_that_nobody_reaches_changes_nothing(case: tuple[Window, PlanConfig]) -> None:
    window, config = case
    assert plan_digest(plan(window, replace(config, rank_tokens=10**9))) == plan_digest(
        plan(window, config)
    )


def test_tokens_are_shared_out_at_the_price_of_waiting_where_they_have_to_be() -> None:
    window = window_of([4, 2, 2, 2, 2])
    free, capped = (plan(window, replace(TWO, rank_tokens=cap)) for cap in (None, 8))
    assert sorted(in_memory(free, window, TWO).sum(axis=1).tolist()) == [4, 8]
    assert plan_digest(free) == plan_digest(capped)
    tight = plan(window, replace(TWO, rank_tokens=8, micro_batch_tokens=6, dispatch_batch_size=5))
    assert in_memory(tight, window, TWO).sum(axis=1).max() <= 8
    tight = plan(window, replace(TWO, rank_tokens=6, micro_batch_tokens=6))
    assert sorted(in_memory(tight, window, TWO).sum(axis=1).tolist()) == [6, 6]
    assert len(tight.chosen) == 5


def test_where_ranks_meet_at_every_micro_step_dealing_anew_is_free() -> None:
    generator = np.random.default_rng(1)
    lengths = np.clip(generator.lognormal(5, 1, 96), 1, 900).astype(int).tolist()
    window = window_of(lengths)
    config = replace(
        TWO, dp_size=4, dispatch_batch_size=96, micro_batch_tokens=1000, sync=Sync.MICRO_STEP
    )
    free = plan(window, config)
    most = int(in_memory(free, window, config).sum(axis=1).max())
    capped = plan(window, replace(config, rank_tokens=most - 1))
    assert in_memory(capped, window, config).sum(axis=1).max() < most
    assert len(capped.chosen) == 96
    assert capped.excess == pytest.approx(free.excess)


def test_a_step_is_smaller_where_all_are_too_much_and_the_rest_goes_next() -> None:
    """Nothing waits longer than what is left makes it."""
    config = replace(TWO, dispatch_batch_size=40, cost=tokens, rank_tokens=100)
    lengths = np.full(40, 8)
    seen: list[int] = []
    while len(lengths):
        step = plan(window_of(lengths.tolist()), config)
        assert in_memory(step, window_of(lengths.tolist()), config).sum(axis=1).max() <= 100
        seen.append(len(step.chosen))
        lengths = np.delete(lengths, step.chosen)
    assert seen == [24, 16]


def test_what_exceeds_the_cap_alone_goes_alone() -> None:
    config = replace(
        TWO, micro_batch_tokens=None, micro_batch_size=1, rank_tokens=10, strategy=Strategy.GREEDY
    )
    assert sorted(plan(window_of([50, 60]), config).chosen.tolist()) == [0, 1]
    assert sorted(plan(window_of([50, 60, 5]), config).chosen.tolist()) == [0, 1]
    together = replace(config, grouping=Grouping.STEP)
    window = window_of([50, 60, 1], [0, 0, 0])
    assert sorted(plan(window, together).chosen.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("groups", [Grouping.IGNORE, Grouping.RANK])
def test_what_exceeds_the_cap_and_has_to_go_leaves_the_others_their_ranks(
    groups: Grouping,
) -> None:
    """It once made a step of 512 samples one of 4."""
    lengths = np.full(512, 1000)
    lengths[100] = 30_000
    window = window_of(lengths.tolist(), (np.arange(512) // 8).tolist())
    window.skips[96:104] = 6
    config = PlanConfig(
        dp_size=64,
        dispatch_batch_size=512,
        cost=SQUARE,
        micro_batch_tokens=16_384,
        oversize=Oversize.ALONE,
        rank_tokens=20_000,
        grouping=groups,
    )
    validate_config(config)
    step = plan(window, config)
    assert len(step.chosen) == 512
    (above,) = (rank for rank in step.micro_batches if 100 in np.concatenate(rank))
    alone = np.concatenate(above).tolist()
    assert sorted(alone) == ([100] if groups is Grouping.IGNORE else list(range(96, 104)))


def test_a_cap_below_one_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank_tokens is 7, and one micro-batch may have 8"):
        validate_config(replace(TWO, rank_tokens=7))


@pytest.mark.parametrize("groups", [Grouping.IGNORE, Grouping.STEP])
def test_nobody_waits_too_long_for_a_cap_that_hardly_any_step_keeps(groups: Grouping) -> None:
    """Steps of a few samples each once left the others to wait for ever."""
    generator = np.random.default_rng(3)
    config = PlanConfig(
        dp_size=4,
        dispatch_batch_size=32,
        cost=SQUARE,
        micro_batch_tokens=1000,
        rank_tokens=1000,
        max_skips=4,
        grouping=groups,
    )
    lengths, skips = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for _ in range(24):
        fresh = generator.integers(300, 900, 40 - len(lengths) + len(lengths) % 2)
        lengths = np.append(lengths, fresh)
        skips = np.append(skips, np.zeros(len(fresh), np.int64))
        window = window_of(lengths.tolist(), (np.arange(len(lengths)) // 2).tolist())
        window.skips[:] = skips
        chosen = plan(window, config).chosen
        lengths, skips = np.delete(lengths, chosen), np.delete(skips, chosen) + 1
        assert skips.max(initial=0) <= config.max_skips
