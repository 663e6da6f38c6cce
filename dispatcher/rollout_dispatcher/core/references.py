"""Payloads by reference, from the dispatcher's side: what is needed no more is released by workers.

    Objects     which are needed            Workers    who can be asked
    Releases    which are not any more      OrphanCollector     whose may be there unknown

The dispatcher opens no store: it asks one of the workers, another one if that fails or goes, and
goes on until it is done. What became unneeded in one turn of the event loop is asked of one worker
together, since asking is left to the next tick. Invariant: an object is released only after it was
a fact that nobody needs it.

`Dispatch.hear` is told what is said of stores and of the workers that open them. A worker is any
client that opens payload stores: its name is the shell's, and tells DP ranks from producers.

`Workers`: who is there to release objects, one thing at a time. Whoever could not do it for a store
*rests* from that store, longer each time, while others are asked; whoever does not answer is not
asked again until it does. Nobody is given up for good.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from rollout_dispatcher.core.buffer.objects import (
    AWAY_S,
    SEPARATOR,
    Objects,
    OrphanCollector,
    ProducerSession,
    Releases,
)
from rollout_dispatcher.core.effects import Effect, FreeWanted, SweepWanted
from rollout_dispatcher.core.facts import (
    Deleted,
    IncarnationBegan,
    IncarnationSwept,
    Note,
    RecoveredState,
    Releasable,
)
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.payload import StoredObject


@dataclass(frozen=True, slots=True)
class WorkerThere:
    """A worker is there, maybe again: what it was asked before is void."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """It has said goodbye, and waits until we say it too."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """Its connection is over."""

    worker: str


@dataclass(frozen=True, slots=True)
class Freed:
    """A worker answers a `FreeWanted`: these objects are still there."""

    worker: str
    number: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Swept:
    """A worker answers a `SweepWanted`: these objects are there, and others if there are more."""

    worker: str
    number: int
    keys: tuple[str, ...] = ()
    more: bool = False
    failed: bool = False


Said = WorkerThere | WorkerLeaves | WorkerGone | Freed | Swept


#: A worker that failed is asked again after so long, twice as long each time up to the second.
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0


@dataclass(slots=True)
class _Rest:
    until: float
    seconds: float


class Workers:
    """Workers by name; who was asked last is the last to be asked again."""

    def __init__(self) -> None:
        self._idle: dict[str, None] = {}
        self._busy: dict[str, int] = {}  # with what, by number
        self._leaving: set[str] = set()
        self._rests: dict[tuple[str, str], _Rest] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def there(self, worker: str) -> None:
        """It may be asked."""
        self.gone(worker)
        self._idle[worker] = None

    def leaves(self, worker: str) -> None:
        """It may be asked, but waits to leave."""
        if worker in self._idle or worker in self._busy:
            self._leaving.add(worker)

    def gone(self, worker: str) -> None:
        """It may not."""
        self._idle.pop(worker, None)
        self._busy.pop(worker, None)
        self._leaving.discard(worker)
        for known in [known for known in self._rests if known[0] == worker]:
            del self._rests[known]

    def is_leaving(self, worker: str) -> bool:
        """Whether it waits to leave."""
        return worker in self._leaving

    @property
    def staying(self) -> int:
        """How many are there that do not wait to leave."""
        return len(self) - len(self._leaving)

    def busy_with(self, worker: str) -> int | None:
        """What it was asked and has not answered; None for nothing."""
        return self._busy.get(worker)

    # -- asking -----------------------------------------------------------------------------

    def ready(self, store: str, now: float) -> str | None:
        """Who can be asked about this store now."""
        return next((who for who in self._idle if self._rested(who, store) <= now), None)

    def ready_at(self, stores: Iterable[str]) -> float | None:
        """When somebody can be asked about one of these stores; None if nobody is idle."""
        return min(
            (self._rested(who, store) for store in stores for who in self._idle), default=None
        )

    def asked(self, worker: str, number: int) -> None:
        """It is at work."""
        del self._idle[worker]
        self._busy[worker] = number

    def answered(self, worker: str, number: int) -> bool:
        """It has answered; returns whether it had been asked that."""
        if self._busy.get(worker) != number:
            return False
        del self._busy[worker]
        self._idle[worker] = None
        return True

    def succeeded(self, worker: str, store: str) -> None:
        """It can do that."""
        self._rests.pop((worker, store), None)

    def failed(self, worker: str, store: str, now: float) -> None:
        """It could not do that just now."""
        rest = self._rests.get((worker, store))
        seconds = FIRST_REST_S if rest is None else min(2 * rest.seconds, LONGEST_REST_S)
        self._rests[worker, store] = _Rest(now + seconds, seconds)

    def _rested(self, worker: str, store: str) -> float:
        rest = self._rests.get((worker, store))
        return -math.inf if rest is None else rest.until


#: Objects that a worker is asked to release at a time: as many keys as a message may have.
KEYS_AT_A_TIME = 1024
#: A worker that has not answered for so long is not waited for: another one is asked.
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class _Errand:
    """What a worker was asked: to release these objects, or else to sweep an incarnation."""

    worker: str
    store: str
    objects: tuple[StoredObject, ...]
    incarnation: ProducerSession | None
    until: float


class References:
    """The objects of the stores that the operator allows."""

    def __init__(self, stores: Collection[str], totals: Totals, note: Note) -> None:
        self.objects = Objects(stores)
        self.releases = Releases()
        self.sweeps = OrphanCollector(stores)
        self.workers = Workers()
        self._stores, self._totals, self._note = stores, totals, note
        self._errands: dict[int, _Errand] = {}  # in the order in which they are due
        self._next_number = 0
        self._over = False
        #: Producers without an incarnation that are away, since when and in that order, as far as
        #: something of theirs may still come in.
        self._nameless: dict[str, float] = {}

    @property
    def left(self) -> int:
        """Objects to be released, and incarnations to be swept."""
        return len(self.releases) + len(self.sweeps)

    def _is_needed(self, key: str) -> bool:
        """In any store: one place may have two addresses, as with a link, and is two for us."""
        return any((store, key) in self.objects for store in self._stores)

    def _is_only_awaited(self, key: str) -> bool:
        """A crash forgets why it is needed: till that is over its incarnation stands for it."""
        return any(self.objects.is_only_awaited((store, key)) for store in self._stores)

    def restore(self, memory: RecoveredState, now: float) -> None:
        """Go on with the list, and with what samples of an earlier process need."""
        in_steps = (
            entry
            for step in (*memory.steps, *memory.retained)
            for rank in step.micro_batches
            for part in rank
            for entry in part
        )
        self.sweeps.restore(memory.incarnations, now)
        for producer in memory.left:
            self.sweeps.lost(producer, now, for_good=True)
        newest = {
            name: max(seqs)
            for name, (_, seqs) in memory.producers.items()
            if name and seqs and name not in memory.left  # over HTTP nothing is awaited
        }
        self.objects.restore((*memory.entries, *in_steps), newest, self.sweeps.has_ended)
        self._nameless = {
            producer: now
            for producer in self.objects.awaited
            if self.sweeps.current(producer) is None
        }
        self.releases.add(memory.unneeded)

    # -- producers ----------------------------------------------------------------------------

    def producer_connected(self, producer: str, incarnation: str) -> None:
        """It is there; incarnation: what its keys begin with, empty if it puts nothing."""
        self._nameless.pop(producer, None)
        if not self._stores or not incarnation:
            return
        if self.sweeps.current(producer) not in (None, incarnation):
            self.objects.producer_gone(producer)  # what it has not heard of is not sent again
        if self.sweeps.begins(producer, incarnation):
            self._note(IncarnationBegan(producer, incarnation))
            if (forgotten := self.sweeps.forget_oldest()) is not None:
                self._note(IncarnationSwept(forgotten))

    def producer_leaves(self, producer: str, now: float) -> None:
        """It says goodbye: it puts nothing any more, so it can be swept while it is there still.

        Whoever leaves last could not be, by anybody, once it had left.
        """
        self.sweeps.lost(producer, now, for_good=True)

    def producer_lost(self, producer: str, now: float, *, for_good: bool) -> None:
        """Its connection is lost, `for_good` if it said goodbye; after the stream's end it is."""
        for_good = for_good or self._over
        self.sweeps.lost(producer, now, for_good=for_good)
        if for_good:
            self.objects.producer_gone(producer)
            return
        self.objects.producer_away(producer)
        if self.sweeps.current(producer) is None and producer in self.objects.awaited:
            self._nameless[producer] = now

    def stream_over(self) -> None:
        """Nothing comes any more: who is away has nothing to come back for."""
        if not self._over:
            self._over = True
            self._end_away(math.inf)
            for producer in list(self.objects.awaited):
                self.objects.producer_gone(producer)

    def _end_away(self, now: float) -> None:
        """As `next_deadline` counts, to the last bit."""
        over = takewhile(lambda name: self._nameless[name] + AWAY_S <= now, self._nameless)
        nameless = list(over)
        for producer in nameless:
            del self._nameless[producer]
        for producer in [*self.sweeps.end_away(now), *nameless]:
            self.objects.producer_gone(producer)

    # -- workers ------------------------------------------------------------------------------

    def hear(self, said: Said, now: float) -> None:
        """A worker comes, goes, or answers."""
        match said:
            case WorkerThere(worker):
                self._recall(worker)
                self.workers.there(worker)
            case WorkerLeaves(worker):
                self.workers.leaves(worker)
            case WorkerGone(worker):
                self._recall(worker)
                self.workers.gone(worker)
            case Freed() | Swept():
                self._answered(said, now)

    def holds(self, worker: str) -> bool:
        """Whether a worker that wants to leave is needed still: nobody else is there."""
        return self.left > 0 and self.workers.is_leaving(worker) and not self.workers.staying

    def _answered(self, said: Freed | Swept, now: float) -> None:
        """A worker has done what it was asked; what it was not asked, or long ago, is no answer."""
        asked = self.workers.answered(said.worker, said.number)
        errand = self._errands.pop(said.number, None) if asked else None
        if errand is None:
            return
        if isinstance(said, Freed) and errand.objects:
            self._freed(errand, {*said.left}, now)
        elif isinstance(said, Swept) and errand.incarnation:
            self._swept(errand, said, now)
        else:
            self._put_back(errand)

    def _freed(self, errand: _Errand, left: set[str], now: float) -> None:
        still = [stored for stored in errand.objects if stored.key in left]
        gone = tuple(stored for stored in errand.objects if stored.key not in left)
        self.releases.put_back(still)
        self.releases.forget(gone)
        self._totals.objects_freed += len(gone)
        if gone:
            self._note(Deleted(gone))
        self._note_success(errand, len(still), now)

    def _swept(self, errand: _Errand, said: Swept, now: float) -> None:
        store, ended = errand.store, errand.incarnation
        self._note_success(errand, int(said.failed), now)
        if ended is None or not self.sweeps.is_wanted(ended):
            return  # it has come back meanwhile, and may push them
        begins = ended.name + SEPARATOR
        keys = [key for key in said.keys if key.startswith(begins)]
        unneeded = [key for key in keys if not (self._is_needed(key) or self.sweeps.may_push(key))]
        unknown = [key for key in unneeded if (store, key) not in self.releases]
        self._unneeded(tuple(StoredObject(store, key, 0) for key in unknown))
        if (said.more and not unneeded) or any(map(self._is_only_awaited, keys)):
            self.sweeps.postpone(ended, store)  # it would be told the same again
        elif said.failed or said.more:
            self.sweeps.put_back(ended, store)
        elif self.sweeps.swept(ended, store):
            self._note(IncarnationSwept(ended.name))

    def _note_success(self, errand: _Errand, failures: int, now: float) -> None:
        if failures:
            self._totals.releases_failed += 1
            self.workers.failed(errand.worker, errand.store, now)
        else:
            self.workers.succeeded(errand.worker, errand.store)

    def _recall(self, worker: str) -> None:
        """What it was asked is asked of others."""
        number = self.workers.busy_with(worker)
        if number is not None and (errand := self._errands.pop(number, None)) is not None:
            self._put_back(errand)

    def _put_back(self, errand: _Errand) -> None:
        if errand.incarnation is not None:
            self.sweeps.put_back(errand.incarnation, errand.store)
        else:
            self.releases.put_back(errand.objects)

    # -- asking -----------------------------------------------------------------------------

    def take_unneeded(self) -> None:
        """What was decided has made objects unneeded: that is a fact of the same decision."""
        if self.objects.unneeded:
            self._unneeded(self.objects.take_unneeded())
            self.sweeps.resume()

    def _unneeded(self, objects: tuple[StoredObject, ...]) -> None:
        if objects:
            self.releases.add(objects)
            self._note(Releasable(objects))

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; minus infinity if somebody can be asked at once."""
        if not self._stores:
            return None
        deadlines = [self.sweeps.next_deadline(), self._errands_due]
        if (since := next(iter(self._nameless.values()), None)) is not None:
            deadlines.append(since + AWAY_S)
        if self.left:
            deadlines.append(self.workers.ready_at(self._to_do()))
        return min([at for at in deadlines if at is not None], default=None)

    def tick(self, now: float) -> list[Effect]:
        """Ask whoever can be asked, and expect no more of who has not answered."""
        self._end_away(now)
        self.take_unneeded()
        while (due := self._errands_due) is not None and due <= now:
            errand = self._errands.pop(next(iter(self._errands)))
            self._totals.releases_failed += 1
            self._put_back(errand)
        return list(self._ask(now)) if self.left else []

    @property
    def _errands_due(self) -> float | None:
        first = next(iter(self._errands.values()), None)
        return None if first is None else first.until

    def _to_do(self) -> Iterator[str]:
        """Stores in which something is to be done that nobody is asked to do.

        What is unneeded goes before what is to be swept, which would find it again.
        """
        yield from self.releases.stores
        yield from (store for store in self.sweeps.stores if not self.releases.has(store))

    def _ask(self, now: float) -> Iterator[Effect]:
        """Give everything that is to be done to somebody who can be asked."""
        for store in self.releases.stores:
            while self.releases.waits(store) and (worker := self.workers.ready(store, now)):
                objects = tuple(self.releases.take(store, KEYS_AT_A_TIME))
                number = self._begin(worker, store, now, objects)
                yield FreeWanted(worker, number, store, tuple(item.key for item in objects))
        for store in self.sweeps.stores:
            if self.releases.has(store):
                continue
            if (worker := self.workers.ready(store, now)) is not None:
                ended = self.sweeps.take(store)
                number = self._begin(worker, store, now, ended=ended)
                yield SweepWanted(worker, number, store, ended.name + SEPARATOR)

    def _begin(
        self,
        worker: str,
        store: str,
        now: float,
        objects: tuple[StoredObject, ...] = (),
        ended: ProducerSession | None = None,
    ) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        self._errands[number] = _Errand(worker, store, objects, ended, now + ANSWER_S)
        self.workers.asked(worker, number)
        return number
