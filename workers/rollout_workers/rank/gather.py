"""A micro-batch some samples of which lie elsewhere, made into what would have come in one piece.

    the frame's payload    a block a field, of the samples that are in it alone
    spans elsewhere        a sample each, its fields one after the other
    what is made of them   a block a field, of all samples in the micro-batch's order

Elsewhere is a payload store, which puts what it has where it belongs (`get_into`), or shared memory
(`shared_memory/`). So each value is copied once, and other threads run meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, compress, pairwise
from typing import Generic, TypeVar

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.spans import ALIGNMENT, PADDING, aligned
from rollout_dispatcher.transport.memory import Memory, copy_bytes
from rollout_workers.stores.interface import Part

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
        described = self._carried[1]
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
        payload, elsewhere = self.lay_out(carried, memory)
        for place, own in elsewhere:
            read(place, [payload[at] for at in own])
        return payload

    def lay_out(
        self, carried: memoryview, memory: Memory
    ) -> tuple[memoryview, list[tuple[P, list[slice]]]]:
        """The payload, without the values of spans elsewhere: where those belong, a slice a field.

        `carried` was checked.
        """
        payload, elsewhere = memory(self.nbytes), list[tuple[P, list[slice]]]()
        ends = [block.start for block in self._carried[0]]  # of what was taken of each block
        for place, *own in zip(self._places, *self._values(), strict=True):
            if place is not None:
                elsewhere.append((place, own))
                continue
            for field, at in enumerate(own):
                start = ends[field]
                ends[field] = stop = start + at.stop - at.start
                copy_bytes(payload[at], carried[start:stop])
        for block in self._blocks:
            padding = PADDING[block.stop % ALIGNMENT]
            payload[block.stop : block.stop + len(padding)] = padding
        return payload, elsewhere

    @cached_property
    def _carried(self) -> tuple[list[slice], int]:
        """The blocks of the samples that are in the frame, and their bytes in all."""
        here = [place is None for place in self._places]
        tokens = list(compress(self._header.tokens, here))
        return self._schema.blocks(tokens, [list(compress(each, here)) for each in self.rows])

    def _values(self) -> list[list[slice]]:
        """Of each field where the values of each sample belong."""
        counts = (self._header.tokens, [1] * len(self._places), *self.rows)
        return [
            _one_by_one(block.start, [unit * count for count in counts[by]])
            for block, (unit, by) in zip(self._blocks, self._schema.units, strict=True)
        ]


def lay_out(
    schema: Schema, header: m.MicroBatch, carried: memoryview, memory: Memory
) -> tuple[memoryview, list[list[Part]]]:
    """The payload of all samples, where those have to be filled in yet that lie in payload stores.

    Also where the parts of each of them go, in their order. carried: what came in the frame.
    """
    payload, stored = Whole(schema, header, header.places or ()).lay_out(carried, memory)
    return payload, [list(_parts(own)) for _, own in stored]


def _parts(values: Iterable[slice]) -> Iterator[Part]:
    """Those of a span, one a field."""
    source = 0
    for at in values:
        nbytes = at.stop - at.start
        yield Part(source, at.start, nbytes)
        source = aligned(source + nbytes)


def _one_by_one(start: int, sizes: Iterable[int]) -> list[slice]:
    """Where values of these sizes lie, one behind the other, from `start` on."""
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=start))]
