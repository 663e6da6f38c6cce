"""A micro-batch some samples of which lie elsewhere, made into what would have come in one piece.

    the frame's payload    a block a field, of the samples that are in it alone
    spans elsewhere        a sample each, its fields one after the other
    what is made of them   a block a field, of all samples in the micro-batch's order

Elsewhere is a payload store, or shared memory (`shared_memory/`). One copy of each value, which
lets other threads run meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, compress, pairwise
from typing import Generic, TypeVar

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.spans import ALIGNMENT, PADDING, aligned
from rollout_dispatcher.transport.memory import Memory, copy_bytes

P = TypeVar("P")


class Whole(Generic[P]):
    """The payload of all samples of a micro-batch.

    places: of each sample where its span lies, or None if it is in the frame's payload. rows: of
    the ragged fields. nbytes: of the whole payload. Raises ProtocolError for rows of other fields
    than the schema's.
    """

    def __init__(self, schema: Schema, header: m.MicroBatch, places: Sequence[P | None]) -> None:
        self._schema, self._header, self._places = schema, header, places
        self.rows = header.rows_of(schema)
        self._blocks, self.nbytes = schema.blocks(header.tokens, self.rows)

    def check_carried(self, nbytes: int) -> None:
        """Raise ProtocolError where a frame does not carry what its samples have that are in it."""
        described = self._carried()[1]
        if described != nbytes:
            raise ProtocolError(
                f"micro-batch {self._header.index} of step {self._header.step} describes "
                f"{described} payload bytes beside what lies elsewhere, the frame carries {nbytes}"
            )

    def put_together(
        self, carried: memoryview, memory: Memory, read: Callable[[P, Sequence[memoryview]], object]
    ) -> memoryview:
        """The payload, in memory of its own; `carried` was checked.

        read: called for each span elsewhere, in order, with its place and with where its fields'
        values belong, a piece a field.
        """
        payload = memory(self.nbytes)
        ends = [block.start for block in self._carried()[0]]  # of what was taken of each block
        for place, *pieces in zip(self._places, *self._pieces(payload), strict=True):
            if place is not None:
                read(place, pieces)
                continue
            for at, piece in enumerate(pieces):
                start = ends[at]
                ends[at] = stop = start + len(piece)
                copy_bytes(piece, carried[start:stop])
        for block in self._blocks:
            padding = PADDING[block.stop % ALIGNMENT]
            payload[block.stop : block.stop + len(padding)] = padding
        return payload

    def _carried(self) -> tuple[list[slice], int]:
        """The blocks of the samples that are in the frame, and their bytes in all."""
        here = [place is None for place in self._places]
        tokens = list(compress(self._header.tokens, here))
        return self._schema.blocks(tokens, [list(compress(each, here)) for each in self.rows])

    def _pieces(self, payload: memoryview) -> list[list[memoryview]]:
        """Of each field where the values of each sample belong."""
        counts = (self._header.tokens, [1] * len(self._places), *self.rows)
        return [
            _cut(payload, block.start, [unit * count for count in counts[by]])
            for block, (unit, by) in zip(self._blocks, self._schema.units, strict=True)
        ]


def gather(
    schema: Schema,
    header: m.MicroBatch,
    carried: memoryview,
    spans: Iterable[memoryview],
    memory: Memory,
) -> memoryview:
    """The payload of all samples. spans: of those that lie in payload stores, in their order."""
    stored = iter(spans)
    whole = Whole(schema, header, header.places or ())
    return whole.put_together(carried, memory, lambda _, pieces: _copy(next(stored), pieces))


def _copy(span: memoryview, pieces: Iterable[memoryview]) -> None:
    """The values of a span, a piece a field."""
    start = 0
    for piece in pieces:
        stop = start + len(piece)
        copy_bytes(piece, span[start:stop])
        start = aligned(stop)


def _cut(payload: memoryview, start: int, sizes: Iterable[int]) -> list[memoryview]:
    """Pieces of these sizes, one behind the other, from `start` on."""
    stops = accumulate(sizes, initial=start)
    return [payload[at:stop] for at, stop in pairwise(stops)]
