"""Gathering from shared memory: what comes out is, byte for byte, what would have been carried."""

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import Shared, micro_batch
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import Sample, Schema
from rollout_dispatcher.transport.memory import uninitialised
from rollout_dispatcher.transport.shared_memory.segments import write_segment
from rollout_workers.rank.shared_memory.gatherer import MAPPED_BYTES, Gatherer
from tests.protocol.test_assemble import IDS, PIXELS, push_of, pushed, random_values, sent
from tests.support.samples import span_of
from tests.support.schemas import schemas

LIMIT = 1 << 24


@dataclass
class Segments:
    """Samples that were put into segments, and where each lies."""

    descriptors: list[int] = field(default_factory=list)
    inodes: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, samples: Sequence[Sample]) -> None:
        """Write the spans of these into one more segment."""
        spans = [span_of(sample) for sample in samples]
        nbytes = 0
        for sample, span in zip(samples, spans, strict=True):
            self.places[sample.sample_id] = len(self.sizes), nbytes
            nbytes += len(span)
        self.descriptors.append(write_segment(spans))
        self.inodes.append(os.fstat(self.descriptors[-1]).st_ino)
        self.sizes.append(nbytes)

    @property
    def sized(self) -> list[tuple[int, int]]:
        """Each with its bytes, as a gatherer is told."""
        return list(zip(self.descriptors, self.sizes, strict=True))

    def of(self, samples: Sequence[Sample]) -> Shared:
        """What a micro-batch of these says."""
        return Shared(self.sizes, [self.places.get(sample.sample_id) for sample in samples])


@contextmanager
def segments_of(*groups: Sequence[Sample]) -> Iterator[Segments]:
    """A segment each; an empty one, or one of samples without bytes, is none."""
    found = Segments()
    try:
        for samples in groups:
            if some := [sample for sample in samples if sample.payload.nbytes]:
                found.add(some)
        yield found
    finally:
        for descriptor in found.descriptors:
            os.close(descriptor)


def gathered(
    schema: Schema,
    buffers: list[Buffer],
    segments: Sequence[tuple[int, int]],
    mappings: int = 0,
) -> tuple[m.MicroBatch, memoryview]:
    """What a rank makes of a frame where it has these segments."""
    header, carried = sent(buffers)
    assert isinstance(header, m.MicroBatch)
    gatherer = Gatherer(uninitialised, mappings, LIMIT)
    return gatherer.gather(schema, header, carried, segments)


def some_samples(schema: Schema, tokens: Sequence[int]) -> tuple[Sample, ...]:
    values = [random_values(schema, size, seed) for seed, size in enumerate(tokens)]
    return pushed(*push_of(schema, values, list(tokens)))


@given(
    schema=schemas(),
    where=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([None, 0, 1])), min_size=1, max_size=6
    ),
)
def test_it_is_as_if_it_had_been_carried(
    schema: Schema, where: list[tuple[int, int | None]]
) -> None:
    samples = some_samples(schema, [tokens for tokens, _ in where])
    groups = [
        [sample for sample, (_, at) in zip(samples, where, strict=True) if at == index]
        for index in (1, 0)
    ]
    carried = micro_batch(3, 1, samples)
    with segments_of(*groups) as segments:
        if not segments.sizes:
            return
        shared = micro_batch(3, 1, samples, shared=segments.of(samples))
        found = gathered(schema, shared, segments.sized)
    assert found == sent(carried)


def one_sample(tokens: int = MAPPED_BYTES // 8) -> tuple[Schema, Sample]:
    schema = Schema((IDS,))
    [sample] = some_samples(schema, [tokens])
    return schema, sample


def mappings_of(segments: Segments) -> int:
    """How many there are of these, open or closed, in this process."""
    own = {str(inode) for inode in segments.inodes}
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:" in line and line.split()[4] in own for line in lines)


def test_a_single_sample_is_mapped_for_as_long_as_somebody_looks_at_it() -> None:
    schema, sample = one_sample()
    with segments_of([sample]) as segments:
        frame = micro_batch(0, 0, [sample], shared=segments.of([sample]))
        _, payload = gathered(schema, frame, segments.sized, mappings=1)
    part = payload[8:16]
    del payload
    assert mappings_of(segments) == 1
    assert part == span_of(sample)[8:16]
    del part
    assert mappings_of(segments) == 0


def test_what_is_mapped_may_be_written_to_and_nobody_else_sees_it() -> None:
    schema, sample = one_sample()
    with segments_of([sample]) as segments:
        frame = micro_batch(0, 0, [sample], shared=segments.of([sample]))
        first, second = (gathered(schema, frame, segments.sized, mappings=1)[1] for _ in range(2))
    first[:8] = bytes(range(8))
    assert bytes(first[:8]) == bytes(range(8))
    assert second == span_of(sample)


def test_what_may_not_be_mapped_is_copied() -> None:
    schema, sample = one_sample()
    gatherer, held = Gatherer(uninitialised, 1, LIMIT), []
    with segments_of([sample]) as segments:
        header, _ = sent(micro_batch(0, 0, [sample], shared=segments.of([sample])))
        assert isinstance(header, m.MicroBatch)

        def gather() -> memoryview:
            nothing = memoryview(b"")
            return gatherer.gather(schema, header, nothing, segments.sized)[1]

        held = [gather(), gather()]
        assert mappings_of(segments) == 1
        assert held[0] == held[1] == span_of(sample)
        held.clear()
        held.append(gather())  # what was let go of makes room
        assert mappings_of(segments) == 1


def test_where_nothing_more_can_be_open_it_is_copied() -> None:
    schema, sample = one_sample()
    with segments_of([sample]) as segments:
        header, _ = sent(micro_batch(0, 0, [sample], shared=segments.of([sample])))
        assert isinstance(header, m.MicroBatch)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            _, payload = Gatherer(uninitialised, 1, LIMIT).gather(
                schema, header, memoryview(b""), segments.sized
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert payload == span_of(sample)


def test_a_small_sample_is_copied() -> None:
    schema, sample = one_sample(MAPPED_BYTES // 8 - 1)
    with segments_of([sample]) as segments:
        frame = micro_batch(0, 0, [sample], shared=segments.of([sample]))
        _, payload = gathered(schema, frame, segments.sized, mappings=1)
    assert mappings_of(segments) == 0
    assert payload == span_of(sample)


@pytest.mark.parametrize("place", [(0, 8), (0, MAPPED_BYTES), (1, 0)])
def test_a_sample_that_reaches_beyond_its_segment_is_an_error(place: tuple[int, int]) -> None:
    schema, sample = one_sample()
    index, offset = place
    with segments_of([sample]) as segments:
        shared = Shared(segments.sizes, [place])
        words = f"{MAPPED_BYTES} bytes at byte {offset} of segment {index}, which has"
        with pytest.raises(ProtocolError, match=words):
            gathered(schema, micro_batch(0, 0, [sample], shared=shared), segments.sized)


def test_a_sample_without_bytes_in_a_segment_that_is_not_there_is_an_error() -> None:
    schema = Schema((PIXELS,))
    [sample] = pushed(*push_of(schema, [{"pixels": b""}], [1]))
    frame = micro_batch(0, 0, [sample], shared=Shared([], [(0, 0)]))
    with pytest.raises(ProtocolError, match="0 bytes at byte 0 of segment 0, which has 0"):
        gathered(schema, frame, [])


def test_a_micro_batch_that_is_larger_than_any_is_an_error() -> None:
    schema, sample = one_sample()
    with segments_of([sample]) as segments:
        many = [sample] * (LIMIT // MAPPED_BYTES + 1)  # the same bytes again and again
        frame = micro_batch(0, 0, many, shared=Shared(segments.sizes, [(0, 0)] * len(many)))
        with pytest.raises(ProtocolError, match=f"of at most {LIMIT}"):
            gathered(schema, frame, segments.sized)


def test_what_is_carried_has_to_be_what_is_not_shared() -> None:
    schema, sample = one_sample()
    with segments_of([sample]) as segments:
        frame = micro_batch(0, 0, [sample] * 2, shared=Shared(segments.sizes, [(0, 0), None]))
        header, carried = sent(frame)
        assert isinstance(header, m.MicroBatch)
        with pytest.raises(ProtocolError, match=f"describes {MAPPED_BYTES} payload"):
            Gatherer(uninitialised, 0, LIMIT).gather(schema, header, carried[8:], segments.sized)


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([16], [(0, 4)]),
        ([16], []),
        ([16], None),
        (None, [None]),
    ],
)
def test_places_that_are_nowhere_are_not_read(sizes: object, places: object) -> None:
    header = {"step": 0, "index": 0, "tokens": [1], "loss_tokens": [1], "sample_ids": ["s"]}
    header |= {"segments": sizes, "segment_places": places}
    with pytest.raises(ValueError, match="place"):
        m.MicroBatch.model_validate(header)
