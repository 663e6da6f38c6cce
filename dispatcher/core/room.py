"""The room in the sample buffer: how much there is, and what is used of it.

Invariant: what is used is what samples that are held take up and what is reserved for the members
that open groups still lack.
"""

from dataclasses import dataclass, field
from typing import Self

from dispatcher.errors import BufferFull
from dispatcher.sample import Columns, Sample


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Caps of the buffer; `group` is the largest group. `tokens=None`: not capped."""

    samples: int
    group: int
    tokens: int | None
    nbytes: int
    max_sample_tokens: int

    def would_fit(self, tokens: int, nbytes: int) -> bool:
        """Whether an empty buffer has room for so many tokens and bytes."""
        return nbytes <= self.nbytes and (self.tokens is None or tokens <= self.tokens)


@dataclass(slots=True)
class Amount:
    """An amount of samples, tokens and bytes."""

    samples: int = 0
    tokens: int = 0
    nbytes: int = 0

    @classmethod
    def of(cls, samples: Columns) -> Self:
        """What these samples take up together."""
        return cls(len(samples.tokens), sum(samples.tokens), sum(map(len, samples.payloads)))

    def add(self, sample: Sample, times: int) -> None:
        """Add a sample so many times."""
        self.samples += times
        self.tokens += times * sample.tokens
        self.nbytes += times * sample.nbytes

    def __iadd__(self, other: Self) -> Self:
        self.samples += other.samples
        self.tokens += other.tokens
        self.nbytes += other.nbytes
        return self

    def __isub__(self, other: Self) -> Self:
        self.samples -= other.samples
        self.tokens -= other.tokens
        self.nbytes -= other.nbytes
        return self


@dataclass(slots=True)
class Room:
    """What is used of `limits`."""

    limits: BufferLimits
    held: Amount = field(default_factory=Amount)
    reserved: Amount = field(default_factory=Amount)

    def lacks(self, samples: int, tokens: int, nbytes: int) -> BufferFull | None:
        """The first cap that is too low for so much more; None if there is room for it."""
        held, reserved, limits = self.held, self.reserved, self.limits
        used = held.samples + reserved.samples
        if used + samples > limits.samples:
            return BufferFull("samples", used, limits.samples)
        used = held.tokens + reserved.tokens
        if limits.tokens is not None and used + tokens > limits.tokens:
            return BufferFull("tokens", used, limits.tokens)
        used = held.nbytes + reserved.nbytes
        if used + nbytes > limits.nbytes:
            return BufferFull("bytes", used, limits.nbytes)
        return None
