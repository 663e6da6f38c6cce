"""A micro-batch whose samples lie in payload stores, made into what would have come inline.

    the frame's payload      a block a field, of the samples that are in it alone
    spans from the stores    a sample each, its fields one after the other
    what is made of them     a block a field, of all samples in the micro-batch's order

One copy of each value, which lets other threads run meanwhile.
"""

from collections.abc import Sequence
from itertools import compress

import numpy as np

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.spans import RowsByField
from rollout_dispatcher.transport.memory import Memory


def references(schema: Schema, header: m.MicroBatch) -> list[Reference]:
    """Where the spans of those samples are that lie in payload stores, in their order."""
    stored = [StoredObject(item.store, item.key, item.nbytes) for item in header.objects or ()]
    sizes = schema.sizes(header.tokens, header.rows_of(schema))
    return [
        Reference(stored[place[0]], place[1], size)
        for place, size in zip(header.places or (), sizes, strict=True)
        if place is not None
    ]


def check_inline(schema: Schema, header: m.MicroBatch, nbytes: int) -> None:
    """Raise ProtocolError where a frame does not carry what its samples have that are in it."""
    described = schema.blocks(*_inline(schema, header))[1]
    if described != nbytes:
        raise ProtocolError(
            f"micro-batch {header.index} of step {header.step} describes {described} payload bytes "
            f"beside its references, the frame carries {nbytes}"
        )


def gather(
    schema: Schema,
    header: m.MicroBatch,
    payload: memoryview,
    spans: Sequence[memoryview],
    memory: Memory,
) -> memoryview:
    """The payload of all samples. spans: of those that `references` names, in their order."""
    rows = header.rows_of(schema)
    blocks, nbytes = schema.blocks(header.tokens, rows)
    found, stored = memory(nbytes), iter(spans)
    target, inline = np.frombuffer(found, np.uint8), np.frombuffer(payload, np.uint8)
    ends = [block.start for block in blocks]  # of what is in each block so far
    inline_at = [block.start for block in schema.blocks(*_inline(schema, header))[0]]
    for place, tokens, *own in zip(header.places or (), header.tokens, *rows, strict=True):
        if place is None:
            source, starts = inline, inline_at
        else:
            source = np.frombuffer(next(stored), np.uint8)
            starts = [part.start for part in schema.slices(tokens, own)]
        counts = (tokens, 1, *own)
        for at, (unit, by) in enumerate(schema.units):
            start, size = starts[at], unit * counts[by]
            target[ends[at] : ends[at] + size] = source[start : start + size]
            ends[at] += size
            starts[at] += size
    for end, following in zip(ends, [*(block.start for block in blocks[1:]), nbytes], strict=True):
        target[end:following] = 0
    return found


def _inline(schema: Schema, header: m.MicroBatch) -> tuple[list[int], RowsByField]:
    """Tokens and rows of the samples that are in the frame."""
    here = [place is None for place in header.places or ()]
    rows = [list(compress(counts, here)) for counts in header.rows_of(schema)]
    return list(compress(header.tokens, here)), rows
