"""Ranks of different speed get work in proportion to it, within every limit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner import Quadratic, plan
from rollout_planner.split.assign import lpt_budget
from rollout_planner.types import Grouping, Layout, PlanConfig, Sync, straggler_excess
from tests.support.examples import examples
from tests.support.windows import window_of

CONFIG = PlanConfig(
    dp_size=4, dispatch_batch_size=256, cost=Quadratic(), micro_batch_tokens=65536,
    grouping=Grouping.IGNORE,
)  # fmt: skip
SLOW = (1.0, 1.5, 1.0, 1.0)


def lengths(count: int, seed: int) -> Any:
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.0, count)
    return np.clip(drawn, 16, 30_000).astype(np.int64)


@pytest.mark.parametrize("sync", Sync)
def test_a_slow_rank_gets_so_much_less_that_nobody_waits_for_it(sync: Sync) -> None:
    config = replace(CONFIG, sync=sync, slowness=SLOW)
    for seed in range(5):
        window = window_of(lengths(256, seed))
        found, blind = plan(window, config), plan(window, replace(config, slowness=None))
        proportional = float(blind.cost.sum()) / config.capacity
        assert found.time < 1.04 * proportional
        assert (blind.cost * np.array(SLOW)[:, None]).sum(axis=1).max() > 1.3 * proportional
        assert found.lower_bound <= found.time
        assert found.excess < 0.04


#: A fixed number of samples leaves only which they are; padding, how many go together.
LIMITS: list[dict[str, Any]] = [
    {"micro_batch_tokens": 65536},
    {"micro_batch_size": 1},
    {"micro_batch_size": 4},
]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda each: "=".join(map(str, *each.items())))
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("sync", Sync)
def test_most_of_what_others_wait_for_it_is_saved_under_every_limit(
    sync: Sync, layout: Layout, limit: dict[str, Any]
) -> None:
    """Beside what the same limit costs ranks that are alike."""
    alike = PlanConfig(
        4, 128, Quadratic(), grouping=Grouping.IGNORE, sync=sync, layout=layout, **limit
    )
    waits, blind, even = [], [], []
    for seed in range(5):
        window = window_of(lengths(128, seed))
        found, told = plan(window, alike), plan(window, replace(alike, slowness=SLOW))
        waits.append(told.excess)
        even.append(found.excess)
        blind.append(straggler_excess(found.cost * np.array(SLOW)[:, None], sync))
    assert np.mean(waits) - np.mean(even) < 0.25 * (np.mean(blind) - np.mean(even))


def test_a_sample_goes_to_whoever_is_done_with_it_first() -> None:
    load, weight = np.array([4.0, 4, 2, 2]), np.ones(4, dtype=np.int64)
    ranks = lpt_budget(load, weight, 2, 4, slowness=(2.0, 1.0))
    assert ranks is not None
    assert np.bincount(ranks, weights=load).tolist() == [4, 8]
    assert lpt_budget(load, weight, 2, 1, slowness=(2.0, 1.0)) is None


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], PlanConfig]:
    count, ranks = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    tokens = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    groups = draw(st.lists(st.integers(-1, 5), min_size=count, max_size=count))
    limit: dict[str, Any] = draw(
        st.sampled_from([{"micro_batch_tokens": 64}, {"micro_batch_size": 3}])
    )
    slowness = draw(st.lists(st.sampled_from([0.5, 1.0, 1.3, 4.0]), min_size=ranks, max_size=ranks))
    config = PlanConfig(
        ranks, count, Quadratic(), **limit,
        layout=draw(st.sampled_from(Layout)), sync=draw(st.sampled_from(Sync)),
        grouping=draw(st.sampled_from([Grouping.IGNORE, Grouping.RANK])),
        slowness=tuple(slowness),
    )  # fmt: skip
    return tokens, groups, config


@examples(200)
@given(problems())
def test_limits_hold_and_it_takes_no_longer_than_the_same_plan_for_ranks_that_are_alike(
    problem: tuple[list[int], list[int], PlanConfig],
) -> None:
    tokens, groups, config = problem
    window = window_of(np.array(tokens), np.array(groups))
    found = plan(window, config)
    assert sorted(found.chosen.tolist()) == list(range(len(tokens)))
    rank_of = dict[int, int]()
    for rank, micro_batches in enumerate(found.micro_batches):
        for micro_batch in micro_batches:
            own = window.tokens[micro_batch]
            padded = config.layout is Layout.PADDED and len(own)
            held = int(own.max()) * len(own) if padded else int(own.sum())
            assert len(own) <= (config.micro_batch_size or 40)
            assert held <= (config.micro_batch_tokens or held)
            if config.grouping is Grouping.RANK:
                for group in set(window.group[micro_batch].tolist()) - {-1}:
                    assert rank_of.setdefault(group, rank) == rank
    again = plan(window, config)
    assert again.chosen.tolist() == found.chosen.tolist()
    assert found.lower_bound <= found.time * (1 + 1e-9)
