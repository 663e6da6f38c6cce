"""Where fields lie: in the span of one sample, and in the payload of a micro-batch.

A span has the fields of a sample one after the other, each at a multiple of `ALIGNMENT`. The
payload of a micro-batch has a block a field, each at a multiple of `ALIGNMENT` too, with the values
of all its samples one after the other and nothing between them. For `input_ids` int64 and
`loss_mask` bool, both one value a token:

    span of 5 tokens                  | 0..40 input_ids | 40..45 loss_mask | ..48 zeros |
    micro-batch of 5 and 2 tokens     | 0..56 input_ids | 56..63 loss_mask | ..64 zeros |

All of it follows from token counts and the fields' units. Nothing else knows where anything lies.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property

#: Every field starts at a multiple of this many bytes, so that no tensor view is misaligned.
#: A power of two.
ALIGNMENT = 8
#: The zeros behind so many bytes (modulo `ALIGNMENT`) that take it to the next multiple.
PADDING = [bytes(-over % ALIGNMENT) for over in range(ALIGNMENT)]


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
        """Bytes (a token, a sample) of each field, one of them 0: all that places depend on."""

    # -- in the span of a sample

    def slices(self, tokens: int) -> list[slice]:
        """Where each field lies in the span of a sample of `tokens` tokens."""
        found, start = [], 0
        for per_token, per_sample in self.units:
            stop = start + per_token * tokens + per_sample
            found.append(slice(start, stop))
            start = aligned(stop)
        return found

    def nbytes(self, tokens: int) -> int:
        """Bytes of the whole span of a sample of `tokens` tokens."""
        per_token, beyond = self._slope
        return per_token * tokens + beyond[tokens % ALIGNMENT]

    def sizes(self, tokens: Iterable[int]) -> list[int]:
        """`nbytes` of many samples."""
        per_token, beyond = self._slope
        return [per_token * count + beyond[count % ALIGNMENT] for count in tokens]

    def cut(self, spans: Iterable[memoryview], tokens: Iterable[int]) -> list[memoryview]:
        """Sample after sample, the values of its fields; `slices` of many, without the slices."""
        units, values = self.units, []
        for span, count in zip(spans, tokens, strict=True):
            stop = 0
            for per_token, per_sample in units:
                start = (stop + ALIGNMENT - 1) & -ALIGNMENT  # `aligned`, unrolled
                stop = start + per_token * count + per_sample
                values.append(span[start:stop])
        return values

    def first_token(self, span: memoryview, tokens: int) -> bytes:
        """The span of `tokens` tokens cut down to its first token."""
        places = zip(self.slices(tokens), self.slices(1), strict=True)
        return join(span[at.start : at.start + one.stop - one.start] for at, one in places)

    @cached_property
    def _slope(self) -> tuple[int, list[int]]:
        """Bytes a token, and what a span has beyond them by its token count modulo `ALIGNMENT`.

        Padding and fields a sample, that is; how much a field is padded hangs on that alone.
        """
        if not self.units:  # lengths alone, as a simulation has them
            return 0, [0] * ALIGNMENT
        per_token = sum(unit for unit, _ in self.units)
        ends = [self.slices(rest)[-1].stop for rest in range(ALIGNMENT)]
        return per_token, [aligned(end) - per_token * rest for rest, end in enumerate(ends)]

    # -- in the payload of a micro-batch

    def blocks(self, tokens: Sequence[int]) -> tuple[list[slice], int]:
        """Where each field of samples of so many tokens lies, and the bytes in all."""
        total, samples = sum(tokens), len(tokens)
        found, start = [], 0
        for per_token, per_sample in self.units:
            stop = start + per_token * total + per_sample * samples
            found.append(slice(start, stop))
            start = (stop + ALIGNMENT - 1) & -ALIGNMENT
        return found, start
