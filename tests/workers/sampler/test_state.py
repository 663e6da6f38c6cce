"""States of a length-bucketing sampler: they go on where they were taken, or are refused."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ConfigError
from rollout_workers import LengthBucketSampler

LENGTHS = np.random.default_rng(7).lognormal(6, 1.2, 1000).astype(int) + 1
#: Samples of a step over all ranks, of which 1, 2, 3, 4 and 6 ranks have equally many.
GLOBAL_BATCH = 12
RANKS = (1, 2, 3, 4, 6)


def ranks_of(size: int, count: int = 1000, **options: Any) -> list[LengthBucketSampler]:
    options = {"batch_size": GLOBAL_BATCH // size, **options}
    return [
        LengthBucketSampler(LENGTHS[:count], dp_rank=rank, dp_size=size, **options)
        for rank in range(size)
    ]


def draw(samplers: list[LengthBucketSampler], count: int | None = None) -> list[int]:
    """What all ranks draw; as much as this of each, or the rest."""
    return [index for sampler in samplers for index in islice(sampler, count)]


#: So many are drawn, the state is kept, and so many are drawn and lost.
BREAKS = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(
    count=st.integers(12, 150),
    size=st.sampled_from(RANKS),
    breaks=st.lists(BREAKS, max_size=6),
    drop_last=st.booleans(),
    bucket_batches=st.none() | st.integers(1, 3),
)
def test_an_epoch_has_every_sample_once_whatever_breaks_and_resumes_happen(
    count: int, size: int, breaks: list[tuple[int, int]], **how: Any
) -> None:
    ranks = ranks_of(size, count, **how)
    trained: list[int] = []
    for drawn, lost in breaks:
        trained += draw(ranks, drawn)
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        draw(ranks, lost)
        ranks = ranks_of(size, count, **how)
        for sampler in ranks:
            sampler.load_state_dict(state)
        if state["epoch"]:
            break
    if ranks[0].epoch == 0:
        trained += draw(ranks)
    counts = Counter(trained)
    if how["drop_last"]:
        assert set(counts.values()) == {1}
        assert len(counts) == count // GLOBAL_BATCH * GLOBAL_BATCH
    else:
        assert set(counts) == set(range(count))
        assert counts.total() - count < max(RANKS)


def test_a_sampler_resumes_where_another_stood_and_only_once() -> None:
    whole = list(ranks_of(2)[1])
    sampler, fresh = ranks_of(2)[1], ranks_of(2)[1]
    taken = list(islice(sampler, 123))
    fresh.load_state_dict(sampler.state_dict())
    assert fresh.state_dict() == sampler.state_dict()
    assert list(islice(fresh, 7)) == whole[123:130]
    assert list(fresh) == whole
    fresh.load_state_dict(sampler.state_dict())
    assert taken + list(fresh) == whole
    assert fresh.state_dict() == fresh.state_dict() | {"epoch": 1, "yielded": 0}


def test_an_epoch_that_is_set_to_the_loaded_one_goes_on_and_another_begins() -> None:
    sampler = ranks_of(1)[0]
    sampler.set_epoch(3)
    whole = list(sampler)
    sampler.set_epoch(3)
    assert len(list(islice(sampler, 40))) == 40
    state = sampler.state_dict()
    for epoch, rest in ((3, 960), (4, 1000)):
        sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        assert len(found := list(sampler)) == rest
        assert (found == whole[40:]) == (epoch == 3)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"seed": 5}, "seed 5, this one has 0"),
        ({"dp_size": 4}, "dp_size 4, this one has 2"),
        ({"batch_size": 4}, "batch_size 4, this one has 8"),
        ({"bucket_batches": 2}, "bucket_batches 2, this one has 16"),
        ({"drop_last": True}, "drop_last 1, this one has 0"),
        ({"lengths": LENGTHS[:500]}, "samples 500, this one has 1000; lengths"),
        ({"lengths": LENGTHS[::-1]}, "with lengths"),
        ({"seed": 5, "shuffle": False}, "seed 5, this one has 0; shuffle 0, this one has 1"),
    ],
)
def test_a_state_of_another_order_is_refused(other: dict[str, Any], why: str) -> None:
    options: dict[str, Any] = {"lengths": LENGTHS, "batch_size": 8, "dp_rank": 0, "dp_size": 2}
    state = LengthBucketSampler(**options | other).state_dict()
    with pytest.raises(ConfigError, match=why):
        LengthBucketSampler(**options).load_state_dict(state)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"yielded": -1}, "yielded -1 must be at least 0"),
        ({"yielded": 1001}, "1001 indices of an epoch of 1000"),
        ({"yielded": None}, "yielded None is not a whole number"),
        ({"epoch": "1"}, "epoch '1' is not a whole number"),
        ({"version": None}, "version None, this one has 2"),
    ],
)
def test_a_state_that_no_sampler_made_is_refused_and_changes_nothing(
    broken: dict[str, Any], why: str
) -> None:
    sampler = ranks_of(1)[0]
    assert len(list(islice(sampler, 9))) == 9
    before = sampler.state_dict()
    with pytest.raises(ConfigError, match=why):
        sampler.load_state_dict(before | broken)
    assert sampler.state_dict() == before
