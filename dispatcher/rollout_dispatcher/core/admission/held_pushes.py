"""Pushes that are held back, in line, and the memory that their payloads take.

    held with its payload --------------------------------its turn--> decided
    held without (`held_bytes` were used up) --its turn--> asked for again --arrives--> decided

Invariant: payload bytes of held pushes stay within `held_bytes`, but for one push, so that there is
always one that can come in at once. `Line` is fair to each producer.

Who may come in, or be refused, while the first in line may not, is found without looking at all of
them: what is small enough, and members of groups of which something has changed.

`Push`: a push while it is decided.

`Line`: a line in which nobody stands behind more than a turn of each other's, whatever they bring.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): what somebody adds starts where his own last
ends, but not before what is being taken now, and what starts first is first.

    a adds 4, 4, 4 units; they start at 0, 4, 8
    the first of a is taken; now b adds 1 unit, which starts at 0: before the second of a
    b adds 4 units more, which start at 1: before the second of a, too

Who decides when something is taken is not the line's affair: whoever takes all that there is, as
admission does while no step can be planned, does so in any order.

Invariant: of one owner, first come is first served.
"""

import sys
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from operator import attrgetter
from typing import Generic, TypeVar

from rollout_dispatcher.core.buffer.entry import Lowest
from rollout_dispatcher.core.effects import PushAnswered
from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, Taken
from rollout_dispatcher.sample import Outcome, Sample

_VERSION = attrgetter("judged_version")


@dataclass(slots=True, eq=False)
class Push:
    """Samples `first_seq`, `first_seq + 1`, ... of one producer, as far as they are decided.

    producer: its client id; empty for a push that is never sent again under the same numbers.
    floor: this producer never again sends a number below it.
    named: sample ids were given by the user, so a repeat from any producer is a duplicate.
    refers: whether some of the samples lie in payload stores.
    excused: it was here before what it belongs to was ended, and may come in nevertheless.
    While it is held: serial tells it from others. groups: whose members it has, and how many, which
    others decide on. nbytes: of its payloads in memory. least: of the smallest sample that would
    take memory, and of that which lies in a payload store; None: there is none. emptied: its
    payloads were let go. asked: they are wanted again, and were asked for.
    """

    producer: str
    first_seq: int
    samples: tuple[Sample, ...]
    floor: int = 0
    named: bool = False
    refers: bool = False
    outcomes: list[Outcome | None] = field(init=False)
    errors: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    excused: bool = False
    serial: int = -1
    groups: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    least: tuple[int | None, int | None] = (None, None)
    emptied: bool = False
    asked: bool = False

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

#: Owners without anything in line that are remembered before those are forgotten who owe nothing.
REMEMBERED = 64


class Line(Generic[T]):
    """What waits, with its owner and how much it is."""

    def __init__(self) -> None:
        self._line: list[tuple[int, int, T]] = []
        self._places: dict[T, tuple[int, int]] = {}
        #: Where the next of an owner starts, if that is behind `_now`.
        self._ends: dict[str, int] = {}
        self._now = self._added = 0

    def __iter__(self) -> Iterator[T]:
        """From the first to the last."""
        return (item for _, _, item in self._line)

    def first(self) -> T:
        """Whose turn it is; there has to be one."""
        return self._line[0][2]

    def in_order(self, items: Iterable[T]) -> list[T]:
        """These, as they stand in line."""
        return sorted(items, key=self._places.__getitem__)

    def add(self, item: T, owner: str, units: int) -> None:
        """It waits from now on."""
        start = max(self._now, self._ends.get(owner, 0))
        self._ends[owner] = start + units
        self._added += 1
        self._places[item] = (start, self._added)
        insort(self._line, (start, self._added, item))

    def give_up(self, item: T, owner: str, units: int) -> None:
        """It waits no more and was not taken: its owner, who may come again with it, owes none."""
        self.remove(item)
        if owner in self._ends:
            self._ends[owner] -= units

    def remove(self, item: T) -> None:
        """It was taken, and waits no more."""
        place = self._places.pop(item)
        at = bisect_left(self._line, place, key=_place)
        del self._line[at]
        if at == 0:
            self._now = place[0]
        if not self._line:  # everybody starts anew
            self._ends.clear()
            self._now = 0
        elif len(self._ends) > 2 * len(self._line) + REMEMBERED:
            self._ends = {owner: end for owner, end in self._ends.items() if end > self._now}


def _place(entry: tuple[int, int, T]) -> tuple[int, int]:
    return entry[:2]


class Smallest(Generic[T]):
    """Things in ascending order; kind: what so many bytes take, of memory or of payload stores."""

    def __init__(self, kind: Callable[[int], Taken]) -> None:
        self.kind = kind
        self._line: list[tuple[int, int, T]] = []

    def move(self, thing: T, serial: int, before: int | None, size: int | None) -> None:
        """It has another size than before; None: it is not here. serial: tells it from others."""
        if size == before:
            return
        if before is not None:
            del self._line[bisect_left(self._line, (before, serial))]
        if size is not None:
            insort(self._line, (size, serial, thing))

    @property
    def largest(self) -> int | None:
        """The largest size; None if nothing is here."""
        return self._line[-1][0] if self._line else None

    def fitting(self, fits: Callable[[Taken], bool]) -> Iterator[T]:
        """Those that fit; if a size does not, no larger one does."""
        count = bisect_left(self._line, True, key=lambda entry: not fits(self.kind(entry[0])))
        return (thing for _, _, thing in self._line[:count])


#: How long a payload that was asked for again keeps others from being asked for theirs.
RESEND_SECONDS = 10.0
#: Members of one group that wait, above which no push that has more of them is held: whatever
#: changes of a group has them all looked at, in one turn of the event loop.
MAX_OF_GROUP = 256
#: Older than every policy version: that of samples of which none is known.
_UNKNOWN = -sys.maxsize


class HeldPushes:
    """held_bytes: cap on their payloads. groups_matter: whether those of samples are kept whole."""

    def __init__(self, held_bytes: int, *, groups_matter: bool = True) -> None:
        self._limit, self._groups_matter = held_bytes, groups_matter
        self._held: dict[Push, None] = {}
        self._line: Line[Push] = Line()
        self._of_producer: defaultdict[str, dict[Push, None]] = defaultdict(dict)
        self._of_group: defaultdict[str, dict[Push, None]] = defaultdict(dict)
        self._members: Counter[str] = Counter()  # of each group, as many as waited at first
        self._emptied: dict[tuple[str, int], Push] = {}
        self._asked: dict[Push, float] = {}  # since when, in that order
        self._serials = count()
        self._by_least: tuple[Smallest[Push], ...] = (
            Smallest(Taken), Smallest(partial(Taken, 0)),
        )  # fmt: skip
        self._unsettled: dict[Push, None] = {}  # of whose groups something has changed
        self._unexcused: dict[Push, None] = {}
        self._excused: Lowest[int] = Lowest()  # the oldest version that waits, by serial
        #: Samples of payloads that were asked for again and are expected to come.
        self.asked_samples = 0
        #: Rises whenever others may come in, or be refused: a push waits no more, a payload is not
        #: on its way any more, or something has changed of a group of which members wait.
        self.changes = 0
        #: Payload bytes in memory.
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Push]:
        """As they stand in line."""
        return iter(self._line)

    def __contains__(self, push: object) -> bool:
        return push in self._held

    def first(self) -> Push:
        """The push whose turn it is; there has to be one."""
        return self._line.first()

    def of_producer(self, producer: str) -> list[Push]:
        """This producer's pushes."""
        return list(self._of_producer.get(producer, ()))

    def of_group(self, group_id: str) -> list[Push]:
        """Pushes that may have a waiting sample of this group."""
        return list(self._of_group.get(group_id, ()))

    def regroup(self, group_id: str) -> None:
        """Something has changed of this group: who waits for it may come in, or be refused."""
        if (waiting := self._of_group.get(group_id)) is not None:
            self._unsettled.update(dict.fromkeys(waiting))
            self.changes += 1

    def unsettle_all(self) -> None:
        """The same of whoever is a member of any."""
        self._unsettled = {push: None for push in self._held if push.groups}

    def take_unsettled(self) -> list[Push]:
        """Pushes of members of groups of which something has changed since they were looked at."""
        found, self._unsettled = self._line.in_order(self._unsettled), {}
        return found

    def fitting(self, fits: Callable[[Taken], bool]) -> list[Push]:
        """Pushes of which the smallest sample fits, as they stand in line.

        fits: whether so many bytes do; if not, no more do either.
        """
        found: dict[Push, None] = {}
        for pushes in self._by_least:
            found |= dict.fromkeys(pushes.fitting(fits))
        return self._line.in_order(found)

    def largest(self) -> list[Taken]:
        """What is taken, of memory and of payload stores, by those that fit last."""
        return self._taken(*(pushes.largest for pushes in self._by_least))

    def _taken(self, *sizes: int | None) -> list[Taken]:
        kinds = zip(self._by_least, sizes, strict=True)
        return [pushes.kind(nbytes) for pushes, nbytes in kinds if nbytes is not None]

    def members(self, group_id: str) -> int:
        """How many samples of this group wait."""
        waiting = (sample for push in self.of_group(group_id) for sample in push.waiting)
        return sum(sample.group_id == group_id for sample in waiting)

    def is_crowded(self, push: Push) -> bool:
        """Whether as many members as there may be wait already of one of its groups."""
        return any(self._members[group_id] >= MAX_OF_GROUP for group_id in self._groups(push))

    def add(self, push: Push) -> None:
        """Hold a push; its payload goes if there is no memory for it."""
        self._held[push] = None
        push.serial, push.groups = next(self._serials), self._groups(push)
        self._line.add(push, push.producer, len(push.samples))
        self._unexcused[push] = None
        self._of_producer[push.producer][push] = None
        self._members.update(push.groups)
        for group_id in push.groups:
            self._of_group[group_id][push] = None
        self.weigh(push)

    def _groups(self, push: Push) -> Counter[str]:
        """Groups of which members wait, and how many."""
        waiting = push.waiting if self._groups_matter else ()
        return Counter(sample.group_id for sample in waiting if sample.group_id is not None)

    def give_up(self, push: Push) -> None:
        """Its producer is gone: it was never accepted, and may come again."""
        self._line.give_up(push, push.producer, len(push.samples))
        self._forget(push)

    def remove(self, push: Push) -> None:
        """It is decided."""
        self._line.remove(push)
        self._forget(push)

    def _forget(self, push: Push) -> None:
        self._unmark(push)
        self.changes += 1
        del self._held[push]
        self._set_least(push, None, None)
        self._unsettled.pop(push, None)
        self.nbytes -= push.nbytes
        self._unexcused.pop(push, None)
        self._excused.remove(push.serial)
        _discard(self._of_producer, push.producer, push)
        for group_id, members in push.groups.items():
            _discard(self._of_group, group_id, push)
            self._members[group_id] -= members
            if not self._members[group_id]:
                del self._members[group_id]

    def weigh(self, push: Push) -> None:
        """Some of its samples may be decided by now: see what the others hold of memory."""
        waiting = push.waiting
        if push.excused:
            self._excused.set(push.serial, _oldest(waiting))
        refer = [sample.nbytes for sample in waiting if isinstance(sample.payload, Reference)]
        here = [sample for sample in waiting if not isinstance(sample.payload, Reference)]
        sizes = [sample.memory_bytes for sample in here]
        before, push.nbytes = push.nbytes, sum(sizes)
        self._set_least(push, min(sizes, default=None), min(refer, default=None))
        self.nbytes += push.nbytes - before
        if self.nbytes > self._limit and self.nbytes > push.nbytes > 0:
            push.samples = tuple(map(Sample.with_producer, push.samples))
            self._emptied[push.producer, push.first_seq] = push
            push.emptied = True
            self.nbytes -= push.nbytes
            push.nbytes = 0

    def _set_least(self, push: Push, *least: int | None) -> None:
        for pushes, before, after in zip(self._by_least, push.least, least, strict=True):
            pushes.move(push, push.serial, before, after)
        push.least = least[0], least[1]

    # -- when a phase, or the stream, ends ----------------------------------------------------

    def excuse(self, producer: str | None = None) -> None:
        """What waits now may come in though it would be refused if it came later.

        producer: only its pushes; None: everybody's.
        """
        mine = self._unexcused if producer is None else self._of_producer.get(producer, {})
        for push in [push for push in mine if not push.excused]:
            push.excused = True
            self._excused.set(push.serial, _oldest(push.waiting))
            del self._unexcused[push]

    def waits(self, end: int | None) -> bool:
        """Whether an excused sample waits that belongs before this phase, or the stream's end."""
        oldest = self._excused.lowest
        return oldest is not None and (end is None or oldest < end)

    # -- what it is -----------------------------------------------------------------------------

    def least(self, push: Push) -> list[Taken]:
        """What the smallest of its samples that wait take: of memory, of a payload store."""
        return self._taken(*push.least)

    # -- without their payloads ---------------------------------------------------------------

    def ask(self, push: Push, now: float) -> None:
        """Its payload is wanted again."""
        push.asked = True
        self._asked[push] = now
        self.asked_samples += len(push.undecided)

    def give_up_late(self, now: float) -> None:
        """Expect no longer what was asked for long ago."""
        late = list(takewhile(lambda push: self._asked[push] + RESEND_SECONDS <= now, self._asked))
        for push in late:
            self._expect_no_more(push)

    def next_deadline(self) -> float | None:
        """When a payload that was asked for is late."""
        since = next(iter(self._asked.values()), None)
        return None if since is None else since + RESEND_SECONDS

    def _expect_no_more(self, push: Push) -> None:
        if self._asked.pop(push, None) is not None:
            self.asked_samples -= len(push.undecided)
            self.changes += 1

    def find_emptied(self, producer: str, first_seq: int) -> Push | None:
        """The push whose payload comes again, if this is one."""
        return self._emptied.get((producer, first_seq))

    def refill(self, push: Push, samples: tuple[Sample, ...]) -> None:
        """Its payload has come again. Raises ProtocolError if these are other samples."""
        if list(map(Sample.with_producer, samples)) != list(push.samples):
            raise ProtocolError(f"push {push.first_seq} comes again with other samples")
        self._unmark(push)
        push.samples = samples

    def _unmark(self, push: Push) -> None:
        self._expect_no_more(push)
        if push.emptied:
            del self._emptied[push.producer, push.first_seq]
        push.emptied = push.asked = False


def _oldest(samples: list[Sample]) -> int:
    """The oldest policy version; one that is not known may be older than all."""
    versions = (sample.judged_version for sample in samples)
    return min(_UNKNOWN if version is None else version for version in versions)


def _discard(index: dict[str, dict[Push, None]], key: str, push: Push) -> None:
    found = index.get(key, {})
    found.pop(push, None)
    if not found:
        index.pop(key, None)
