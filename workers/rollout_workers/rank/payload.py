"""The fields of a micro-batch as views of its payload.

Cutting a field's block out is all there is to packing: no value is moved.

Where some samples lie in payload stores, the rank makes what would have come in one piece of these:

    the frame's payload    a block a field, of the samples that are in it alone
    spans in stores        a sample each, its fields one after the other
    what is made of them   a block a field, of all samples in the micro-batch's order

A store writes each part of a span to its place (`get_into`), so each value is copied once, and
other threads run meanwhile. A rank that trains a sample with others needs its slices of the
per-token fields alone (`MicroBatch.ranges`): a store that can reads those and no more.
"""

from collections.abc import Sequence
from itertools import compress, repeat
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.spans import ALIGNMENT, PADDING, TOKENS
from rollout_dispatcher.transport.memory import Memory, copy_bytes
from rollout_dispatcher.values import NUMPY_DTYPES
from rollout_workers.stores.interface import Part

#: numpy has no bfloat16 and no byte of text; their bits come in integers of the same width.
_NUMPY = NUMPY_DTYPES | {DType.BFLOAT16: np.dtype("uint16"), DType.STR: np.dtype("uint8")}


class Block(NamedTuple):
    """One field over all samples of a micro-batch.

    offset: bytes from the start of the payload. rows: tokens of all samples, as far as they were
    sent, for a per-token field, rows of all samples for a ragged one, samples otherwise. own: of a
    ragged field, how many of the rows are each sample's.
    """

    field: Field
    offset: int
    rows: int
    own: Sequence[int] = ()

    @property
    def values(self) -> int:
        """Values of all rows together."""
        return self.rows * prod(self.field.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """[total tokens, ...] for a per-token field, [rows of all samples, ...] for a ragged one,
        [samples, ...] otherwise.
        """
        return (self.rows, *self.field.shape)


def cut(schema: Schema, header: m.MicroBatch, payload: memoryview) -> list[Block]:
    """The blocks of a payload. Raises ProtocolError when its header describes another size, or has
    rows of other fields than the schema.
    """
    rows = header.rows_of(schema)
    held = header.tokens_held
    places, nbytes = schema.blocks(held, rows)
    if nbytes != payload.nbytes:
        raise ProtocolError(
            f"micro-batch {header.index} of step {header.step} describes {nbytes} payload bytes, "
            f"the frame carries {payload.nbytes}"
        )
    tokens, samples, own = sum(held), len(held), iter(rows)
    return [
        Block(field, place.start, sum(each := next(own)), each)
        if field.ragged
        else Block(field, place.start, tokens if field.per_token else samples)
        for field, place in zip(schema.fields, places, strict=True)
    ]


def arrays(payload: memoryview, blocks: Sequence[Block]) -> dict[str, NDArray[np.generic]]:
    """Fields as numpy views of the payload, shaped as `Block.shape` says; no copy.

    They are read-only: the next iteration over the step looks at the same memory. bfloat16 values
    come as their bits, in uint16, texts as their UTF-8, end to end.
    """
    return {
        block.field.name: np.frombuffer(
            payload.toreadonly(), _NUMPY[block.field.dtype], block.values, block.offset
        ).reshape(block.shape)
        for block in blocks
    }


def carried_blocks(schema: Schema, header: m.MicroBatch) -> tuple[list[slice], int]:
    """The blocks of a frame's payload, of the samples that are in it, and their bytes.

    Raises ProtocolError for rows of other fields than the schema's.
    """
    here = [place is None for place in header.places or ()]
    if not any(here):
        return [], 0
    rows = [list(compress(each, here)) for each in header.rows_of(schema)]
    return schema.blocks(list(compress(header.tokens_held, here)), rows)


def lay_out(
    schema: Schema, header: m.MicroBatch, carried: memoryview, memory: Memory
) -> tuple[memoryview, list[list[Part]]]:
    """The payload of all samples, with the values of those that are in the frame.

    Also the parts that are still to be filled in: of each sample in a payload store, in their
    order, those of its span that this rank has. carried: the frame's payload, of the size that
    `carried_blocks` says.
    """
    rows = header.rows_of(schema)
    blocks, nbytes = schema.blocks(header.tokens_held, rows)
    payload, filled = memory(nbytes), [block.start for block in blocks]
    taken = [block.start for block in carried_blocks(schema, header)[0]]
    elsewhere = list[list[Part]]()
    samples = zip(header.places or (), header.ranges or repeat(None), strict=False)
    for at, (place, ranges) in enumerate(samples):
        parts = list[Part]()
        spans = schema.slices(header.tokens[at], [each[at] for each in rows])
        for field, (span, (unit, by)) in enumerate(zip(spans, schema.units, strict=True)):
            held = [(0, span.stop - span.start)]
            if ranges is not None and by == TOKENS:
                held = [(unit * start, unit * stop) for start, stop in ranges]
            begin = filled[field]
            for start, stop in held:
                parts.append(Part(span.start + start, filled[field], stop - start))
                filled[field] += stop - start
            if place is None:
                size = filled[field] - begin
                first = taken[field]
                copy_bytes(payload[begin : begin + size], carried[first : first + size])
                taken[field] += size
        if place is not None:
            elsewhere.append(parts)
    for block in blocks:
        padding = PADDING[block.stop % ALIGNMENT]
        payload[block.stop : block.stop + len(padding)] = padding
    return payload, elsewhere
