"""The length-bucketing sampler: every sample once, like lengths together, resumable."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rollout_dispatcher.errors import ConfigError
from rollout_workers import LengthBucketSampler

LENGTHS = np.random.default_rng(7).lognormal(6, 1.2, 1000).astype(int) + 1


def ranks_of(size: int, **options: Any) -> list[LengthBucketSampler]:
    return [
        LengthBucketSampler(LENGTHS, batch_size=4, dp_rank=rank, dp_size=size, **options)
        for rank in range(size)
    ]


@given(
    count=st.integers(1, 200),
    size=st.integers(1, 5),
    batch=st.integers(1, 7),
    bucket=st.integers(1, 4),
)
def test_every_sample_is_yielded_and_all_ranks_yield_equally_many(
    count: int, size: int, batch: int, bucket: int
) -> None:
    lengths = np.arange(count) % 17 + 1
    found = [
        list(
            LengthBucketSampler(
                lengths, batch_size=batch, bucket_batches=bucket, dp_rank=rank, dp_size=size
            )
        )
        for rank in range(size)
    ]
    assert {len(part) for part in found} == {-(-count // size)}
    together = [index for part in found for index in part]
    assert set(together) == set(range(count))
    assert len(together) - count < size  # only what fills up the last round is repeated


def test_dropping_the_last_repeats_nothing() -> None:
    found = [index for sampler in ranks_of(3, drop_last=True) for index in sampler]
    assert len(found) == len(set(found)) == 1000 // 12 * 12


def test_ranks_of_one_step_draw_like_lengths() -> None:
    bucketed = ranks_of(4, bucket_batches=1)
    steps = np.array([list(sampler) for sampler in bucketed])[:, :248].reshape(4, -1, 4)
    work = LENGTHS[steps].sum(axis=2)
    excess = work.max(axis=0).sum() / work.mean(axis=0).sum() - 1
    shuffled = np.random.default_rng(0).permutation(LENGTHS)[: work.size * 4]
    plain = shuffled.reshape(4, -1, 4).sum(axis=2)
    plain_excess = plain.max(axis=0).sum() / plain.mean(axis=0).sum() - 1
    assert excess < plain_excess / 5


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    first, again = ranks_of(1)[0], ranks_of(1)[0]
    epochs = [list(first), list(first)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert [list(again), list(again)] == epochs
    again.set_epoch(0)
    assert list(again) == epochs[0]


def test_a_sampler_resumes_where_another_stood() -> None:
    sampler, fresh = ranks_of(2)[1], ranks_of(2)[1]
    whole = list(sampler)
    sampler.set_epoch(0)
    taken = list(islice(iter(sampler), 123))
    fresh.load_state_dict(sampler.state_dict())
    assert taken + list(fresh) == whole
    assert fresh.state_dict() | {"epoch": 1, "yielded": 0} == fresh.state_dict()


def test_it_drives_a_data_loader() -> None:
    sampler = LengthBucketSampler(LENGTHS, batch_size=8, dp_rank=0, dp_size=1)
    loader: DataLoader[int] = DataLoader(LENGTHS.tolist(), sampler=sampler, batch_size=8)
    assert sum(len(batch) for batch in loader) == 1000


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([], {"batch_size": 1}),
        ([1, 2], {"batch_size": 4, "drop_last": True}),
        ([1, 2], {"batch_size": 0}),
        ([1, 2], {"batch_size": 1, "bucket_batches": 0}),
    ],
)
def test_what_makes_no_batch_is_refused(lengths: list[int], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LengthBucketSampler(lengths, dp_rank=0, dp_size=1, **options)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"seed": 5}, "seed 5, this one has 0"),
        ({"dp_size": 4}, "dp_size 4, this one has 2"),
        ({"batch_size": 4}, "batch_size 4, this one has 8"),
        ({"bucket_batches": 2}, "bucket_batches 2, this one has 16"),
        ({"lengths": LENGTHS[:500]}, "samples 500, this one has 1000"),
    ],
)
def test_a_state_of_another_order_is_refused(other: dict[str, Any], why: str) -> None:
    options: dict[str, Any] = {"lengths": LENGTHS, "batch_size": 8, "dp_rank": 0, "dp_size": 2}
    state = LengthBucketSampler(**options | other).state_dict()
    with pytest.raises(ConfigError, match=why):
        LengthBucketSampler(**options).load_state_dict(state)
