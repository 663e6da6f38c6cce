"""Has workers delete unneeded objects of payload stores.

    NeededObjects    objects with live samples    Workers            connected workers
    ObjectsToFree    objects to delete            OrphanCollector    ended producers to sweep

The dispatcher opens no store: it sends a request to one worker, and to another one if that fails or
disconnects, until the object is deleted. Requests are sent in the next tick, so objects that become
unneeded in one turn of the event loop go into one request. Invariant: an object is deleted only
after the fact that it is unneeded.

A worker is any client that opens payload stores, a DP rank or a producer; the shell names it.

`Workers`: each has at most one request. A worker that failed for a store *rests* from that store,
longer each time, while others get its requests; one that does not answer gets no other request
until it does. No worker is excluded for good.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from rollout_dispatcher.core.buffer.objects import (
    AWAY_S,
    SEPARATOR,
    Incarnation,
    NeededObjects,
    ObjectsToFree,
    OrphanCollector,
)
from rollout_dispatcher.core.effects import Effect, FreeRequested, SweepRequested
from rollout_dispatcher.core.facts import (
    AppendFact,
    Deleted,
    IncarnationBegan,
    IncarnationSwept,
    RecoveredState,
    Releasable,
)
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.payload import StoredObject


@dataclass(frozen=True, slots=True)
class WorkerThere:
    """A worker connected, maybe again: its request from before is void."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """A worker sent Bye, and waits for the answer."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's connection is over."""

    worker: str


@dataclass(frozen=True, slots=True)
class Freed:
    """A worker answers a `FreeRequested`; left: keys that it could not delete."""

    worker: str
    number: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Swept:
    """A worker answers a `SweepRequested` with keys in the store; more: there are others."""

    worker: str
    number: int
    keys: tuple[str, ...] = ()
    more: bool = False
    failed: bool = False


WorkerEvent = WorkerThere | WorkerLeaves | WorkerGone | Freed | Swept


#: A worker that failed gets no request for so long, twice as long each time up to the second.
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0


@dataclass(slots=True)
class _Worker:
    """One worker.

    request: number of the request that it has not answered. rests: by store, until when it rests,
    and for how many seconds.
    """

    request: int | None = None
    leaving: bool = False
    rests: dict[str, tuple[float, float]] = field(default_factory=dict)

    def rested(self, store: str) -> float:
        """When it may be sent a request about this store."""
        return self.rests.get(store, (-math.inf, 0.0))[0]


class Workers:
    """Connected workers by name, the one whose last answer is oldest first."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def connected(self, worker: str) -> None:
        """It may be sent requests."""
        self.gone(worker)
        self._workers[worker] = _Worker()

    def leaves(self, worker: str) -> None:
        """It may be sent requests, but waits to leave."""
        if (known := self._workers.get(worker)) is not None:
            known.leaving = True

    def gone(self, worker: str) -> None:
        """Its connection is over."""
        self._workers.pop(worker, None)

    def is_last(self, worker: str) -> bool:
        """Whether it waits to leave, and so does every other worker."""
        return worker in self._workers and all(one.leaving for one in self._workers.values())

    def busy_with(self, worker: str) -> int | None:
        """Number of the request that it has not answered; None for none."""
        known = self._workers.get(worker)
        return None if known is None else known.request

    # -- requests ---------------------------------------------------------------------------

    @property
    def _idle(self) -> Iterator[tuple[str, _Worker]]:
        return (each for each in self._workers.items() if each[1].request is None)

    def ready(self, store: str, now: float) -> str | None:
        """The first worker that may be sent a request about this store now."""
        return next((name for name, one in self._idle if one.rested(store) <= now), None)

    def ready_at(self, stores: Iterable[str]) -> float | None:
        """When a worker may be sent a request about one of these stores; None if none is idle."""
        return min((one.rested(at) for at in stores for _, one in self._idle), default=None)

    def request_sent(self, worker: str, number: int) -> None:
        """It was sent this request; it goes behind the others."""
        self._workers[worker] = known = self._workers.pop(worker)
        known.request = number

    def answered(self, worker: str, number: int) -> bool:
        """It answered this request; returns whether it had been sent that."""
        if self.busy_with(worker) != number:
            return False
        self._workers[worker] = known = self._workers.pop(worker)
        known.request = None
        return True

    def succeeded(self, worker: str, store: str) -> None:
        """It has carried out a request about this store."""
        self._workers[worker].rests.pop(store, None)

    def failed(self, worker: str, store: str, now: float) -> None:
        """It could not carry out a request about this store."""
        rests = self._workers[worker].rests
        seconds = min(2 * rests[store][1], LONGEST_REST_S) if store in rests else FIRST_REST_S
        rests[store] = now + seconds, seconds


#: Objects in one request: as many keys as a message may have.
KEYS_AT_A_TIME = 1024
#: A request without an answer for so long goes to another worker.
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class _StoreRequest:
    """A request to a worker: to delete objects, or to sweep an incarnation."""

    worker: str
    store: str
    objects: tuple[StoredObject, ...]
    incarnation: Incarnation | None
    until: float


class References:
    """The objects of the stores that the operator allows."""

    def __init__(self, stores: Collection[str], totals: Totals, append_fact: AppendFact) -> None:
        self.objects = NeededObjects(stores)
        self.to_free = ObjectsToFree()
        self.sweeps = OrphanCollector(stores)
        self.workers = Workers()
        self._stores, self._totals, self._append = stores, totals, append_fact
        self._requests: dict[int, _StoreRequest] = {}  # by due time
        self._next_number = 0
        self._over = False
        #: Absent producers without an incarnation that have pending samples: since when, in order.
        self._nameless: dict[str, float] = {}

    @property
    def num_pending(self) -> int:
        """Number of objects to delete, and of incarnations to sweep."""
        return len(self.to_free) + len(self.sweeps)

    def _is_needed(self, key: str) -> bool:
        """Whether any store has a needed object of this key: two stores may share one place."""
        return any((store, key) in self.objects for store in self._stores)

    def _is_only_pending(self, key: str) -> bool:
        """Only memory knows that the object of this key is pending: keep its incarnation until its
        samples are decided, so that a crash cannot leak it.
        """
        return any(self.objects.is_only_pending((store, key)) for store in self._stores)

    def restore(self, memory: RecoveredState, now: float) -> None:
        """Start from the objects that samples of an earlier process need, and those to delete."""
        steps = (*memory.steps, *memory.retained)
        in_steps = (entry for step in steps for entry in step.entries())
        self.sweeps.restore(memory.incarnations, now)
        for producer in memory.left:
            self.sweeps.disconnected(producer, now, for_good=True)
        newest = {
            name: max(seqs)
            for name, (_, seqs) in memory.producers.items()
            if name and seqs and name not in memory.left  # pushes over HTTP are never pending
        }
        self.objects.restore((*memory.entries, *in_steps), newest, self.sweeps.has_ended)
        self._nameless = {
            producer: now
            for producer in self.objects.producers_pending
            if self.sweeps.current(producer) is None
        }
        self.to_free.add(memory.unneeded)

    # -- producers ----------------------------------------------------------------------------

    def producer_connected(self, producer: str, incarnation: str) -> None:
        """A producer connected; incarnation: prefix of its keys, empty if it puts no object."""
        self._nameless.pop(producer, None)
        if not self._stores or not incarnation:
            return
        if self.sweeps.current(producer) not in (None, incarnation):
            self.objects.producer_gone(producer)  # its former process resends nothing
        if self.sweeps.begins(producer, incarnation):
            self._append(IncarnationBegan(producer, incarnation))
            if (forgotten := self.sweeps.forget_oldest()) is not None:
                self._append(IncarnationSwept(forgotten))

    def producer_leaves(self, producer: str, now: float) -> None:
        """A producer sent Bye: it puts no object any more.

        It is swept while it is connected: no worker is left to sweep the last one later.
        """
        self.sweeps.disconnected(producer, now, for_good=True)

    def producer_disconnected(self, producer: str, now: float, *, for_good: bool) -> None:
        """A producer's connection is lost, `for_good` if it sent Bye or the stream is over."""
        for_good = for_good or self._over
        self.sweeps.disconnected(producer, now, for_good=for_good)
        if for_good:
            self.objects.producer_gone(producer)
            return
        self.objects.producer_away(producer)
        if self.sweeps.current(producer) is None and producer in self.objects.producers_pending:
            self._nameless[producer] = now

    def stream_over(self) -> None:
        """The stream is over: absent producers need not come back."""
        if not self._over:
            self._over = True
            self._end_away(math.inf)
            for producer in list(self.objects.producers_pending):
                self.objects.producer_gone(producer)

    def _end_away(self, now: float) -> None:
        """End producers that are away for `AWAY_S`, by the same sums as `next_deadline`."""
        nameless = list(
            takewhile(lambda name: self._nameless[name] + AWAY_S <= now, self._nameless)
        )
        for producer in nameless:
            del self._nameless[producer]
        for producer in [*self.sweeps.end_away(now), *nameless]:
            self.objects.producer_gone(producer)

    # -- workers ------------------------------------------------------------------------------

    def on_worker_event(self, event: WorkerEvent, now: float) -> None:
        """A worker connected, leaves, disconnected or answered."""
        match event:
            case WorkerThere(worker):
                self._recall(worker)
                self.workers.connected(worker)
            case WorkerLeaves(worker):
                self.workers.leaves(worker)
            case WorkerGone(worker):
                self._recall(worker)
                self.workers.gone(worker)
            case Freed() | Swept():
                self._answered(event, now)

    def is_last_to_free(self, worker: str) -> bool:
        """Whether a worker that leaves is the last that can delete the remaining objects."""
        return self.num_pending > 0 and self.workers.is_last(worker)

    def _answered(self, answer: Freed | Swept, now: float) -> None:
        """A worker answered its request; other answers are ignored."""
        asked = self.workers.answered(answer.worker, answer.number)
        request = self._requests.pop(answer.number, None) if asked else None
        if request is None:
            return
        if isinstance(answer, Freed) and request.objects:
            self._freed(request, {*answer.left}, now)
        elif isinstance(answer, Swept) and request.incarnation:
            self._swept(request, answer, now)
        else:
            self._put_back(request)

    def _freed(self, request: _StoreRequest, left: set[str], now: float) -> None:
        still = [stored for stored in request.objects if stored.key in left]
        gone = tuple(stored for stored in request.objects if stored.key not in left)
        self.to_free.put_back(still)
        self.to_free.forget(gone)
        self._totals.objects_freed += len(gone)
        if gone:
            self._append(Deleted(gone))
        self._note_success(request, len(still), now)

    def _swept(self, request: _StoreRequest, answer: Swept, now: float) -> None:
        store, ended = request.store, request.incarnation
        self._note_success(request, int(answer.failed), now)
        if ended is None or not self.sweeps.is_wanted(ended):
            return  # it has come back since, and may push them
        begins = ended.name + SEPARATOR
        keys = [key for key in answer.keys if key.startswith(begins)]
        unneeded = [key for key in keys if not (self._is_needed(key) or self.sweeps.may_push(key))]
        unknown = [key for key in unneeded if (store, key) not in self.to_free]
        self._unneeded(tuple(StoredObject(store, key, 0) for key in unknown))
        if (answer.more and not unneeded) or any(map(self._is_only_pending, keys)):
            # objects in use fill the listing; retry once one is freed
            self.sweeps.postpone(ended, store)
        elif answer.failed or answer.more:
            self.sweeps.put_back(ended, store)
        elif self.sweeps.swept(ended, store):
            self._append(IncarnationSwept(ended.name))

    def _note_success(self, request: _StoreRequest, failures: int, now: float) -> None:
        if failures:
            self._totals.releases_failed += 1
            self.workers.failed(request.worker, request.store, now)
        else:
            self.workers.succeeded(request.worker, request.store)

    def _recall(self, worker: str) -> None:
        """Put the requests of a worker back, for others."""
        number = self.workers.busy_with(worker)
        if number is not None and (request := self._requests.pop(number, None)) is not None:
            self._put_back(request)

    def _put_back(self, request: _StoreRequest) -> None:
        if request.incarnation is not None:
            self.sweeps.put_back(request.incarnation, request.store)
        else:
            self.to_free.put_back(request.objects)

    # -- asking -----------------------------------------------------------------------------

    def pop_unneeded(self) -> None:
        """Move unneeded objects to those to delete, with a fact."""
        if self.objects.unneeded:
            self._unneeded(self.objects.pop_unneeded())
            self.sweeps.resume()

    def _unneeded(self, objects: tuple[StoredObject, ...]) -> None:
        if objects:
            self.to_free.add(objects)
            self._append(Releasable(objects))

    def next_deadline(self) -> float | None:
        """When `tick` is due; minus infinity if a request can be sent at once."""
        if not self._stores:
            return None
        deadlines = [self.sweeps.next_deadline(), self._requests_due]
        if (since := next(iter(self._nameless.values()), None)) is not None:
            deadlines.append(since + AWAY_S)
        if self.num_pending:
            deadlines.append(self.workers.ready_at(self._to_do()))
        return min([at for at in deadlines if at is not None], default=None)

    def tick(self, now: float) -> list[Effect]:
        """Send requests to ready workers; those without an answer in time go to others."""
        self._end_away(now)
        self.pop_unneeded()
        while (due := self._requests_due) is not None and due <= now:
            request = self._requests.pop(next(iter(self._requests)))
            self._totals.releases_failed += 1
            self._put_back(request)
        return list(self._ask(now)) if self.num_pending else []

    @property
    def _requests_due(self) -> float | None:
        first = next(iter(self._requests.values()), None)
        return None if first is None else first.until

    def _to_do(self) -> Iterator[str]:
        """Stores with work that is in no request.

        Objects are deleted before a sweep, which would list them again.
        """
        yield from self.to_free.stores
        yield from (store for store in self.sweeps.stores if not self.to_free.has(store))

    def _ask(self, now: float) -> Iterator[Effect]:
        """Send all work to ready workers."""
        for store in self.to_free.stores:
            while self.to_free.waits(store) and (worker := self.workers.ready(store, now)):
                objects = tuple(self.to_free.assign(store, KEYS_AT_A_TIME))
                number = self._begin(worker, store, now, objects)
                yield FreeRequested(worker, number, store, tuple(item.key for item in objects))
        for store in self.sweeps.stores:
            if self.to_free.has(store):
                continue
            if (worker := self.workers.ready(store, now)) is not None:
                ended = self.sweeps.assign(store)
                number = self._begin(worker, store, now, ended=ended)
                yield SweepRequested(worker, number, store, ended.name + SEPARATOR)

    def _begin(
        self,
        worker: str,
        store: str,
        now: float,
        objects: tuple[StoredObject, ...] = (),
        ended: Incarnation | None = None,
    ) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        self._requests[number] = _StoreRequest(worker, store, objects, ended, now + ANSWER_S)
        self.workers.request_sent(worker, number)
        return number
