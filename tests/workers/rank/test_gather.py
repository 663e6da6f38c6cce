"""What is put together of a frame and of stores is what would have come inline."""

from itertools import compress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import assemble
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Sample, Schema
from rollout_workers.rank.payload import Whole, lay_out
from tests.support.samples import make_sample, span_of
from tests.support.schemas import rows, schemas
from tests.workers.support.peers import arrived
from tests.workers.support.stored import referenced


def sent(samples: list[Sample]) -> tuple[m.MicroBatch, memoryview]:
    """A micro-batch as it arrives."""
    header, payload = arrived(assemble.micro_batch(0, 0, samples))
    assert isinstance(header, m.MicroBatch)
    return header, payload


def memory(nbytes: int) -> memoryview:
    """As what was used before: full of something."""
    return memoryview(bytearray(b"\xff" * nbytes))


@st.composite
def micro_batches(draw: st.DrawFn) -> tuple[Schema, list[Sample], list[bool]]:
    """Samples of one schema, and which of them lie in a store: one at least."""
    schema = draw(schemas())
    count = draw(st.integers(1, 5))
    samples = []
    for at in range(count):
        tokens, own = draw(st.integers(1, 9)), draw(rows(schema))
        values = np.random.default_rng(at).integers(1, 255, schema.nbytes(tokens, own), np.uint8)
        for part, following in zip(
            [*schema.slices(tokens, own)],
            [*(p.start for p in schema.slices(tokens, own)[1:]), len(values)],
            strict=True,
        ):
            values[part.stop : following] = 0  # between fields there are zeros
        span = memoryview(values.tobytes())
        samples.append(Sample(f"s{at}", tokens, 0, schema, span, rows=own))
    stored = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    return schema, samples, stored


@given(micro_batches())
def test_it_is_what_would_have_come_inline(batch: tuple[Schema, list[Sample], list[bool]]) -> None:
    schema, samples, stored = batch
    _, whole = sent(samples)
    inside = list(compress(samples, stored))
    placed = iter(referenced(inside))
    each = zip(samples, stored, strict=True)
    header, payload = sent([next(placed) if there else one for one, there in each])
    Whole(schema, header, header.places or ()).check_carried(payload.nbytes)
    stored_bytes = memoryview(b"".join(map(span_of, inside)))
    found, parts = lay_out(schema, header, payload, memory)
    for reference, own in zip(filter(None, header.references(schema)), parts, strict=True):
        assert all(part.source + part.nbytes <= reference.nbytes for part in own)
        for source, target, nbytes in own:
            begin = reference.offset + source
            found[target : target + nbytes] = stored_bytes[begin : begin + nbytes]
    assert found == whole


def test_a_frame_of_another_size_is_an_error() -> None:
    inline, there = make_sample("a", 2), make_sample("b", 3)
    header, payload = sent([inline, *referenced([there])])
    with pytest.raises(
        ProtocolError, match="describes 16 payload bytes beside what lies elsewhere"
    ):
        Whole(inline.schema, header, header.places or ()).check_carried(payload.nbytes + 8)
