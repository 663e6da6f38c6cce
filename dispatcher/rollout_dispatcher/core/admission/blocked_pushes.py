"""Blocked pushes, in a fair queue, and the memory that their payloads occupy.

    blocked with its payload ---------------------------------its turn--> decided
    blocked, payload evicted (over the cap) --its turn--> resend requested --arrives--> decided

Invariant: payload bytes of blocked pushes stay within `held_bytes`, but for one push, so that there
is always one that can be accepted at once. `FairQueue` is fair to each producer.

While the first push in the queue stays blocked, others are tried that may be accepted or refused:
those with a small enough sample, and members of groups that have changed.

`Push`: a push while it is decided.

`FairQueue`: a fair queue: each producer waits for at most one turn of each other.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): an item's start tag is the finish tag of its
owner's last one, but at least the virtual time, the start tag of the item removed last; the lowest
start tag is first.

    a adds 4, 4, 4 units; they start at 0, 4, 8
    the first of a is taken; now b adds 1 unit, which starts at 0: before the second of a
    b adds 4 units more, which start at 1: before the second of a, too

The queue orders items only; admission decides when to remove one, and while no step can be planned
it removes any that fits.

Invariant: of one owner, first come is first served.
"""

import sys
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import Generic, TypeVar

from rollout_dispatcher.core.effects import PushAnswered
from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Footprint, Reference
from rollout_dispatcher.sample import Outcome, Sample

_VERSION = attrgetter("judged_version")


@dataclass(slots=True, eq=False)
class Push:
    """Samples `first_seq`, `first_seq + 1`, ... of one producer, and their outcomes so far.

    producer: its client id; empty for a push that is never sent again under the same numbers.
    floor: low watermark: this producer never again sends a sequence number below it. named: sample
    ids were given by the user, so a repeat from any producer is a duplicate. has_references:
    whether some of the samples lie in payload stores. exempt_from_end: it arrived before its phase
    or stream was ended, and may still be accepted. While it is blocked: groups: member count per
    group in this push; other pushes may change the outcome. nbytes: of its payloads in memory.
    smallest: footprints of its smallest undecided sample in memory, and in a payload store, as far
    as it has such. payload_evicted: its payloads were dropped from memory.
    resend_requested: its producer was asked for them.
    """

    producer: str
    first_seq: int
    samples: tuple[Sample, ...]
    floor: int = 0
    named: bool = False
    has_references: bool = False
    outcomes: list[Outcome | None] = field(init=False)
    errors: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    exempt_from_end: bool = False
    groups: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    smallest: tuple[Footprint, ...] = ()
    payload_evicted: bool = False
    resend_requested: bool = False

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.samples)

    @property
    def numbers(self) -> range:
        """The samples' sequence numbers."""
        return range(self.first_seq, self.first_seq + len(self.samples))

    @property
    def undecided(self) -> list[int]:
        """Indices of the samples that wait."""
        return [index for index, outcome in enumerate(self.outcomes) if outcome is None]

    @property
    def waiting(self) -> list[Sample]:
        """The samples that wait."""
        return [self.samples[index] for index in self.undecided]

    @property
    def is_decided(self) -> bool:
        """Whether no sample waits."""
        return all(self.outcomes)

    @property
    def given_ids(self) -> tuple[str, ...]:
        """The samples' ids, if the user gave them."""
        return tuple(sample.sample_id for sample in self.samples) if self.named else ()

    def answer(self) -> PushAnswered:
        """The outcomes, in the order of the samples."""
        outcomes = tuple(filter(None, self.outcomes))
        versions = set(map(_VERSION, self.samples)) - {None}
        oldest = min(versions, default=None)
        return PushAnswered(
            self.producer, self.first_seq, outcomes, self.errors, oldest, self.reasons
        )


T = TypeVar("T", bound=Hashable)

#: Finish tags of owners with an empty queue that are kept before those that are not ahead of
#: virtual time are dropped.
REMEMBERED = 64


class FairQueue(Generic[T]):
    """Items with their owners and sizes in units."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, T]] = []
        self._places: dict[T, tuple[int, int]] = {}
        #: Finish tag of each owner's last item.
        self._ends: dict[str, int] = {}
        self._virtual_time = self._added = 0

    def __iter__(self) -> Iterator[T]:
        """Items in the order of the queue."""
        return (item for _, _, item in self._queue)

    def first(self) -> T:
        """The first item; there has to be one."""
        return self._queue[0][2]

    def in_order(self, items: Iterable[T]) -> list[T]:
        """These items in the order of the queue."""
        return sorted(items, key=self._places.__getitem__)

    def add(self, item: T, owner: str, units: int) -> None:
        """Append an item. owner: whose it is. units: its size."""
        start = max(self._virtual_time, self._ends.get(owner, 0))
        self._ends[owner] = start + units
        self._added += 1
        self._places[item] = (start, self._added)
        insort(self._queue, (start, self._added, item))

    def withdraw(self, item: T, owner: str, units: int) -> None:
        """Remove an item that was not served; its owner is not charged for it."""
        self.remove(item)
        if owner in self._ends:
            self._ends[owner] -= units

    def remove(self, item: T) -> None:
        """Remove an item that was served."""
        place = self._places.pop(item)
        at = bisect_left(self._queue, place, key=_place)
        del self._queue[at]
        if at == 0:
            self._virtual_time = place[0]
        if not self._queue:  # every owner starts anew
            self._ends.clear()
            self._virtual_time = 0
        elif len(self._ends) > 2 * len(self._queue) + REMEMBERED:
            self._ends = {
                owner: end for owner, end in self._ends.items() if end > self._virtual_time
            }


def _place(entry: tuple[int, int, T]) -> tuple[int, int]:
    return entry[:2]


#: Seconds for which a requested resend counts as under way, and keeps others from being requested.
RESEND_SECONDS = 10.0
#: Cap on blocked members per group: a change of the group re-examines all of them in one turn of
#: the event loop.
MAX_OF_GROUP = 256
#: Older than every policy version: stands for an unknown one.
_UNKNOWN = -sys.maxsize


class BlockedPushes:
    """held_bytes: cap on their payload bytes in memory. keep_groups_whole: whether groups stay
    together.
    """

    def __init__(self, held_bytes: int, *, keep_groups_whole: bool = True) -> None:
        self._limit, self._keep_groups_whole = held_bytes, keep_groups_whole
        self._blocked: dict[Push, None] = {}
        self._queue: FairQueue[Push] = FairQueue()
        self._of_producer: defaultdict[str, dict[Push, None]] = defaultdict(dict)
        self._of_group: defaultdict[str, dict[Push, None]] = defaultdict(dict)
        self._members: Counter[str] = Counter()  # of each group, as many as waited at first
        self._evicted: dict[tuple[str, int], Push] = {}
        self._resends: dict[Push, float] = {}  # since when, in that order
        self._group_changed: dict[Push, None] = {}  # of whose groups something has changed
        #: Samples of which a resend is under way.
        self.resending_samples = 0
        #: Rises whenever other blocked pushes may be accepted or refused: a push was removed, a
        #: resend is not under way any more, or a group with blocked members has changed.
        self.changes = 0
        #: Payload bytes in memory.
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocked)

    def __iter__(self) -> Iterator[Push]:
        """In the order of the queue."""
        return iter(self._queue)

    def __contains__(self, push: object) -> bool:
        return push in self._blocked

    def first(self) -> Push:
        """The first push of the queue; there has to be one."""
        return self._queue.first()

    def of_producer(self, producer: str) -> list[Push]:
        """This producer's pushes."""
        return list(self._of_producer.get(producer, ()))

    def of_group(self, group_id: str) -> list[Push]:
        """Pushes that may have a waiting sample of this group."""
        return list(self._of_group.get(group_id, ()))

    def mark_group_changed(self, group_id: str) -> None:
        """A group has changed: its blocked members may be accepted or refused now."""
        if (waiting := self._of_group.get(group_id)) is not None:
            self._group_changed.update(dict.fromkeys(waiting))
            self.changes += 1

    def mark_all_changed(self) -> None:
        """Mark the groups of all blocked pushes as changed."""
        self._group_changed = {push: None for push in self._blocked if push.groups}

    def pop_group_changed(self) -> list[Push]:
        """Pushes with members of groups that were marked since the last call."""
        found, self._group_changed = self._queue.in_order(self._group_changed), {}
        return found

    def fitting(self, fits: Callable[[Footprint], bool]) -> list[Push]:
        """Pushes of which a smallest sample fits, in the order of the queue."""
        return [push for push in self._queue if any(map(fits, push.smallest))]

    def largest(self) -> list[Footprint]:
        """The largest footprint of a push's smallest sample, in memory and in payload stores."""
        found = [footprint for push in self._blocked for footprint in push.smallest]
        memory = max((footprint.memory for footprint in found), default=0)
        referenced = max((footprint.referenced for footprint in found), default=0)
        return [Footprint(memory), Footprint(0, referenced)]

    def members(self, group_id: str) -> int:
        """How many samples of this group are blocked."""
        waiting = (sample for push in self.of_group(group_id) for sample in push.waiting)
        return sum(sample.group_id == group_id for sample in waiting)

    def exceeds_group_limit(self, push: Push) -> bool:
        """Whether one of its groups has `MAX_OF_GROUP` blocked members already."""
        return any(self._members[group_id] >= MAX_OF_GROUP for group_id in self._groups(push))

    def add(self, push: Push) -> None:
        """Add a blocked push; evicts its payload if that exceeds the cap."""
        self._blocked[push] = None
        push.groups = self._groups(push)
        self._queue.add(push, push.producer, len(push.samples))
        self._of_producer[push.producer][push] = None
        self._members.update(push.groups)
        for group_id in push.groups:
            self._of_group[group_id][push] = None
        self.update_size(push)

    def _groups(self, push: Push) -> Counter[str]:
        """Blocked members by group."""
        waiting = push.waiting if self._keep_groups_whole else ()
        return Counter(sample.group_id for sample in waiting if sample.group_id is not None)

    def withdraw(self, push: Push) -> None:
        """Remove a push of which the producer is gone; it may come again, and is not charged
        for.
        """
        self._queue.withdraw(push, push.producer, len(push.samples))
        self._forget(push)

    def remove(self, push: Push) -> None:
        """Remove a decided push."""
        self._queue.remove(push)
        self._forget(push)

    def _forget(self, push: Push) -> None:
        self._clear_eviction(push)
        self.changes += 1
        del self._blocked[push]
        self._group_changed.pop(push, None)
        self.nbytes -= push.nbytes
        _discard(self._of_producer, push.producer, push)
        for group_id, members in push.groups.items():
            _discard(self._of_group, group_id, push)
            self._members[group_id] -= members
            if not self._members[group_id]:
                del self._members[group_id]

    def update_size(self, push: Push) -> None:
        """Update the push's sizes to its undecided samples, and evict its payload if all exceed the
        cap.
        """
        waiting = push.waiting
        refer = [sample.nbytes for sample in waiting if isinstance(sample.payload, Reference)]
        inline = [sample for sample in waiting if not isinstance(sample.payload, Reference)]
        sizes = [sample.memory_bytes for sample in inline]
        before, push.nbytes = push.nbytes, sum(sizes)
        push.smallest = (
            *([Footprint(min(sizes))] if sizes else ()),
            *([Footprint(0, min(refer))] if refer else ()),
        )
        self.nbytes += push.nbytes - before
        if self.nbytes > self._limit and self.nbytes > push.nbytes > 0:
            push.samples = tuple(map(Sample.with_producer, push.samples))
            self._evicted[push.producer, push.first_seq] = push
            push.payload_evicted = True
            self.nbytes -= push.nbytes
            push.nbytes = 0

    # -- when a phase, or the stream, ends ----------------------------------------------------

    def exempt_from_end(self, producer: str | None = None) -> None:
        """Exempt pushes that are blocked now from the end of a phase or of the stream.

        producer: only its pushes; None: all.
        """
        for push in self._blocked if producer is None else self.of_producer(producer):
            push.exempt_from_end = True

    def waits(self, end: int | None) -> bool:
        """Whether an exempt sample is blocked that belongs before this phase, or the stream's
        end.
        """
        exempt = (push for push in self._blocked if push.exempt_from_end)
        return any(end is None or _oldest(push.waiting) < end for push in exempt)

    # -- without their payloads ---------------------------------------------------------------

    def request_resend(self, push: Push, now: float) -> None:
        """A resend of its payload is requested."""
        push.resend_requested = True
        self._resends[push] = now
        self.resending_samples += len(push.undecided)

    def expire_resends(self, now: float) -> None:
        """Stop expecting resends that were requested `RESEND_SECONDS` ago."""
        late = list(
            takewhile(lambda push: self._resends[push] + RESEND_SECONDS <= now, self._resends)
        )
        for push in late:
            self._stop_expecting(push)

    def next_deadline(self) -> float | None:
        """When the next requested resend is late."""
        since = next(iter(self._resends.values()), None)
        return None if since is None else since + RESEND_SECONDS

    def _stop_expecting(self, push: Push) -> None:
        if self._resends.pop(push, None) is not None:
            self.resending_samples -= len(push.undecided)
            self.changes += 1

    def find_evicted(self, producer: str, first_seq: int) -> Push | None:
        """The blocked push of this number of which the payload was evicted; None if there is
        none.
        """
        return self._evicted.get((producer, first_seq))

    def restore_payload(self, push: Push, samples: tuple[Sample, ...]) -> None:
        """Restore an evicted payload. Raises ProtocolError if the samples differ."""
        if list(map(Sample.with_producer, samples)) != list(push.samples):
            raise ProtocolError(f"push {push.first_seq} comes again with other samples")
        self._clear_eviction(push)
        push.samples = samples

    def _clear_eviction(self, push: Push) -> None:
        self._stop_expecting(push)
        if push.payload_evicted:
            del self._evicted[push.producer, push.first_seq]
        push.payload_evicted = push.resend_requested = False


def _oldest(samples: list[Sample]) -> int:
    """The oldest policy version; an unknown one counts as older than all."""
    versions = (sample.judged_version for sample in samples)
    return min(_UNKNOWN if version is None else version for version in versions)


def _discard(index: dict[str, dict[Push, None]], key: str, push: Push) -> None:
    found = index.get(key, {})
    found.pop(push, None)
    if not found:
        index.pop(key, None)
