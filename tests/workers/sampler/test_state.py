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


#: So many are drawn, the state is kept, so many are drawn and lost; None: as many ranks go on, else
#: that many do, from the beginning of a step.
Break = tuple[int, int, int | None]
BREAKS = st.tuples(st.integers(0, 20), st.integers(0, 20), st.sampled_from((None, *RANKS)))


@given(
    count=st.integers(12, 150),
    size=st.sampled_from(RANKS),
    breaks=st.lists(BREAKS, max_size=6),
    drop_last=st.booleans(),
    bucket_batches=st.none() | st.integers(1, 3),
    longest_first=st.booleans(),
)
def test_an_epoch_has_every_sample_once_whatever_breaks_and_resumes_happen(
    count: int, size: int, breaks: list[Break], **how: Any
) -> None:
    ranks = ranks_of(size, count, **how)
    trained: list[int] = []
    for drawn, lost, other in breaks:
        trained += draw(ranks, drawn if other is None else in_whole_steps(ranks, drawn))
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        draw(ranks, lost)
        size = other or size
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


def in_whole_steps(ranks: list[LengthBucketSampler], steps: int) -> int:
    """Indices of each rank up to a step's end, and those of so many steps more."""
    a_step = GLOBAL_BATCH // len(ranks)
    return -int(ranks[0].state_dict()["yielded"]) % a_step + steps * a_step


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


@pytest.mark.parametrize("at", [12, 996, 1000])
def test_another_number_of_ranks_goes_on_between_two_steps(at: int) -> None:
    one = ranks_of(1)
    first = draw(one, at)
    four = ranks_of(4)
    for sampler in four:
        sampler.load_state_dict(one[0].state_dict())
    rest = draw(four)
    assert Counter(first + rest) == Counter(range(1000))
    assert draw(four) != draw(ranks_of(4))  # epoch 1, in runs of its own
    fresh = ranks_of(4)
    for sampler in fresh:
        sampler.set_epoch(1)
    for sampler in four:
        sampler.set_epoch(1)
    assert draw(four) == draw(fresh)


def test_another_number_of_ranks_inside_a_step_is_refused() -> None:
    sampler = ranks_of(2)[0]
    assert len(list(islice(sampler, 8))) == 8
    with pytest.raises(ConfigError, match="inside a step, after 2 of 6 samples of each rank"):
        ranks_of(4)[0].load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"seed": 5}, "seed 5, this one has 0"),
        ({"dp_size": 4}, "batch_size 8 and dp_size 4, this one has 8 and 2"),
        ({"batch_size": 4}, "batch_size 4 and dp_size 2, this one has 8 and 2"),
        ({"bucket_batches": 2}, "bucket_batches 2, this one has 16"),
        ({"shuffle": False}, "shuffle 0, this one has 1"),
        ({"longest_first": False}, "longest_first 0, this one has 1"),
        ({"drop_last": True}, "drop_last 1, this one has 0"),
        ({"lengths": LENGTHS[:500]}, "samples 500, this one has 1000; other lengths"),
        ({"lengths": LENGTHS[::-1]}, "with other lengths, or the same in another order"),
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
        ({"yielded": 1001}, "1001 indices yielded of an epoch of 1000"),
        ({"yielded": 2.5}, "yielded 2.5 is not a whole number"),
        ({"yielded": None}, "yielded None is not a whole number"),
        ({"epoch": -2}, "epoch -2 must be at least 0"),
        ({"epoch": "1"}, "epoch '1' is not a whole number"),
        ({"run": 5}, "runs of 5 samples"),
        ({"run": 0}, "runs of 0 samples"),
        ({"dp_size": 0}, "batch_size 12 and dp_size 0, this one has 12 and 1"),
        ({"version": 1}, "version 1, this one has 2"),
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


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"epoch": 1, "yielded": 3}, "the state lacks batch_size, bucket_batches, dp_size"),
        ({}, "the state lacks"),
        ([1, 3], "a mapping, not list"),
    ],
)
def test_what_is_no_state_is_refused(state: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ranks_of(1)[0].load_state_dict(state)
