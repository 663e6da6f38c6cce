"""Which objects of payload stores are needed: samples that lie in them live, or may still come in.

    push of it arrives --> AWAITED --accepted--> HELD --dropped or committed--> unneeded
                              |                                                    ^
                              +--a duplicate, or refused---------------------------+

An object is needed while a sample in it is accepted and not done with, and while one may still be:
what is held back or was answered `full`, and what waited when its connection was lost, is sent
again under the same number, and then it has to be there. It is not awaited any more once it has an
outcome, once its producer's floor has passed it, or when its producer is gone for good. What comes
over HTTP has no producer that could be gone, and is decided at once: what is answered `full` there
is its client's as before, which takes that it is alone in its object. Invariant: an object is named
unneeded when the last of that is over, and not before.

A producer may never raise its floor, nor come back. So of what is answered `full`, which is its own
as much as before it was sent, only so much is awaited; the rest is forgotten. An object of nothing
else is found by a sweep then, should its producer end; one of which some samples are accepted goes
with those, and whatever of it comes later is dropped, as it cannot be resolved.

`Releases`: the list of objects that nobody needs and that are still in their stores.

    waiting --asked of a worker--> asked --it is gone--> forgotten
       ^                             |
       +-------- it is left ---------+

The list is a fact before any worker hears of it, and outlives the process: it has no time-outs, and
what could not be released waits at its end.

`OrphanCollector`: what a producer has put and never pushed, found once nobody can push it any more.

    live --connection lost--> away --a goodbye, a successor, long silence, the end--> ended
      ^                        |                                                        |
      +------ connects --------+                   forgotten <--swept in every store----+

A producer puts an object before it pushes the references into it, so one that dies between the two
leaves what nobody knows of. Each of its processes is an *incarnation*, whose name its keys begin
with: once that has ended, what is there of it and not known is needed by nobody.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

from rollout_dispatcher.core.admission.held_pushes import Push
from rollout_dispatcher.core.buffer.entry import Entry, Lowest
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Outcome

#: Samples that are awaited of one producer, several times those of all pushes that its credits
#: allow, and of all together; what is answered `full` beyond that is not.
MOST_OF_ONE = 1 << 16
MOST = 1 << 20

#: An object's store and key: whatever else is said of it, there is one object of that name.
Name = tuple[str, str]


def name_of(stored: StoredObject) -> Name:
    """By which an object is known."""
    return stored.store, stored.key


@dataclass(slots=True)
class _Needed:
    """samples: accepted ones in it that live. awaited: how many may still come in."""

    stored: StoredObject
    samples: int = 0
    awaited: int = 0


class Objects:
    """The objects of these stores that are needed.

    unneeded: those that are not any more and nobody was told of, in order.
    nbytes: of those that are needed.
    """

    def __init__(self, stores: Collection[str]) -> None:
        self._stores = stores
        self.unneeded: dict[Name, StoredObject] = {}
        self.nbytes = 0
        self._needed: dict[Name, _Needed] = {}
        # By producer: numbers of samples, with the objects that they are in.
        self._awaited: dict[str, Lowest[tuple[int, Name]]] = {}
        self._num_awaited = 0

    def __len__(self) -> int:
        return len(self._needed)

    def __contains__(self, name: object) -> bool:
        """Whether the object of this name is needed."""
        return name in self._needed

    def is_only_awaited(self, name: Name) -> bool:
        """Whether no sample in it is accepted, and one may be: nothing that is durable names it."""
        needed = self._needed.get(name)
        return needed is not None and not needed.samples

    @property
    def awaited(self) -> Collection[str]:
        """The producers of which something may still come in."""
        return self._awaited.keys()

    def restore(
        self,
        entries: Iterable[Entry],
        newest: Mapping[str, int],
        has_ended: Callable[[str, str], bool],
    ) -> None:
        """Start from the samples that an earlier process held.

        newest: of each producer that may send it again the last number that was accepted. Which
        samples had which number is not remembered, so that one stands for all: others of the same
        push may have been undecided. has_ended: whether a producer's process has that put an object
        of this key; nobody sends it again.
        """
        for entry in entries:
            payload, producer = entry.sample.payload, entry.producer
            if isinstance(payload, Reference):
                needed = self._need(payload.stored)
                needed.samples += 1
                if producer in newest and not has_ended(producer, payload.stored.key):
                    self._await(needed, producer, newest[producer])

    # -- samples come and go ------------------------------------------------------------------

    def pushed(self, push: Push) -> None:
        """A push has come, maybe again; what its producer never sends again is not awaited."""
        if push.refers and push.producer:
            for number, sample in zip(push.numbers, push.samples, strict=True):
                payload = sample.payload
                if isinstance(payload, Reference) and payload.stored.store in self._stores:
                    self._await(self._need(payload.stored), push.producer, number)
        self._await_none_below(push.producer, push.floor)

    def accepted(self, push: Push, entries: Iterable[Entry], numbers: range) -> None:
        """These samples of a push have come in, under these numbers."""
        for entry, number in zip(entries, numbers, strict=True):
            if isinstance(entry.sample.payload, Reference):
                needed = self._need(entry.sample.payload.stored)
                needed.samples += 1
                self._decided(needed, push.producer, number)

    def settled(self, push: Push, index: int, outcome: Outcome, *, theirs: bool = False) -> None:
        """One sample of a push has not; answered `full`, it comes again.

        theirs: it is its producer's as before, who may push it to a successor. Who pushes over
        HTTP is told that it is refused, and nothing else.
        """
        payload = push.samples[index].payload
        if not isinstance(payload, Reference):
            return
        stored, is_full = payload.stored, outcome is Outcome.FULL
        needed = self._needed.get(name_of(stored))
        if push.producer:
            if needed is not None and (not is_full or self._is_much(push.producer)):
                number = push.first_seq + index
                self._decided(needed, push.producer, number, theirs=is_full or theirs)
        elif needed is None and not is_full and stored.store in self._stores:
            self.unneeded[name_of(stored)] = stored

    def done(self, entries: Iterable[Entry]) -> None:
        """Nobody will train on these samples again."""
        if not self._needed:
            return  # no run without references pays for them
        for entry in entries:
            payload = entry.sample.payload
            if isinstance(payload, Reference):
                needed = self._needed[name_of(payload.stored)]
                needed.samples -= 1
                self._check(needed)

    def producer_gone(self, producer: str, *, theirs: bool = False) -> None:
        """It sends nothing again; theirs: it may, though too much of it is awaited."""
        self._await_none_below(producer, sys.maxsize, theirs=theirs)

    def producer_away(self, producer: str) -> None:
        """It may come back, and what it has pushed is awaited, unless that is too much by now."""
        if self._num_awaited > MOST:
            self.producer_gone(producer, theirs=True)

    def take_unneeded(self) -> tuple[StoredObject, ...]:
        """Those that nobody was told of, once."""
        taken = tuple(self.unneeded.values())
        self.unneeded.clear()
        return taken

    # -- one of them --------------------------------------------------------------------------

    def _need(self, stored: StoredObject) -> _Needed:
        name = name_of(stored)
        needed = self._needed.get(name)
        if needed is None:
            needed = self._needed[name] = _Needed(stored)
            self.nbytes += stored.nbytes
            self.unneeded.pop(name, None)
        return needed

    def _is_much(self, producer: str) -> bool:
        """Whether more is awaited than may be of what was answered `full`."""
        return len(self._awaited.get(producer, ())) > MOST_OF_ONE or self._num_awaited > MOST

    def _await(self, needed: _Needed, producer: str, number: int) -> None:
        awaited = self._awaited.setdefault(producer, Lowest())
        sample = number, name_of(needed.stored)
        if sample not in awaited:
            awaited.set(sample, number)
            needed.awaited += 1
            self._num_awaited += 1

    def _await_none_below(self, producer: str, floor: int, *, theirs: bool = False) -> None:
        """No sample of a lower number is awaited any more; theirs: it may come all the same."""
        if (awaited := self._awaited.get(producer)) is not None:
            for _, name in awaited.take_below(floor):
                self._await_no_more(producer, self._needed[name], theirs=theirs)

    def _await_no_more(self, producer: str, needed: _Needed, *, theirs: bool = False) -> None:
        needed.awaited -= 1
        self._num_awaited -= 1
        if not self._awaited.get(producer):
            self._awaited.pop(producer, None)
        self._check(needed, theirs=theirs)

    def _decided(
        self, needed: _Needed, producer: str, number: int, *, theirs: bool = False
    ) -> None:
        """It is not awaited any more. theirs: it may come all the same, its producer's still."""
        awaited, sample = self._awaited.get(producer), (number, name_of(needed.stored))
        if awaited is not None and sample in awaited:
            awaited.remove(sample)
            self._await_no_more(producer, needed, theirs=theirs)
        else:
            self._check(needed, theirs=theirs)

    def _check(self, needed: _Needed, *, theirs: bool = False) -> None:
        name = name_of(needed.stored)
        if not needed.samples and not needed.awaited and self._needed.pop(name, None) is not None:
            self.nbytes -= needed.stored.nbytes
            if not theirs:
                self.unneeded[name] = needed.stored


class Releases:
    """Objects by name, in the order in which they became unneeded."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Name, StoredObject]] = {}  # by store
        self._asked: dict[str, dict[Name, StoredObject]] = {}

    def __len__(self) -> int:
        return sum(map(len, (*self._waiting.values(), *self._asked.values())))

    def __contains__(self, name: Name) -> bool:
        store, _ = name
        return name in self._waiting.get(store, ()) or name in self._asked.get(store, ())

    @property
    def stores(self) -> list[str]:
        """Those with objects that nobody is asked to release."""
        return list(self._waiting)

    def waits(self, store: str) -> bool:
        """Whether this is one of `stores`."""
        return store in self._waiting

    def has(self, store: str) -> bool:
        """Whether anything of this store is on the list."""
        return store in self._waiting or store in self._asked

    def add(self, objects: Iterable[StoredObject]) -> None:
        """Nobody needs these."""
        for stored in objects:
            if (name := name_of(stored)) not in self:
                self._waiting.setdefault(stored.store, {})[name] = stored

    def take(self, store: str, most: int) -> list[StoredObject]:
        """The first of a store that wait: a worker is asked to release them."""
        waiting = self._waiting[store]
        taken = dict(islice(waiting.items(), most))
        for name in taken:
            del waiting[name]
        if not waiting:
            del self._waiting[store]
        self._asked.setdefault(store, {}).update(taken)
        return list(taken.values())

    def put_back(self, objects: Iterable[StoredObject]) -> None:
        """These are still there."""
        for stored in objects:
            self._answered(stored)
            self._waiting.setdefault(stored.store, {})[name_of(stored)] = stored

    def forget(self, objects: Iterable[StoredObject]) -> None:
        """These are gone."""
        for stored in objects:
            self._answered(stored)

    def _answered(self, stored: StoredObject) -> None:
        asked = self._asked[stored.store]
        del asked[name_of(stored)]
        if not asked:
            del self._asked[stored.store]


#: A producer that was away for so long does not come back. Nothing is lost by waiting but room in
#: a store; one that comes back later would push what is gone.
AWAY_S = 3600.0
#: Incarnations that are known, far above any fleet; beyond it the oldest that is not connected is
#: forgotten.
MAX_INCARNATIONS = 65_536
#: Behind a producer's incarnation in each of its keys; before that, the producer's name and a dot.
SEPARATOR = "/"


@dataclass(slots=True, eq=False)
class ProducerSession:
    """left: once it has ended, stores that are not swept, and whether a worker is asked to."""

    name: str
    producer: str
    ended: bool = False
    left: dict[str, bool] = field(default_factory=dict)


class OrphanCollector:
    """Incarnations by name, and the stores in which each may have put something."""

    def __init__(self, stores: Collection[str]) -> None:
        self._stores = sorted(stores)
        self._known: dict[str, ProducerSession] = {}
        self._current: dict[str, str] = {}  # by producer
        self._away: dict[str, float] = {}  # since when, in that order
        self._ended: dict[str, ProducerSession] = {}
        self._postponed: dict[tuple[ProducerSession, str], None] = {}

    def __len__(self) -> int:
        """How many have ended and can be swept."""
        return len(self._ended) - len({ended for ended, _ in self._postponed})

    def restore(self, incarnations: Mapping[str, str], now: float) -> None:
        """Those that an earlier process knew, with their producers, oldest first; all are away."""
        for name, producer in incarnations.items():
            self.begins(producer, name)
            if not self._known[name].ended:
                self._away[name] = now

    # -- they come and go ---------------------------------------------------------------------

    def current(self, producer: str) -> str | None:
        """The producer's one that has not ended."""
        return self._current.get(producer)

    def has_ended(self, producer: str, key: str) -> bool:
        """Whether this key is of an incarnation of the producer, and not of its current one."""
        current = self._current.get(producer)
        ours = current is not None and key.startswith(current + SEPARATOR)
        return key.startswith(f"{producer}.") and not ours

    def may_push(self, key: str) -> bool:
        """Whether this key is of an incarnation that has not ended."""
        ends = (at for at, letter in enumerate(key) if letter == SEPARATOR)
        known = (self._known.get(key[:end]) for end in ends)  # a name may have separators too
        return any(one is not None and not one.ended for one in known)

    def begins(self, producer: str, name: str) -> bool:
        """It is there; its producer's other ones have ended. Returns whether it is new."""
        before = self._current.get(producer)
        if before is not None and before != name:
            self._end(before)
        self._current[producer] = name
        known = self._known.get(name)
        self._away.pop(name, None)
        if known is not None and not known.ended:
            return False
        self._ended.pop(name, None)
        self._postponed = {each: None for each in self._postponed if each[0] is not known}
        # What it was asked before is of another.
        self._known[name] = ProducerSession(name, producer)
        return known is None

    def forget_oldest(self) -> str | None:
        """Forget one that is not connected if there are more than there may be; returns which."""
        if len(self._known) <= MAX_INCARNATIONS:
            return None
        name = next(filter(self._is_not_connected, self._known), None)
        if name is None:
            return None
        known = self._known.pop(name)
        self._away.pop(name, None)
        self._ended.pop(name, None)
        self._postponed = {each: None for each in self._postponed if each[0] is not known}
        if self._current.get(known.producer) == name:
            del self._current[known.producer]
        return name

    def _is_not_connected(self, name: str) -> bool:
        return name in self._away or self._known[name].ended

    def lost(self, producer: str, now: float, *, for_good: bool) -> None:
        """Its producer's connection is lost, `for_good` if it said goodbye."""
        name = self._current.get(producer)
        if name is None:
            return
        if for_good:
            self._end(name)
        else:
            self._away[name] = now

    def end_away(self, now: float) -> list[str]:
        """Those that are away for `AWAY_S` or longer have ended; returns their producers."""
        names = list(takewhile(lambda name: self._away[name] + AWAY_S <= now, self._away))
        for name in names:
            self._end(name)
        return [self._known[name].producer for name in names]

    def next_deadline(self) -> float | None:
        """When somebody has been away for too long."""
        first = next(iter(self._away.values()), None)
        return None if first is None else first + AWAY_S

    def _end(self, name: str) -> None:
        known = self._known[name]
        known.ended, known.left = True, dict.fromkeys(self._stores, False)
        if known.left:  # else it is known still to a process that may open stores again
            self._ended[name] = known
        self._away.pop(name, None)
        if self._current.get(known.producer) == name:
            del self._current[known.producer]

    # -- they are swept -----------------------------------------------------------------------

    @property
    def stores(self) -> Iterable[str]:
        """Those in which something is to be swept, and nobody is asked to."""
        left = (ended.left.items() for ended in self._ended.values())
        return {store: None for stores in left for store, asked in stores if not asked}

    def take(self, store: str) -> ProducerSession:
        """The first that is to be swept in this store, one of `stores`: a worker is asked to."""
        ended = next(one for one in self._ended.values() if one.left.get(store) is False)
        ended.left[store] = True
        return ended

    def is_wanted(self, ended: ProducerSession) -> bool:
        """Whether it is to be swept still: it has not come back meanwhile."""
        return self._ended.get(ended.name) is ended

    def put_back(self, ended: ProducerSession, store: str) -> None:
        """It is to be swept in this store again, after the others."""
        if self.is_wanted(ended):
            ended.left[store] = False
            self._ended[ended.name] = self._ended.pop(ended.name)

    def postpone(self, ended: ProducerSession, store: str) -> None:
        """What is needed of it in this store hides the rest, until some of that is not any more."""
        self._postponed[ended, store] = None

    def resume(self) -> None:
        """Something is needed no more."""
        postponed, self._postponed = self._postponed, {}
        for ended, store in postponed:
            self.put_back(ended, store)

    def swept(self, ended: ProducerSession, store: str) -> bool:
        """All of it in this store is known; returns whether it is forgotten, as that was all."""
        ended.left.pop(store, None)
        if ended.left:
            return False
        del self._known[ended.name], self._ended[ended.name]
        return True
