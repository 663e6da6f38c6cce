"""A buffered sample, the amounts that samples occupy, and the buffer's caps and indexes.

`BufferLimits`: the caps of the sample buffer. Two are *soft*: they count ready samples only, so
incomplete groups block nothing, and they block producers only while a step could be planned of the
ready samples. Two are *hard*: payload bytes in memory, and in payload stores, of all samples.

`Lowest`: a priority queue of things whose numbers may change, in O(log n): a heap that keeps
outdated entries and skips them at the top. Invariant: they never far outnumber the things.

`DropIndex`: ready samples by policy version and by length, so that samples too old or too long are
found without a scan. The index by version is built on first use, which settings and phases
cause.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count, groupby
from typing import Generic, Self, TypeVar

from rollout_dispatcher.payload import Footprint
from rollout_dispatcher.sample import Sample, SamplesByField
from rollout_planner.types import round_up


@dataclass(slots=True, eq=False)
class Entry:
    """A buffered sample.

    ticket: its number in order of acceptance. group: number of its group, -1 for none; unlike ids,
    numbers of groups are never reused. producer: that pushed it; empty over HTTP. oldest: the
    oldest policy version in its group.
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
        """The policy version for staleness: its group's oldest; None if not tracked."""
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
        """The amount of these samples."""
        return cls(len(samples.tokens), sum(samples.tokens), *Footprint.by(samples.payloads))

    @classmethod
    def of_entries(cls, entries: Iterable[Entry]) -> Self:
        """The amount of these entries."""
        samples = [entry.sample for entry in entries]
        taken = Footprint.by([sample.payload for sample in samples])
        return cls(len(samples), sum([sample.tokens for sample in samples]), *taken)

    @property
    def footprint(self) -> Footprint:
        """The bytes."""
        return Footprint(self.nbytes, self.referenced)

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.samples += 1
        self.tokens += sample.tokens
        nbytes, referenced = sample.footprint
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


#: Names of the hard caps: on bytes in memory, and in payload stores.
MEMORY_CAP, STORES_CAP = "bytes", "referenced-bytes"


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """Limits on a group that has to stay in one micro-batch; None: no limit.

    length_multiple: a sample's tokens count rounded up to a multiple of this. drops: whether a
    group of more tokens is accepted and dropped, not refused.
    """

    samples: int | None = None
    tokens: int | None = None
    length_multiple: int = 1
    drops: bool = False

    def tokens_of(self, samples: Iterable[Sample]) -> int:
        """Tokens of these samples in a micro-batch."""
        return sum(round_up(sample.tokens, self.length_multiple) for sample in samples)

    def too_long(self, samples: Iterable[Sample]) -> bool:
        """Whether these samples exceed the limit on tokens."""
        return self.tokens is not None and self.tokens_of(samples) > self.tokens


#: Groups need not stay in one micro-batch.
NO_LIMITS = MicroBatchLimits()


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """samples, tokens: soft; `samples` counts groups where a batch is counted in groups.

    group: samples of the largest group, None: any. group_size: of all new groups, None: any;
    `close_group` may give another. tokens: None: not capped. nbytes: hard, in memory.
    max_sample_tokens: of one sample. held_bytes: payloads of blocked pushes. stores: addresses of
    allowed payload stores. referenced_bytes: hard, in these. micro_batch: for groups that have to
    stay in one.
    """

    samples: int
    group: int | None
    tokens: int | None
    nbytes: int
    max_sample_tokens: int
    held_bytes: int = 1 << 30
    stores: frozenset[str] = frozenset()
    referenced_bytes: int = 1 << 40
    micro_batch: MicroBatchLimits = NO_LIMITS
    group_size: int | None = None

    def too_large(self, size: int) -> str:
        """The limit that a group of `size` samples exceeds, in words; empty if none."""
        for what, most in (("step", self.group), ("micro-batch", self.micro_batch.samples)):
            if most is not None and size > most:
                return f"a {what} takes at most {most} samples"
        return ""


T = TypeVar("T", bound=Hashable)

#: Outdated entries to keep before a rebuild pays.
SPARE = 64


class Lowest(Generic[T]):
    """Things by number. They stay in memory for a while after `remove`: use names, not samples."""

    def __init__(self) -> None:
        self._numbers: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, thing: object) -> bool:
        return thing in self._numbers

    def set(self, thing: T, number: float) -> None:
        """Set the number of a thing."""
        if self._numbers.get(thing) == number:
            return
        self._numbers[thing] = number
        self._pushed += 1
        heappush(self._heap, (number, self._pushed, thing))
        if len(self._heap) > 2 * len(self._numbers) + SPARE:
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[2]) == entry[0]]
            heapify(self._heap)

    def remove(self, thing: T) -> None:
        """Remove a thing, if it is there."""
        self._numbers.pop(thing, None)

    @property
    def lowest(self) -> float | None:
        """The lowest number; None if empty."""
        heap, numbers = self._heap, self._numbers
        while heap and numbers.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_below(self, number: float) -> list[T]:
        """Remove and return things with a lower number than this, lowest first."""
        found = []
        while (lowest := self.lowest) is not None and lowest < number:
            thing = heappop(self._heap)[2]
            del self._numbers[thing]
            found.append(thing)
        return found


class DropIndex:
    """Ready samples by version and by length.

    too_long: length in tokens above which samples are listed. micro_batch: limits above which
    groups are listed, if it drops them.
    """

    def __init__(
        self, too_long: int | None = None, micro_batch: MicroBatchLimits = NO_LIMITS
    ) -> None:
        self._above, self._micro_batch = too_long, micro_batch
        #: Whether `add` and `remove` have to be called.
        self.watches = too_long is not None
        self._by_version: dict[int | None, dict[Entry, int]] | None = None
        self._versions: Lowest[int] = Lowest()
        self._unknown: Lowest[int] = Lowest()  # tickets of samples without a version
        self._long: dict[Entry, None] = {}
        self._places = count()

    def watch(self, ready: Iterable[Entry]) -> None:
        """Index these samples, and all later ones, by version."""
        if self._by_version is None:
            self._by_version, self.watches = {}, True
            self._place(list(ready))

    # -- changes ------------------------------------------------------------------------------

    def add(self, entries: Sequence[Entry]) -> None:
        """Add ready samples behind all others: one group, or samples without one."""
        if self._by_version is not None:
            self._place(entries)
        if (above := self._above) is not None:
            long = [entry for entry in entries if entry.sample.tokens > above]
            if long or self._are_too_long(entries):
                self._long.update(dict.fromkeys(entries if entries[0].group >= 0 else long))

    def _are_too_long(self, entries: Sequence[Entry]) -> bool:
        """Whether they are a group with too many tokens for a micro-batch."""
        if not self._micro_batch.drops or entries[0].group < 0:
            return False
        return self._micro_batch.too_long(entry.sample for entry in entries)

    def _place(self, entries: Sequence[Entry]) -> None:
        assert self._by_version is not None
        for version, same in _by_version(entries):
            if version is None:
                for entry in same:
                    self._unknown.set(entry.ticket, entry.ticket)
            elif version not in self._by_version:
                self._versions.set(version, version)
            self._by_version.setdefault(version, {}).update(zip(same, self._places, strict=False))

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove samples that are no longer ready."""
        if self._by_version is not None:
            for version, gone in _by_version(entries):
                same = self._by_version[version]
                for entry in gone:
                    del same[entry]
                if version is None:
                    for entry in gone:
                        self._unknown.remove(entry.ticket)
                elif not same:
                    self._versions.remove(version)
                    del self._by_version[version]
        if self._long:
            for entry in entries:
                self._long.pop(entry, None)

    # -- queries --------------------------------------------------------------------------------

    def too_long(self) -> list[Entry]:
        """Samples that are too long, each with its whole group, oldest first."""
        return list(self._long)

    def older_than(self, version: int) -> list[Entry]:
        """Samples of older policy versions than this, in order of arrival."""
        if not self.has_before(version, 0):
            return []
        assert self._by_version is not None
        found: dict[Entry, int] = {}
        for old in self._versions.take_below(version):
            found |= self._by_version[old]
            self._versions.set(old, old)  # still here, until removed
        return sorted(found, key=found.__getitem__)

    def has_before(self, version: int, ticket: int) -> bool:
        """Whether there is a sample of an older version, or an unversioned one before `ticket`."""
        oldest, first = self._versions.lowest, self._unknown.lowest
        return (oldest is not None and oldest < version) or (first is not None and first < ticket)


def _by_version(entries: Sequence[Entry]) -> Iterator[tuple[int | None, Sequence[Entry]]]:
    """Runs of entries of one version, mostly a single run."""
    # `Entry.version`, inlined: a call for each would take as long as all the rest.
    versions = [
        entry.oldest
        if entry.oldest is not None
        else None
        if (sample := entry.sample).staleness_exempt
        else sample.policy_version
        for entry in entries
    ]
    stop = 0
    for version, same in groupby(versions):
        start, stop = stop, stop + len(list(same))
        yield version, entries[start:stop]
