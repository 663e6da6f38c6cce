"""The fields of a micro-batch as views of its payload.

Cutting a field's block out is all there is to packing: no value is moved.

Where some samples lie elsewhere, what would have come in one piece is made of these:

    the frame's payload    a block a field, of the samples that are in it alone
    spans elsewhere        a sample each, its fields one after the other
    what is made of them   a block a field, of all samples in the micro-batch's order

Elsewhere is a payload store, which puts what it has where it belongs (`get_into`). So each value is
copied once, and other threads run meanwhile.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, compress, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.spans import ALIGNMENT, PADDING, aligned
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


#: Where a sample's values of a field begin and end in a payload.
Ends = tuple[int, int]


class Whole:
    """The payload of all samples of a micro-batch.

    places: of each sample where its span lies, or None if it is in the frame's payload. rows: of
    the ragged fields. nbytes: of the whole payload. Raises ProtocolError for rows of other fields
    than the schema's.
    """

    def __init__(self, schema: Schema, header: m.MicroBatch, places: Sequence[object]) -> None:
        self._schema, self._header, self._places = schema, header, places
        self.rows = header.rows_of(schema)
        self._blocks, self.nbytes = schema.blocks(header.tokens, self.rows)

    def check_carried(self, nbytes: int) -> None:
        """Raise ProtocolError where a frame does not carry what its samples have that are in it."""
        described = self._carried[1]
        if described != nbytes:
            raise ProtocolError(
                f"micro-batch {self._header.index} of step {self._header.step} describes "
                f"{described} payload bytes beside what lies elsewhere, the frame carries {nbytes}"
            )

    def begun(self, carried: memoryview, memory: Memory) -> memoryview:
        """The payload without the values of spans elsewhere; `carried` was checked."""
        payload = memory(self.nbytes)
        if carried.nbytes:
            taken = [block.start for block in self._carried[0]]  # the end of that in each block
            for place, *own in self._by_sample():
                for field, (start, stop) in enumerate(own if place is None else ()):
                    begin = taken[field]
                    taken[field] = end = begin + stop - start
                    copy_bytes(payload[start:stop], carried[begin:end])
        for block in self._blocks:
            padding = PADDING[block.stop % ALIGNMENT]
            payload[block.stop : block.stop + len(padding)] = padding
        return payload

    def elsewhere(self) -> list[list[Ends]]:
        """Of each span elsewhere where its values belong, one a field."""
        return [own for place, *own in self._by_sample() if place is not None]

    @cached_property
    def _carried(self) -> tuple[list[slice], int]:
        """The blocks of the samples that are in the frame, if there are any, and their bytes."""
        if None not in self._places:
            return [], 0
        here = [place is None for place in self._places]
        tokens = list(compress(self._header.tokens, here))
        return self._schema.blocks(tokens, [list(compress(each, here)) for each in self.rows])

    @cached_property
    def _values(self) -> list[list[Ends]]:
        """Of each field where the values of each sample belong."""
        counts = (self._header.tokens, [1] * len(self._places), *self.rows)
        fields = zip(self._blocks, self._schema.units, strict=True)
        return [_one_by_one(block.start, unit, counts[by]) for block, (unit, by) in fields]

    def _by_sample(self) -> Iterator[tuple[object, *tuple[Ends, ...]]]:
        """Of each sample its place, and where its values belong."""
        return zip(self._places, *self._values, strict=True)


def lay_out(
    schema: Schema, header: m.MicroBatch, carried: memoryview, memory: Memory
) -> tuple[memoryview, list[list[Part]]]:
    """The payload of all samples, where those have to be filled in yet that lie in payload stores.

    Also where the parts of each of them go, in their order. carried: what came in the frame.
    """
    whole = Whole(schema, header, header.places or ())
    return whole.begun(carried, memory), [list(_parts(own)) for own in whole.elsewhere()]


def _parts(values: Sequence[Ends]) -> Iterator[Part]:
    """Those of a span, one a field."""
    source = 0
    for start, stop in values:
        yield Part(source, start, stop - start)
        source = aligned(source + stop - start)


def _one_by_one(start: int, unit: int, counts: Sequence[int]) -> list[Ends]:
    """Where so many units each lie, one behind the other, from `start` on."""
    return list(pairwise(accumulate([unit * count for count in counts], initial=start)))
