"""Claims about trades between micro-batches: within budgets, never longer, fewer and more even."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner import Quadratic
from rollout_planner.public.step import plan_step
from rollout_planner.split.packing import pack
from rollout_planner.split.parts import Batch, Parts, Work, time_of
from rollout_planner.split.trades import traded
from rollout_planner.types import IntArray, PlanConfig, Sync
from tests.support.examples import examples


def time_over_share(lengths: list[int], ranks: int, budget: int, sync: Sync) -> float:
    """What a step takes, over an even share of its work."""
    found = plan_step(lengths, dp_size=ranks, micro_batch_tokens=budget, sync=sync)
    work = Quadratic()
    cost = np.array([[work(np.array(lengths)[part]).sum() for part in rank] for rank in found])
    time = cost.sum(axis=1).max() if sync is Sync.STEP else cost.max(axis=0).sum()
    return float(time * ranks / cost.sum())


def tight(seed: int, ranks: int) -> tuple[IntArray, int]:
    """Lengths of 2 to 4 micro-batches a rank that are 98 % full."""
    generator = np.random.default_rng(seed)
    count = int(generator.integers(2, 5))
    lengths = np.clip(generator.lognormal(7, 0.6, 22 * ranks), 16, 6000).astype(np.int64)
    budget = int(lengths.sum() / (0.98 * ranks * count))
    return lengths, max(budget, int(lengths.max()))


def parts_of(batch: Batch, ranks: int, budget: int) -> Parts:
    """As they are packed before trades, whatever rank has them."""
    labels, M = pack(batch.x, batch.s, ranks, budget)
    place = labels % ranks * M + labels // ranks
    counts = np.bincount(place, minlength=ranks * M).reshape(ranks, M)
    return Parts(batch.order[np.argsort(place, kind="stable")], counts)


@examples(60)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.sampled_from(list(Sync)))
def test_a_trade_never_lengthens_a_step_or_breaks_its_budget(
    seed: int, ranks: int, sync: Sync
) -> None:
    lengths, budget = tight(seed, ranks)
    batch = Batch.of(Quadratic()(lengths), lengths)
    config = PlanConfig(
        dp_size=ranks,
        dispatch_batch_size=len(lengths),
        cost=Quadratic(),
        micro_batch_tokens=budget,
        sync=sync,
    )
    start = parts_of(batch, ranks, budget)
    found = traded(batch, start, config, 0.0, Work(2e-3))
    assert sorted(found.sequence.tolist()) == list(range(len(lengths)))
    assert found.counts.shape == start.counts.shape
    assert found.counts.min() >= min(1, start.counts.min())
    ends = np.cumsum(found.counts.ravel())[:-1]
    assert all(lengths[part].sum() <= budget for part in np.split(found.sequence, ends))
    assert time_of(batch, found, config) <= time_of(batch, start, config) * (1 + 1e-9)


def test_nearly_full_budgets_are_nearly_level() -> None:
    """Swaps of single samples, which have to keep tokens, left 1.4 % here on average."""
    found = []
    for seed in range(8):
        lengths, budget = tight(seed, 8)
        found.append(time_over_share(lengths.tolist(), 8, budget, Sync.MICRO_STEP))
    assert float(np.mean(found)) < 1.008


@pytest.mark.parametrize("budget", [52974, 53500])
def test_micro_batches_of_long_and_of_short_samples_share_them(budget: int) -> None:
    """Fifteen pairs of long ones, and three of short ones only: one of each in a micro-step."""
    long, short = np.linspace(19361, 21203, 30), np.linspace(1923, 2133, 168)
    lengths = np.concatenate((long, short)).astype(np.int64).tolist()
    assert time_over_share(lengths, 2, budget, Sync.MICRO_STEP) < 1.002
