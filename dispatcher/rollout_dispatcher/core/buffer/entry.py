"""A buffered sample, and how much of a buffer samples take up."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from rollout_dispatcher.payload import Taken
from rollout_dispatcher.sample import Sample, SamplesByField


@dataclass(slots=True, eq=False)
class Entry:
    """A buffered sample.

    ticket: its number in order of acceptance.
    group: number of its group, -1 for none; ids of groups may be used again, numbers are not.
    producer: who pushed it; empty over HTTP. oldest: the oldest policy version in its group.
    """

    sample: Sample
    ticket: int
    arrived: float
    group: int = -1
    skips: int = 0
    producer: str = ""
    oldest: int | None = None

    @property
    def version(self) -> int | None:
        """The policy version that it is judged by: its group's oldest; None if not tracked."""
        return self.sample.judged_version if self.oldest is None else self.oldest


def in_journal(entry: Entry) -> Entry:
    """The same with its payload in the journal alone."""
    return replace(entry, sample=entry.sample.in_journal())


@dataclass(slots=True)
class Amount:
    """Samples, their tokens, and the bytes of their payloads: in memory, and in payload stores."""

    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    referenced: int = 0

    @classmethod
    def of(cls, samples: SamplesByField) -> Self:
        """What these samples take up together."""
        return cls(len(samples.tokens), sum(samples.tokens), *Taken.by(samples.payloads))

    @classmethod
    def of_entries(cls, entries: Iterable[Entry]) -> Self:
        """What these entries take up together."""
        samples = [entry.sample for entry in entries]
        taken = Taken.by([sample.payload for sample in samples])
        return cls(len(samples), sum([sample.tokens for sample in samples]), *taken)

    @property
    def taken(self) -> Taken:
        """The bytes."""
        return Taken(self.nbytes, self.referenced)

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.samples += 1
        self.tokens += sample.tokens
        nbytes, referenced = sample.taken
        self.nbytes += nbytes
        self.referenced += referenced

    def __iadd__(self, other: Self) -> Self:
        self.samples += other.samples
        self.tokens += other.tokens
        self.nbytes += other.nbytes
        self.referenced += other.referenced
        return self

    def __isub__(self, other: Self) -> Self:
        self.samples -= other.samples
        self.tokens -= other.tokens
        self.nbytes -= other.nbytes
        self.referenced -= other.referenced
        return self
