"""A payload's type says where it is, never its size."""

import pytest

from rollout_dispatcher.core.buffer.entry import Amount
from rollout_dispatcher.payload import (
    Footprint,
    InJournal,
    InMemory,
    Payload,
    Reference,
    StoredObject,
    WithProducer,
    are_in_memory,
    count_references,
)
from rollout_dispatcher.sample import Sample, SamplesByField, Schema
from tests.support.samples import make_sample

ELSEWHERE: list[Payload] = [
    InJournal(32),
    Reference(StoredObject("file:///a", "p/1", 96), 64, 32),
    WithProducer(32),
]
#: A sample without fields, as a simulation has them: nothing is in memory, and it is there.
NO_BYTES = make_sample("s", schema=Schema(()))


def at(payload: Payload) -> Sample:
    return make_sample()._replace(payload=payload)


@pytest.mark.parametrize("payload", ELSEWHERE)
def test_a_payload_elsewhere_has_its_size_and_takes_no_memory(payload: Payload) -> None:
    sample = at(payload)
    assert (sample.nbytes, sample.memory_bytes, sample.is_in_memory) == (32, 0, False)
    assert sample.in_journal() is sample.with_producer() is sample


def test_a_payload_that_leaves_memory_keeps_its_size() -> None:
    sample = make_sample()
    assert (sample.nbytes, sample.memory_bytes, sample.is_in_memory) == (32, 32, True)
    assert sample.in_journal() == at(InJournal(32))
    assert sample.with_producer() == at(WithProducer(32))


def test_a_payload_without_bytes_is_somewhere_too() -> None:
    assert NO_BYTES.is_in_memory
    assert NO_BYTES.in_journal().payload == InJournal(0)
    assert not NO_BYTES.in_journal().is_in_memory
    assert are_in_memory([NO_BYTES.payload])


def test_only_what_is_in_memory_counts_as_memory() -> None:
    spans: list[Payload] = [InMemory(bytes(8)), InMemory(bytes(24))]
    assert are_in_memory(spans)
    assert Footprint.by(spans) == Footprint(memory=32)
    assert not are_in_memory([*spans, InJournal(7)])
    assert Footprint.by([*spans, *ELSEWHERE]) == Footprint(memory=32, referenced=32)
    assert are_in_memory([])
    assert Footprint.by([]) == Footprint()
    assert (count_references(spans), count_references(ELSEWHERE)) == (0, 1)


def test_some_of_which_only_a_part_is_in_memory_amount_to_that_part() -> None:
    samples = SamplesByField.of([make_sample(), *map(at, ELSEWHERE)])
    assert Amount.of(samples) == Amount(samples=4, tokens=16, nbytes=32, referenced=32)
