"""Claims about trades between micro-batches: within budgets, never longer, fewer and more even."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_dispatcher.balance import Quadratic
from rollout_dispatcher.balance.public.step import plan_step
from rollout_dispatcher.balance.split.budgets.trades import squeezed, traded
from rollout_dispatcher.balance.split.packing import pack
from rollout_dispatcher.balance.split.parts import Batch, Parts, time_of
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import IntArray, PlanConfig, Sync

#: Three a rank, half of them above a third of the budget.
FEW = [3205, 3130, 3152, 3151, 5005, 1198, 3461, 2766, 4824, 1659, 3496, 2163, 4669, 1870, 5115]
FEW += [6089, 4239, 462, 6124, 4480, 6171, 3794, 6279, 3503]
#: 14,089 tokens, of which two micro-batches hold 14,106.
FULL = [245, 253, 312, 326, 385, 415, 561, 830, 842, 1668, 1783, 1917, 2172, 2380]

#: Capped: a third of a budget of 37 and a little, or as good as nothing, on 16 ranks.
CAPPED = [17] * 29 + [16] * 4 + [14, 13, 12, 12, 12, 12, 11, 10, 10, 10, 9, 9, 9, 9, 8, 7, 6, 6]
CAPPED += [5, 5, 5, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1]


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


@settings(max_examples=60, deadline=None)
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
    found = traded(batch, [start], config, 0.0, Work(2e-3))
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


def test_few_large_samples_are_shared_out_by_differences() -> None:
    """Filling budgets greedily takes 1.13 of an even share."""
    assert time_over_share(FEW, 8, 9018, Sync.MICRO_STEP) < 1.06


def test_micro_batches_that_are_equally_dear_become_cheaper_one_after_the_other() -> None:
    """49 tokens over both micro-steps, of 48.06 on average; as long as one trade had to shorten the
    step, it was 52.
    """
    assert time_over_share(CAPPED, 16, 37, Sync.MICRO_STEP) < 1.03


@pytest.mark.parametrize("budget", [52974, 53500])
def test_micro_batches_of_long_and_of_short_samples_share_them(budget: int) -> None:
    """Fifteen pairs of long ones, and three of short ones only: one of each in a micro-step."""
    long, short = np.linspace(19361, 21203, 30), np.linspace(1923, 2133, 168)
    lengths = np.concatenate((long, short)).astype(np.int64).tolist()
    assert time_over_share(lengths, 2, budget, Sync.MICRO_STEP) < 1.002


def test_a_budget_that_only_just_holds_all_is_filled() -> None:
    """Best fit and first fit need a third micro-batch."""
    found = plan_step(FULL, dp_size=2, micro_batch_tokens=7053)
    assert [len(rank) for rank in found] == [1, 1]


@pytest.mark.parametrize("bins", [2, 3, 5])
def test_what_is_squeezed_keeps_the_budget(bins: int) -> None:
    lengths = -np.sort(-np.random.default_rng(bins).integers(1, 50, 8 * bins))
    fitted, least = np.arange(len(lengths)), -(-int(lengths.sum()) // bins)
    for budget in (least - 1, least, least + 3):
        labels = squeezed(lengths, bins, budget, fitted)
        if labels is not None:
            assert np.bincount(labels, weights=lengths, minlength=bins).max() <= budget
        assert budget < least or labels is not None
