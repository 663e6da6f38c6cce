"""Where fields lie: in the span of one sample, and in the payload of a micro-batch.

A span has the fields of a sample one after the other, each at a multiple of `ALIGNMENT`. The
payload of a micro-batch has a block a field, each at a multiple of `ALIGNMENT` too, with the values
of all its samples one after the other and nothing between them. For `input_ids` int64 and
`loss_mask` bool, both one value a token:

    span of 5 tokens                  | 0..40 input_ids | 40..45 loss_mask | ..48 zeros |
    micro-batch of 5 and 2 tokens     | 0..56 input_ids | 56..63 loss_mask | ..64 zeros |

All of it follows from the fields' units and from counts: of tokens, of samples, and of the rows
that samples have of each ragged field. Nothing else knows where anything lies.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import repeat
from operator import add

#: Every field starts at a multiple of this many bytes, so that no tensor view is misaligned.
#: A power of two.
ALIGNMENT = 8
#: The zeros behind so many bytes (modulo `ALIGNMENT`) that take it to the next multiple.
PADDING = [bytes(-over % ALIGNMENT) for over in range(ALIGNMENT)]


#: Which count a field's size goes with: tokens, samples, or the rows of the first ragged field;
#: `ROWS + 1` are those of the second, and so on. A sample's counts are (5, 1, 3, 0), say.
TOKENS, SAMPLES, ROWS = range(3)

#: Rows of many samples: of each ragged field those of each sample, as they go over the wire.
RowsByField = Sequence[Sequence[int]]


def aligned(nbytes: int) -> int:
    """Round up to the next multiple of `ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def join(values: Iterable[bytes | memoryview]) -> bytes:
    """The span that these values of a sample's fields make, in the order of its schema."""
    parts: list[bytes | memoryview] = []
    for value in values:
        parts += value, PADDING[len(value) % ALIGNMENT]
    return b"".join(parts)


class SpanLayout(ABC):
    """Where the fields of a schema lie."""

    @property
    @abstractmethod
    def units(self) -> tuple[tuple[int, int], ...]:
        """Of each field its unit, and which count it goes with: `TOKENS`, `SAMPLES`, `ROWS`, ...

        All that places depend on, beside the counts.
        """

    # -- in the span of a sample

    def slices(self, tokens: int, rows: Sequence[int] = ()) -> list[slice]:
        """Where each field lies in the span of a sample of `tokens` tokens, and of these rows."""
        return self._places((tokens, 1, *rows))[0]

    def nbytes(self, tokens: int, rows: Sequence[int] = ()) -> int:
        """Bytes of the whole span of a sample of `tokens` tokens, and of these rows."""
        per_token, beyond = self._slope
        found = per_token * tokens + beyond[tokens % ALIGNMENT]
        if rows:
            found += sum(map(_of_rows, self._row_units, rows))
        return found

    def sizes(self, tokens: Iterable[int], rows: RowsByField = ()) -> list[int]:
        """`nbytes` of many samples."""
        per_token, beyond = self._slope
        found = [per_token * count + beyond[count % ALIGNMENT] for count in tokens]
        for unit, counts in zip(self._row_units, rows, strict=True):
            found = list(map(add, found, map(_of_rows, repeat(unit), counts)))
        return found

    def cut(
        self, spans: Iterable[memoryview], tokens: Iterable[int], rows: RowsByField = ()
    ) -> list[memoryview]:
        """Sample after sample, the values of its fields; `slices` of many, without the slices."""
        units, values = self.units, []
        ahead, mask = ALIGNMENT - 1, -ALIGNMENT
        for span, counts in zip(spans, zip(tokens, repeat(1), *rows, strict=False), strict=True):
            stop = 0
            for unit, by in units:
                start = (stop + ahead) & mask  # `aligned`, unrolled
                stop = start + unit * counts[by]
                values.append(span[start:stop])
        return values

    def first_token(self, span: memoryview, tokens: int, rows: Sequence[int] = ()) -> bytes:
        """The span of a sample cut down to its first token, and to no rows."""
        places = zip(self.slices(tokens, rows), self.slices(1, [0] * len(rows)), strict=True)
        return join(span[at.start : at.start + one.stop - one.start] for at, one in places)

    def _places(self, counts: Sequence[int]) -> tuple[list[slice], int]:
        """Where each field lies with so much of everything, and where the next one would."""
        found, start = [], 0
        for unit, by in self.units:
            stop = start + unit * counts[by]
            found.append(slice(start, stop))
            start = (stop + ALIGNMENT - 1) & -ALIGNMENT
        return found, start

    @cached_property
    def _row_units(self) -> list[int]:
        """Bytes of a row of each ragged field."""
        return [unit for unit, by in self.units if by >= ROWS]

    @cached_property
    def _slope(self) -> tuple[int, list[int]]:
        """Bytes a token, and what a span has beyond them by its token count modulo `ALIGNMENT`.

        Padding and fields a sample, that is, without any rows; how much a field is padded hangs on
        its own size alone.
        """
        per_token = sum(unit for unit, by in self.units if by == TOKENS)
        none = [0] * len(self._row_units)
        ends = [self._places((rest, 1, *none))[1] for rest in range(ALIGNMENT)]
        return per_token, [end - per_token * rest for rest, end in enumerate(ends)]

    # -- in the payload of a micro-batch

    def blocks(self, tokens: Sequence[int], rows: RowsByField = ()) -> tuple[list[slice], int]:
        """Where each field of samples of so many tokens and rows lies, and the bytes in all."""
        return self._places((sum(tokens), len(tokens), *map(sum, rows)))


def _of_rows(unit: int, rows: int) -> int:
    """Bytes that a ragged field takes up in a span."""
    return (unit * rows + ALIGNMENT - 1) & -ALIGNMENT
