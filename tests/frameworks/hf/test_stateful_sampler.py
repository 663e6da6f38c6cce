"""torchdata's `StatefulDataLoader` with a `LengthBucketSampler`: exact, workers prefetch or not."""

from typing import Any

import numpy as np
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from rollout_workers import LengthBucketSampler

LENGTHS = np.random.default_rng(7).lognormal(6, 1.2, 64).astype(int) + 1


def loader_of(workers: int, batch: int | None = 4) -> StatefulDataLoader:
    sampler = LengthBucketSampler(LENGTHS, batch_size=4, dp_rank=0, dp_size=1)
    return StatefulDataLoader(
        list(range(64)), sampler=sampler, batch_size=batch, num_workers=workers
    )


def flat(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in np.atleast_1d(batch)]


def epochs() -> list[list[int]]:
    sampler = LengthBucketSampler(LENGTHS, batch_size=4, dp_rank=0, dp_size=1)
    return [list(sampler) for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [4, 5, None])
@pytest.mark.parametrize("taken", [1, 5, 12])
def test_it_goes_on_after_what_was_taken(workers: int, batch: int | None, taken: int) -> None:
    loader = loader_of(workers, batch)
    seen = flat(item for _, item in zip(range(taken), loader, strict=False))
    state = loader.state_dict()
    again = loader_of(workers, batch)
    again.load_state_dict(state)
    assert seen + flat(again) == epochs()[0]
    assert flat(again) == epochs()[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [4, 5])
def test_a_state_of_an_epoch_s_end_goes_on_with_the_next(workers: int, batch: int) -> None:
    loader = loader_of(workers, batch)
    assert flat(loader) == epochs()[0]
    again = loader_of(workers, batch)
    again.load_state_dict(loader.state_dict())
    rest = flat(again) or flat(again)  # torchdata's loader may end the loaded epoch once more
    assert rest == epochs()[1]
    assert flat(again) == epochs()[2]
