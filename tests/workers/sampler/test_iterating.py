"""Iterators of a length-bucketing sampler: each has a whole epoch, whatever became of others."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from rollout_workers import LengthBucketSampler

LENGTHS = np.random.default_rng(7).lognormal(6, 1.2, 64).astype(int) + 1
DATA = list(range(64))


def sampler_of() -> LengthBucketSampler:
    return LengthBucketSampler(LENGTHS, batch_size=4, dp_rank=0, dp_size=1)


def epoch_of(number: int) -> list[int]:
    sampler = sampler_of()
    sampler.set_epoch(number)
    return list(sampler)


#: Ways to have a sampler's indices in a data loader, a batch or a sample at a time.
LOADERS: dict[str, dict[str, Any]] = {
    "in this process": {"batch_size": 4},
    "batches of 3": {"batch_size": 3},
    "two workers": {"batch_size": 4, "num_workers": 2},
    "workers that stay": {"batch_size": 4, "num_workers": 2, "persistent_workers": True},
    "samples of two workers": {"batch_size": None, "num_workers": 2},
}


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_an_epoch_that_was_broken_off_comes_again_whole(options: dict[str, Any]) -> None:
    loader: DataLoader[int] = DataLoader(DATA, sampler=sampler_of(), **options)  # type: ignore[arg-type]
    for _ in loader:
        break
    seen = [int(index) for batch in loader for index in np.atleast_1d(batch)]
    assert seen == epoch_of(0)
    after = [int(index) for batch in loader for index in np.atleast_1d(batch)]
    assert after == epoch_of(1)


def test_two_iterators_share_nothing() -> None:
    sampler = sampler_of()
    pairs = list(zip(iter(sampler), iter(sampler), strict=True))
    assert [one for one, _ in pairs] == [other for _, other in pairs] == epoch_of(0)
    assert list(sampler) == epoch_of(1)  # both ended epoch 0, and it ended once


def test_an_epoch_of_which_all_was_yielded_is_over_asked_for_more_or_not() -> None:
    sampler = sampler_of()
    assert len(list(islice(sampler, 64))) == 64
    assert list(sampler) == epoch_of(1)


def test_an_epoch_that_is_set_comes_whole_and_ends_no_other() -> None:
    sampler = sampler_of()
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(5)
    assert len(list(iterator)) == 63
    assert sampler.state_dict() == sampler.state_dict() | {"epoch": 5, "yielded": 0}
    assert list(sampler) == epoch_of(5)
    assert sampler.epoch == 6
