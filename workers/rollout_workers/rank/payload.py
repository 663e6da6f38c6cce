"""The fields of a micro-batch as views of its payload.

Cutting a field's block out is all there is to packing: no value is moved.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.values import NUMPY_DTYPES

#: numpy has no bfloat16 and no byte of text; their bits come in integers of the same width.
_NUMPY = NUMPY_DTYPES | {DType.BFLOAT16: np.dtype("uint16"), DType.STR: np.dtype("uint8")}


class Block(NamedTuple):
    """One field over all samples of a micro-batch.

    offset: bytes from the start of the payload. rows: tokens of all samples for a per-token field,
    rows of all samples for a ragged one, samples otherwise. own: of a ragged field, how many of the
    rows are each sample's.
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
    places, nbytes = schema.blocks(header.tokens, rows)
    if nbytes != payload.nbytes:
        raise ProtocolError(
            f"micro-batch {header.index} of step {header.step} describes {nbytes} payload bytes, "
            f"the frame carries {payload.nbytes}"
        )
    tokens, samples, own = sum(header.tokens), len(header.tokens), iter(rows)
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
