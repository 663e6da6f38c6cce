"""The length-bucketing sampler: every sample once an epoch, like lengths at the same time."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ConfigError
from rollout_workers import LengthBucketSampler

LENGTHS = np.random.default_rng(7).lognormal(6, 1.2, 1000).astype(int) + 1


def ranks_of(size: int, lengths: Any = LENGTHS, **options: Any) -> list[LengthBucketSampler]:
    options = {"batch_size": 4, **options}
    return [
        LengthBucketSampler(lengths, dp_rank=rank, dp_size=size, **options) for rank in range(size)
    ]


def steps_of(size: int, batch: int, **options: Any) -> Any:
    """Indices [step, row, rank] of the whole steps of an epoch."""
    drawn = np.array([list(each) for each in ranks_of(size, batch_size=batch, **options)])
    whole = drawn.shape[1] // batch * batch
    return drawn[:, :whole].reshape(size, -1, batch).transpose(1, 2, 0)


def waiting(work: Any) -> float:
    """What the slowest rank does beyond the mean; work [..., rank]."""
    return float(work.max(axis=-1).sum() / work.mean(axis=-1).sum() - 1)


def distance(steps: Any, lengths: Any) -> float:
    """Kolmogorov-Smirnov distance of steps' lengths from all, the mean of it."""
    every = np.sort(lengths)
    found = []
    for step in steps:
        mine = np.sort(lengths[step.ravel()])
        own = np.searchsorted(mine, every, side="right") / mine.size
        found.append(np.abs(own - np.arange(1, every.size + 1) / every.size).max())
    return float(np.mean(found))


@given(
    count=st.integers(1, 200),
    size=st.integers(1, 5),
    micro=st.integers(1, 4),
    times=st.integers(1, 4),
    bucket_batches=st.none() | st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_sample_is_yielded_and_all_ranks_yield_equally_many(
    count: int, size: int, micro: int, times: int, **how: Any
) -> None:
    a_step = micro * times * size
    drop_last = how["drop_last"]
    assume(count >= a_step or not drop_last)
    lengths = np.arange(count) % 17 + 1
    options = {"batch_size": micro * times, "micro_batch_size": micro, **how}
    samplers = ranks_of(size, lengths, **options)
    found = [list(sampler) for sampler in samplers]
    assert {len(part) for part in found} == {len(samplers[0])}
    together = [index for part in found for index in part]
    if drop_last:
        assert len(together) == len(set(together)) == count // a_step * a_step
        return
    assert set(together) == set(range(count))
    assert len(together) - count < size  # only what fills up the last round is repeated


def test_what_is_dropped_differs_from_epoch_to_epoch() -> None:
    sampler = ranks_of(1, LENGTHS[:62], drop_last=True, bucket_batches=1)[0]
    assert {len(set(sampler)) for _ in range(20)} == {60}
    assert {index for _ in range(20) for index in sampler} == set(range(62))


@pytest.mark.parametrize("bucket", [1, 4, None])
def test_ranks_that_work_at_the_same_time_have_like_lengths(bucket: int | None) -> None:
    steps = steps_of(4, 4, bucket_batches=bucket)
    shuffled = np.random.default_rng(0).permutation(steps.ravel()).reshape(steps.shape)
    rows, plain = LENGTHS[steps], LENGTHS[shuffled]
    assert waiting(rows) < waiting(plain) / 20
    assert waiting(rows.sum(axis=1)) < waiting(plain.sum(axis=1)) / 20


def test_a_wider_bucket_brings_a_step_s_lengths_nearer_to_the_data_s() -> None:
    found = [distance(steps_of(4, 8, bucket_batches=n), LENGTHS) for n in (1, 4, 16, None)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.7
    assert found[-1] < 0.15


def test_what_a_rank_takes_at_once_is_of_like_length() -> None:
    def padding(micro: int) -> float:
        steps = steps_of(4, 8, micro_batch_size=micro, bucket_batches=None)
        batches = LENGTHS[steps].transpose(0, 2, 1).reshape(-1, 4)
        return float(batches.max(axis=1).sum() * 4 / batches.sum() - 1)

    assert padding(4) < padding(1) / 10


@pytest.mark.parametrize("bucket", [1, 16, None])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_step_has_the_longest_sample_and_begins_with_it(
    bucket: int | None, seed: int
) -> None:
    longest = int(LENGTHS.argmax())
    samplers = ranks_of(4, bucket_batches=bucket, seed=seed)
    assert longest in {next(iter(sampler)) for sampler in samplers}


def test_without_shuffling_every_epoch_is_the_same_and_the_longest_come_first() -> None:
    sampler = ranks_of(1, bucket_batches=1, shuffle=False)[0]
    first = list(sampler)
    assert LENGTHS[first].tolist() == sorted(LENGTHS, reverse=True)
    assert list(sampler) == first
    assert list(ranks_of(1, bucket_batches=1, shuffle=False, seed=3)[0]) == first


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    first, again = ranks_of(1)[0], ranks_of(1)[0]
    epochs = [list(first), list(first)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert [list(again), list(again)] == epochs
    again.set_epoch(0)
    assert list(again) == epochs[0]
    assert list(ranks_of(1, seed=1)[0]) != epochs[0]


def test_steps_and_what_comes_at_the_same_time_differ_in_each_epoch() -> None:
    def sets(seed: int, axes: int) -> set[frozenset[int]]:
        steps = steps_of(8, 4, seed=seed)
        return {frozenset(part.tolist()) for part in steps.reshape(-1, 8 * 4 if axes else 8)}

    for axes, share in ((1, 0.05), (0, 0.3)):
        assert len(sets(0, axes) & sets(1, axes)) < len(sets(0, axes)) * share


def test_an_order_stays_what_it_is() -> None:
    """States outlive versions; who changes this order gives `state.py:VERSION` a new number."""
    lengths = [900, 901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 911, 912]
    drawn = [list(each) for each in ranks_of(2, lengths, batch_size=2, bucket_batches=2, seed=3)]
    assert drawn == [[12, 5, 10, 7, 4, 1, 1], [11, 6, 8, 9, 3, 2, 0]]


@pytest.mark.parametrize(
    "kind",
    [iter, torch.tensor, lambda v: list(torch.tensor(v)), lambda v: np.array(v, np.float16)],
)
def test_lengths_may_be_what_the_planner_takes(kind: Any) -> None:
    lengths = [90, 10, 30, 70]
    found = LengthBucketSampler(kind(lengths), batch_size=2, dp_rank=0, dp_size=1)
    assert list(found) == list(LengthBucketSampler(lengths, batch_size=2, dp_rank=0, dp_size=1))


@pytest.mark.parametrize(
    ("lengths", "options", "why"),
    [
        ([], {"batch_size": 1}, "0 lengths make no batch"),
        ([1, 2], {"batch_size": 4, "drop_last": True}, "2 lengths make no batch of 4"),
        ([1, 2], {"batch_size": 0}, "batch_size 0 must be at least 1"),
        ([1, 2], {"batch_size": 1.5}, "batch_size 1.5 is not a whole number"),
        ([1, 2], {"batch_size": 2, "micro_batch_size": 0}, "micro_batch_size 0"),
        ([1, 2], {"batch_size": 3, "micro_batch_size": 2}, "no multiple of micro_batch_size 2"),
        ([1, 2], {"batch_size": 1, "bucket_batches": 0}, "bucket_batches 0 must be at least 1"),
        ([1, 2], {"batch_size": 1, "seed": -1}, "seed -1 must be at least 0"),
        ([1, -2], {"batch_size": 1}, "lengths must not be negative, and number 1 is -2"),
        ([1, float("nan")], {"batch_size": 1}, "lengths must be finite, and number 1 is nan"),
    ],
)
def test_what_makes_no_batch_is_refused(lengths: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LengthBucketSampler(lengths, dp_rank=0, dp_size=1, **options)
