"""Ranks of equally many samples: legal, and no longer than verl's own way."""

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_dispatcher.errors import UnequalPartitions
from rollout_planner import Quadratic, get_seqlen_balanced_partitions, plan_step
from rollout_planner.split.padded import begin_cost
from rollout_planner.types import IntArray, Sync, step_time

Step = list[list[list[int]]]

#: Ranks, samples of each, budget, sync, and what the lengths are drawn with.
cases = given(
    st.integers(1, 4), st.integers(1, 12), st.integers(100, 400), st.sampled_from(Sync),
    st.integers(0, 2**32 - 1),
)  # fmt: skip


@cases
def test_every_rank_has_as_many_samples_and_no_micro_batch_too_much(
    ranks: int, each: int, budget: int, sync: Sync, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 100, ranks * each)
    step = plan_step(
        lengths, dp_size=ranks, micro_batch_tokens=budget, sync=sync, equal_counts=True
    )
    assert sorted(i for rank in step for part in rank for i in part) == list(range(ranks * each))
    assert {sum(map(len, rank)) for rank in step} == {each}
    assert len({len(rank) for rank in step}) == 1
    assert all(part and lengths[part].sum() <= budget for rank in step for part in rank)


def by_verl(lengths: IntArray, ranks: int, budget: int) -> Step | None:
    """As verl does it: Karmarkar-Karp over ranks and within, more until none is over the budget."""
    work = Quadratic()(lengths).astype(np.int64)
    parts = get_seqlen_balanced_partitions(work, ranks, equal_size=True)
    for count in range(1, len(lengths) // ranks + 1):
        step = [
            [
                [part[i] for i in own]
                for own in get_seqlen_balanced_partitions(work[part], count, False)
            ]
            for part in parts
        ]
        if all(lengths[own].sum() <= budget for rank in step for own in rank):
            return [sorted(rank, key=lambda own: -int(work[own].sum())) for rank in step]
    return None


def time(step: Step, lengths: IntArray, sync: Sync, budget: int) -> float:
    """Of a step, with what it costs to begin its micro-batches, over an even share."""
    work = Quadratic()(lengths)
    load = np.array([[float(work[part].sum()) for part in rank] for rank in step])
    begun = len(step[0]) * begin_cost(work, lengths, budget)
    return (step_time(load, sync) + begun) * len(step) / float(work.sum())


def heavy(seed: int, n: int) -> IntArray:
    rng = np.random.default_rng(seed)
    return np.minimum(rng.lognormal(8.6, 1.1, n).astype(np.int64) + 1, 67_000)


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize(("n", "ranks"), [(128, 8), (256, 16), (256, 32)])
def test_ranks_wait_no_longer_than_as_verl_shares_out(n: int, ranks: int, sync: Sync) -> None:
    for seed in range(4):
        beside_verl(heavy(seed, n), ranks, 67_000, sync)


@cases
@example(1, 9, 121, Sync.STEP, 9)  # one rank, which needs a micro-batch more by best fit
def test_no_step_is_longer_than_verl_s(
    ranks: int, each: int, budget: int, sync: Sync, seed: int
) -> None:
    spread = np.random.default_rng(seed)
    beside_verl(spread.integers(1, spread.integers(2, 101), ranks * each), ranks, budget, sync)


def beside_verl(lengths: IntArray, ranks: int, budget: int, sync: Sync) -> None:
    """Ours is as short, but for a thousandth."""
    theirs = by_verl(lengths, ranks, budget)
    if theirs is None:
        return
    ours = plan_step(
        lengths, dp_size=ranks, micro_batch_tokens=budget, sync=sync, equal_counts=True
    )
    assert time(ours, lengths, sync, budget) <= time(theirs, lengths, sync, budget) + 1e-3


@given(
    st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), st.sampled_from(Sync),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_no_step_of_one_size_is_longer_than_verl_s(
    ranks: int, count: int, size: int, sync: Sync, seed: int
) -> None:
    lengths = heavy(seed, ranks * count * size)
    work = Quadratic()(lengths)
    own = get_seqlen_balanced_partitions(work, ranks, equal_size=True)
    rising = [sorted(part, key=lambda i: work[i]) for part in own]
    theirs = [part[::2] + part[1::2][::-1] for part in rising]
    ours = plan_step(lengths, dp_size=ranks, micro_batch_size=size, sync=sync, equal_counts=True)
    assert {len(part) for rank in ours for part in rank} == {size}
    cut = [[part[at : at + size] for at in range(0, len(part), size)] for part in theirs]
    assert time(ours, lengths, sync, 1) <= time(cut, lengths, sync, 1) * (1 + 1e-9)


@given(
    st.integers(1, 4), st.integers(1, 6), st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.sampled_from(Sync), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_there_are_as_many_micro_batches_as_asked_for_and_what_is_too_long_goes_alone(
    ranks: int, each: int, asked: tuple[int, int], sync: Sync, seed: int
) -> None:
    lengths, (minimum, multiple) = np.random.default_rng(seed).integers(1, 150, ranks * each), asked
    step = plan_step(
        lengths, dp_size=ranks, micro_batch_tokens=100, sync=sync, equal_counts=True,
        minimum=minimum, multiple=multiple, oversize="alone",
    )  # fmt: skip
    (count,) = {len(rank) for rank in step}
    assert count >= minimum
    assert count % multiple == 0
    assert {sum(map(len, rank)) for rank in step} == {each}
    parts = [part for rank in step for part in rank]
    assert all(len(part) < 2 or lengths[part].sum() <= 100 for part in parts)
    assert count > each or all(parts)


def test_what_cannot_be_equal_is_refused() -> None:
    with pytest.raises(UnequalPartitions, match="7 samples do not divide by dp_size 2"):
        plan_step([5] * 7, dp_size=2, micro_batch_tokens=10, equal_counts=True)
    with pytest.raises(UnequalPartitions, match="8 samples do not divide by dp_size 2 x micro_"):
        plan_step([5] * 8, dp_size=2, micro_batch_size=3, equal_counts=True)
    equal = partial(plan_step, [5] * 8, dp_size=2, micro_batch_tokens=20, equal_counts=True)
    for limited in (partial(equal, layout="padded"), partial(equal, groups=[0] * 8)):
        with pytest.raises(UnequalPartitions, match="equal_counts is for packed samples"):
            limited()
