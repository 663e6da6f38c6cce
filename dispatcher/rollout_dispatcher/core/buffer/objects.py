"""Objects of payload stores: those that samples need, those to free, and orphans.

    push of it arrives --> PENDING --accepted--> LIVE --dropped or committed--> unneeded
                              |                                                    ^
                              +--a duplicate, or refused---------------------------+

An object is needed while a sample in it is live (accepted, and neither committed nor dropped) or
*pending*: blocked, answered `full`, or blocked when its connection was lost. A pending sample may
be pushed again under the same number, and needs its object then. It is no longer pending once it
has an outcome, its producer's floor has passed its number, or its producer is gone. Samples over
HTTP have no producer, and are decided at once: the client keeps and deletes the object of one that
is answered `full`; this assumes one sample per object. Invariant: an object is unneeded as soon as
no sample in it is live or pending, and not before.

A producer may never raise its floor, nor come back. So at most `MAX_PENDING_PER_PRODUCER` samples
answered `full` are pending per producer, and at most `MAX_PENDING` in all; further ones are
forgotten. A sweep after its producer's end finds an object with only forgotten samples. An object
with accepted samples is freed with those; a forgotten sample of it that is pushed later is dropped,
as it cannot be resolved.

`ObjectsToFree`: unneeded objects that are not deleted from their stores yet.

    waiting --asked of a worker--> asked --it is gone--> forgotten
       ^                             |
       +-------- it is left ---------+

An object on the list is a fact in the journal before a worker is asked to free it. It stays listed
until deleted; one that could not be deleted goes to the end of the list.

`OrphanCollector`: finds objects that a producer has put and never pushed, once it has ended.

    live --connection lost--> away --a goodbye, a successor, long silence, the end--> ended
      ^                        |                                                        |
      +------ connects --------+                   forgotten <--swept in every store----+

A producer puts an object before it pushes references into it; one that dies in between leaves an
orphan. Each of its processes is an *incarnation*, whose name begins all its keys: once that has
ended, its objects that the dispatcher does not know are orphans.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import Entry, Lowest
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Outcome

#: Pending samples of one producer (several times what its credits allow) and of all; above that,
#: samples answered `full` are forgotten.
MAX_PENDING_PER_PRODUCER = 1 << 16
MAX_PENDING = 1 << 20

#: An object's store and key, which identify it.
Name = tuple[str, str]


def name_of(stored: StoredObject) -> Name:
    """The name of a stored object."""
    return stored.store, stored.key


@dataclass(slots=True)
class _Needed:
    """A needed object. samples: number of its live samples. pending: of its pending ones."""

    stored: StoredObject
    samples: int = 0
    pending: int = 0


class NeededObjects:
    """The needed objects of these stores.

    unneeded: objects no longer needed, in order, until `pop_unneeded`. nbytes: of the needed
    objects.
    """

    def __init__(self, stores: Collection[str]) -> None:
        self._stores = stores
        self.unneeded: dict[Name, StoredObject] = {}
        self.nbytes = 0
        self._needed: dict[Name, _Needed] = {}
        # By producer: sequence numbers of pending samples, with the names of their objects.
        self._pending_by_producer: dict[str, Lowest[tuple[int, Name]]] = {}
        self._num_pending = 0

    def __len__(self) -> int:
        return len(self._needed)

    def __contains__(self, name: object) -> bool:
        """Whether the object of this name is needed."""
        return name in self._needed

    def is_only_pending(self, name: Name) -> bool:
        """Whether its samples are all pending: no fact in the journal names the object."""
        needed = self._needed.get(name)
        return needed is not None and not needed.samples

    @property
    def producers_pending(self) -> Collection[str]:
        """Producers with pending samples."""
        return self._pending_by_producer.keys()

    def restore(
        self,
        entries: Iterable[Entry],
        newest: Mapping[str, int],
        has_ended: Callable[[str, str], bool],
    ) -> None:
        """Start from the samples that an earlier process held.

        newest: the last accepted sequence number of each producer that may push again. The journal
        does not keep the samples' numbers, so the newest stands in for them: other samples of the
        same push may have been undecided. has_ended: whether the process of a producer that put the
        object of a key has ended; it pushes no samples again.
        """
        for entry in entries:
            payload, producer = entry.sample.payload, entry.producer
            if isinstance(payload, Reference):
                needed = self._need(payload.stored)
                needed.samples += 1
                if producer in newest and not has_ended(producer, payload.stored.key):
                    self._add_pending(needed, producer, newest[producer])

    # -- events of samples --------------------------------------------------------------------

    def pushed(self, push: Push) -> None:
        """Make the samples of a push pending, and forget those below its floor."""
        if push.has_references and push.producer:
            for number, sample in zip(push.numbers, push.samples, strict=True):
                payload = sample.payload
                if isinstance(payload, Reference) and payload.stored.store in self._stores:
                    self._add_pending(self._need(payload.stored), push.producer, number)
        self._await_none_below(push.producer, push.floor)

    def accepted(self, push: Push, entries: Iterable[Entry], numbers: range) -> None:
        """Make samples of a push live. numbers: their sequence numbers."""
        for entry, number in zip(entries, numbers, strict=True):
            if isinstance(entry.sample.payload, Reference):
                needed = self._need(entry.sample.payload.stored)
                needed.samples += 1
                self._decided(needed, push.producer, number)

    def not_accepted(
        self, push: Push, index: int, outcome: Outcome, *, producer_owned: bool = False
    ) -> None:
        """One sample of a push was not accepted; after `full` it stays pending.

        producer_owned: the producer keeps the object, as it may push it to the next dispatcher. A
        client over HTTP has no pending samples: the object of a refused one is unneeded.
        """
        payload = push.samples[index].payload
        if not isinstance(payload, Reference):
            return
        stored, is_full = payload.stored, outcome is Outcome.FULL
        needed = self._needed.get(name_of(stored))
        if push.producer:
            if needed is not None and (not is_full or self._over_limit(push.producer)):
                number = push.first_seq + index
                self._decided(
                    needed, push.producer, number, producer_owned=is_full or producer_owned
                )
        elif needed is None and not is_full and stored.store in self._stores:
            self.unneeded[name_of(stored)] = stored

    def done(self, entries: Iterable[Entry]) -> None:
        """These samples were committed for good, or dropped."""
        if not self._needed:
            return  # a run without references
        for entry in entries:
            payload = entry.sample.payload
            if isinstance(payload, Reference):
                needed = self._needed[name_of(payload.stored)]
                needed.samples -= 1
                self._check(needed)

    def producer_gone(self, producer: str, *, theirs: bool = False) -> None:
        """No sample of it is pending any more. theirs: it may still push them, and owns them."""
        self._await_none_below(producer, sys.maxsize, theirs=theirs)

    def producer_away(self, producer: str) -> None:
        """The producer may come back: its samples stay pending, up to `MAX_PENDING` in all."""
        if self._num_pending > MAX_PENDING:
            self.producer_gone(producer, theirs=True)

    def pop_unneeded(self) -> tuple[StoredObject, ...]:
        """Return the unneeded objects, and clear the list."""
        taken = tuple(self.unneeded.values())
        self.unneeded.clear()
        return taken

    # -- one object ---------------------------------------------------------------------------

    def _need(self, stored: StoredObject) -> _Needed:
        name = name_of(stored)
        needed = self._needed.get(name)
        if needed is None:
            needed = self._needed[name] = _Needed(stored)
            self.nbytes += stored.nbytes
            self.unneeded.pop(name, None)
        return needed

    def _over_limit(self, producer: str) -> bool:
        """Whether too many samples are pending to keep one that is answered `full`."""
        return (
            len(self._pending_by_producer.get(producer, ())) > MAX_PENDING_PER_PRODUCER
            or self._num_pending > MAX_PENDING
        )

    def _add_pending(self, needed: _Needed, producer: str, number: int) -> None:
        pending = self._pending_by_producer.setdefault(producer, Lowest())
        sample = number, name_of(needed.stored)
        if sample not in pending:
            pending.set(sample, number)
            needed.pending += 1
            self._num_pending += 1

    def _await_none_below(self, producer: str, floor: int, *, theirs: bool = False) -> None:
        """No lower number is pending any more. theirs: the producer may still push them."""
        if (awaited := self._pending_by_producer.get(producer)) is not None:
            for _, name in awaited.take_below(floor):
                self._await_no_more(producer, self._needed[name], theirs=theirs)

    def _await_no_more(self, producer: str, needed: _Needed, *, theirs: bool = False) -> None:
        needed.pending -= 1
        self._num_pending -= 1
        if not self._pending_by_producer.get(producer):
            self._pending_by_producer.pop(producer, None)
        self._check(needed, producer_owned=theirs)

    def _decided(
        self, needed: _Needed, producer: str, number: int, *, producer_owned: bool = False
    ) -> None:
        """A sample is no longer pending. producer_owned: the producer keeps the object."""
        pending, sample = self._pending_by_producer.get(producer), (number, name_of(needed.stored))
        if pending is not None and sample in pending:
            pending.remove(sample)
            self._await_no_more(producer, needed, theirs=producer_owned)
        else:
            self._check(needed, producer_owned=producer_owned)

    def _check(self, needed: _Needed, *, producer_owned: bool = False) -> None:
        name = name_of(needed.stored)
        if not needed.samples and not needed.pending and self._needed.pop(name, None) is not None:
            self.nbytes -= needed.stored.nbytes
            if not producer_owned:
                self.unneeded[name] = needed.stored


class ObjectsToFree:
    """Unneeded objects by name, in order."""

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
        """Stores with objects that no worker was asked to free."""
        return list(self._waiting)

    def waits(self, store: str) -> bool:
        """Whether this is one of `stores`."""
        return store in self._waiting

    def has(self, store: str) -> bool:
        """Whether an object of this store is on the list."""
        return store in self._waiting or store in self._asked

    def add(self, objects: Iterable[StoredObject]) -> None:
        """Put unneeded objects on the list."""
        for stored in objects:
            if (name := name_of(stored)) not in self:
                self._waiting.setdefault(stored.store, {})[name] = stored

    def assign(self, store: str, most: int) -> list[StoredObject]:
        """Assign the first `most` waiting objects of a store to a worker, to be freed."""
        waiting = self._waiting[store]
        taken = dict(islice(waiting.items(), most))
        for name in taken:
            del waiting[name]
        if not waiting:
            del self._waiting[store]
        self._asked.setdefault(store, {}).update(taken)
        return list(taken.values())

    def put_back(self, objects: Iterable[StoredObject]) -> None:
        """Objects could not be deleted: list them again, behind the others."""
        for stored in objects:
            self._answered(stored)
            self._waiting.setdefault(stored.store, {})[name_of(stored)] = stored

    def forget(self, objects: Iterable[StoredObject]) -> None:
        """Objects were deleted."""
        for stored in objects:
            self._answered(stored)

    def _answered(self, stored: StoredObject) -> None:
        asked = self._asked[stored.store]
        del asked[name_of(stored)]
        if not asked:
            del self._asked[stored.store]


#: Seconds after which a producer that is away counts as ended. Waiting costs only space in a store;
#: a producer that came back later would push references to deleted objects.
AWAY_S = 3600.0
#: Known incarnations, far above any fleet; beyond it the oldest unconnected one is forgotten.
MAX_INCARNATIONS = 65_536
#: Follows the incarnation in each key; the incarnation begins with the producer's name and a dot.
SEPARATOR = "/"


@dataclass(slots=True, eq=False)
class Incarnation:
    """One process of a producer.

    unswept: once it has ended, unswept stores, and whether a worker was asked to sweep each.
    """

    name: str
    producer: str
    ended: bool = False
    unswept: dict[str, bool] = field(default_factory=dict)


class OrphanCollector:
    """Incarnations by name, and the stores in which each may have objects."""

    def __init__(self, stores: Collection[str]) -> None:
        self._stores = sorted(stores)
        self._known: dict[str, Incarnation] = {}
        self._current: dict[str, str] = {}  # by producer
        self._away: dict[str, float] = {}  # since when, in that order
        self._ended: dict[str, Incarnation] = {}
        self._postponed: dict[tuple[Incarnation, str], None] = {}

    def __len__(self) -> int:
        """Number of ended incarnations that can be swept."""
        return len(self._ended) - len({ended for ended, _ in self._postponed})

    def restore(self, incarnations: Mapping[str, str], now: float) -> None:
        """Start from the journal's incarnations, oldest first: producers by name; all are away."""
        for name, producer in incarnations.items():
            self.begins(producer, name)
            if not self._known[name].ended:
                self._away[name] = now

    # -- connections --------------------------------------------------------------------------

    def current(self, producer: str) -> str | None:
        """The name of the producer's incarnation that has not ended."""
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
        """A producer connected as this incarnation, which ends its others; returns whether new."""
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
        # Pending sweeps belong to the old one.
        self._known[name] = Incarnation(name, producer)
        return known is None

    def forget_oldest(self) -> str | None:
        """Beyond `MAX_INCARNATIONS` forget the oldest unconnected one; returns its name."""
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

    def disconnected(self, producer: str, now: float, *, for_good: bool) -> None:
        """Its producer's connection is lost. for_good: after a goodbye."""
        name = self._current.get(producer)
        if name is None:
            return
        if for_good:
            self._end(name)
        else:
            self._away[name] = now

    def end_away(self, now: float) -> list[str]:
        """End incarnations that are away for `AWAY_S` or longer; returns their producers."""
        names = list(takewhile(lambda name: self._away[name] + AWAY_S <= now, self._away))
        for name in names:
            self._end(name)
        return [self._known[name].producer for name in names]

    def next_deadline(self) -> float | None:
        """When the next incarnation has been away for `AWAY_S`."""
        first = next(iter(self._away.values()), None)
        return None if first is None else first + AWAY_S

    def _end(self, name: str) -> None:
        known = self._known[name]
        known.ended, known.unswept = True, dict.fromkeys(self._stores, False)
        if known.unswept:  # else it stays known, for a next process with stores
            self._ended[name] = known
        self._away.pop(name, None)
        if self._current.get(known.producer) == name:
            del self._current[known.producer]

    # -- sweeps -------------------------------------------------------------------------------

    @property
    def stores(self) -> Iterable[str]:
        """Stores to sweep that no worker was asked to sweep."""
        left = (ended.unswept.items() for ended in self._ended.values())
        return {store: None for stores in left for store, asked in stores if not asked}

    def assign(self, store: str) -> Incarnation:
        """Assign the first incarnation to sweep in this store, one of `stores`, to a worker."""
        ended = next(one for one in self._ended.values() if one.unswept.get(store) is False)
        ended.unswept[store] = True
        return ended

    def is_wanted(self, ended: Incarnation) -> bool:
        """Whether an incarnation is still to be swept: it has not connected again."""
        return self._ended.get(ended.name) is ended

    def put_back(self, ended: Incarnation, store: str) -> None:
        """Sweep an incarnation in this store again, after the others."""
        if self.is_wanted(ended):
            ended.unswept[store] = False
            self._ended[ended.name] = self._ended.pop(ended.name)

    def postpone(self, ended: Incarnation, store: str) -> None:
        """Needed objects fill the store's listing: sweep again after one is freed (`resume`)."""
        self._postponed[ended, store] = None

    def resume(self) -> None:
        """An object was freed: continue the postponed sweeps."""
        postponed, self._postponed = self._postponed, {}
        for ended, store in postponed:
            self.put_back(ended, store)

    def swept(self, ended: Incarnation, store: str) -> bool:
        """An incarnation is swept in this store; forget it after the last; returns whether so."""
        ended.unswept.pop(store, None)
        if ended.unswept:
            return False
        del self._known[ended.name], self._ended[ended.name]
        return True
