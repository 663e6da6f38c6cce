"""A micro-batch whose samples lie in payload stores, made into what would have come inline.

    the frame's payload      a block a field, of the samples that are in it alone
    spans from the stores    a sample each, its fields one after the other
    what is made of them     a block a field, of all samples in the micro-batch's order

A store puts what it has where it belongs (`get_into`), so each value is copied once, and other
threads run meanwhile.
"""

from itertools import compress

import numpy as np

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.spans import RowsByField
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.stores.interface import Part


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


def lay_out(
    schema: Schema, header: m.MicroBatch, payload: memoryview, memory: Memory
) -> tuple[memoryview, list[list[Part]]]:
    """The payload of all samples, where those have to be filled in yet that `references` names.

    Also where the parts of each of them go, in their order. payload: what came in the frame.
    """
    rows = header.rows_of(schema)
    blocks, nbytes = schema.blocks(header.tokens, rows)
    found, parts = memory(nbytes), list[list[Part]]()
    target, inline = np.frombuffer(found, np.uint8), np.frombuffer(payload, np.uint8)
    ends = [block.start for block in blocks]  # of what is in each block so far
    inline_at = [block.start for block in schema.blocks(*_inline(schema, header))[0]]
    for place, tokens, *own in zip(header.places or (), header.tokens, *rows, strict=True):
        counts = (tokens, 1, *own)
        sizes = [unit * counts[by] for unit, by in schema.units]
        if place is None:
            for at, size in enumerate(sizes):
                start = inline_at[at]
                target[ends[at] : ends[at] + size] = inline[start : start + size]
                inline_at[at] += size
        else:
            starts = [part.start for part in schema.slices(tokens, own)]
            parts.append(list(map(Part, starts, ends, sizes)))
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for end, following in zip(ends, [*(block.start for block in blocks[1:]), nbytes], strict=True):
        target[end:following] = 0
    return found, parts


def _inline(schema: Schema, header: m.MicroBatch) -> tuple[list[int], RowsByField]:
    """Tokens and rows of the samples that are in the frame."""
    here = [place is None for place in header.places or ()]
    rows = [list(compress(counts, here)) for counts in header.rows_of(schema)]
    return list(compress(header.tokens, here)), rows
