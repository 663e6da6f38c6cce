"""Ranks of equally many samples: legal, and no longer than verl's own way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.balance import plan_step
from rollout_dispatcher.errors import UnequalPartitions
from rollout_dispatcher.plan import IntArray, Sync
from tests.bench.seams import by_verl, excess


@given(
    st.integers(1, 4), st.integers(1, 12), st.integers(100, 400), st.sampled_from(Sync),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
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


def heavy(seed: int, n: int) -> IntArray:
    rng = np.random.default_rng(seed)
    return np.minimum(rng.lognormal(8.6, 1.1, n).astype(np.int64) + 1, 67_000)


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize(("n", "ranks"), [(128, 8), (256, 16), (256, 32)])
def test_ranks_wait_no_longer_than_as_verl_shares_out(n: int, ranks: int, sync: Sync) -> None:
    for seed in range(4):
        lengths = heavy(seed, n)
        ours = plan_step(
            lengths, dp_size=ranks, micro_batch_tokens=67_000, sync=sync, equal_counts=True
        )
        theirs = by_verl(lengths, ranks, 67_000)
        assert excess(ours, lengths, sync) <= excess(theirs, lengths, sync) + 1e-3


def test_what_cannot_be_equal_is_refused() -> None:
    with pytest.raises(UnequalPartitions, match="7 samples do not divide by dp_size 2"):
        plan_step([5] * 7, dp_size=2, micro_batch_tokens=10, equal_counts=True)
    for limit in (
        {"micro_batch_size": 2},
        {"micro_batch_tokens": 20, "layout": "padded"},
        {"micro_batch_tokens": 20, "groups": [0] * 8},
    ):
        with pytest.raises(UnequalPartitions, match="equal_counts is for packed samples"):
            plan_step([5] * 8, dp_size=2, equal_counts=True, **limit)
