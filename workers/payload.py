"""Where each field of a micro-batch lies in its payload.

A payload holds, field by field, the values of all samples one after the other, without padding;
every field's block starts at a multiple of 8 bytes. Cutting a block out is all there is to
packing: no value is moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import ProtocolError
from dispatcher.sample import DType, Field, Schema, aligned
from dispatcher.wire import messages as m

#: numpy has no bfloat16; its bits travel in the integer of the same width.
_NUMPY = {item: np.dtype(str(item)) for item in DType if item is not DType.BFLOAT16} | {
    DType.BFLOAT16: np.dtype("uint16")
}


@dataclass(frozen=True, slots=True)
class Block:
    """One field over all samples of a micro-batch.

    offset: bytes from the start of the payload. shape: [total tokens, ...] for a per-token field,
    [samples, ...] otherwise.
    """

    field: Field
    offset: int
    shape: tuple[int, ...]


def blocks(schema: Schema, tokens: Sequence[int]) -> tuple[list[Block], int]:
    """Blocks of a micro-batch whose samples have these token counts, and the payload's bytes."""
    found, offset, total = [], 0, sum(tokens)
    for field in schema.fields:
        lead = total if field.per_token else len(tokens)
        found.append(Block(field, offset, (lead, *field.shape)))
        offset = aligned(offset + field.unit * lead)
    return found, offset


def check_payload(header: m.MicroBatch, payload: memoryview) -> None:
    """Raise ProtocolError when header and payload disagree about the size."""
    _, nbytes = blocks(header.schema_, header.tokens)
    if nbytes != payload.nbytes:
        raise ProtocolError(
            f"micro-batch {header.index} of step {header.step} describes {nbytes} payload bytes, "
            f"the frame carries {payload.nbytes}"
        )


def arrays(header: m.MicroBatch, payload: memoryview) -> dict[str, NDArray[np.generic]]:
    """Fields as numpy views of the payload: [total tokens, ...] or [samples, ...]; no copy.

    bfloat16 values come as their bits, in uint16.
    """
    found: dict[str, NDArray[np.generic]] = {}
    for block in blocks(header.schema_, header.tokens)[0]:
        stop = block.offset + block.field.unit * block.shape[0]
        raw = np.frombuffer(payload[block.offset : stop], dtype=_NUMPY[block.field.dtype])
        found[block.field.name] = raw.reshape(block.shape)
    return found
