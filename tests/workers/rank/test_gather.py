"""What is put together of a frame and of stores is what would have come inline."""

from itertools import compress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import assemble
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.sample import Sample, Schema
from rollout_workers.rank.held_steps import HeldStep
from rollout_workers.rank.payload import lay_out
from tests.support.samples import span_of
from tests.support.schemas import rows, schemas
from tests.workers.support.peers import arrived, sample, step
from tests.workers.support.stored import referenced

#: Ranks of a block, and one of them.
blocks = st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])


def sent(
    samples: list[Sample],
    block: tuple[int, int] = (1, 0),
    slicing: Slicing | None = None,
    multiple: int = 1,
) -> tuple[m.MicroBatch, memoryview]:
    """A micro-batch as it arrives."""
    frame = assemble.micro_batch(0, 0, samples, block=block, slicing=slicing, multiple=multiple)
    header, payload = arrived(frame)
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


@given(micro_batches(), blocks, st.sampled_from([None, *Slicing]), st.integers(1, 3))
def test_it_is_what_would_have_come_inline(
    batch: tuple[Schema, list[Sample], list[bool]],
    block: tuple[int, int],
    slicing: Slicing | None,
    multiple: int,
) -> None:
    schema, samples, stored = batch
    how = block, slicing, multiple
    _, whole = sent(samples, *how)
    inside = list(compress(samples, stored))
    placed = iter(referenced(inside))
    each = zip(samples, stored, strict=True)
    header, payload = sent([next(placed) if there else one for one, there in each], *how)
    held = HeldStep(step(0).model_copy(update={"fields": m.field_headers(schema)}))
    held.receive(header, payload)
    stored_bytes = memoryview(b"".join(map(span_of, inside)))
    found, parts = lay_out(schema, header, payload, memory)
    fetched = sum(part.nbytes for own in parts for part in own)
    assert abs(held.referenced[0] - fetched) <= 7 * len(schema.fields), "but for padding"
    for reference, own in zip(filter(None, header.references(schema)), parts, strict=True):
        assert all(part.source + part.nbytes <= reference.nbytes for part in own)
        for source, target, nbytes in own:
            begin = reference.offset + source
            found[target : target + nbytes] = stored_bytes[begin : begin + nbytes]
    assert found == whole


def test_a_frame_of_another_size_is_an_error() -> None:
    inline, there = sample([1, 2]), sample([3, 4, 5])
    header, payload = sent([inline, *referenced([there])])
    with pytest.raises(
        ProtocolError, match="describes 32 payload bytes beside what lies elsewhere"
    ):
        HeldStep(step(0)).receive(header, memoryview(bytes(payload.nbytes + 8)))
