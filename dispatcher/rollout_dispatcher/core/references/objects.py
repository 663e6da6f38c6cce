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
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Outcome

#: Samples that are awaited of one producer, several times those of all pushes that its credits
#: allow, and of all together; what is answered `full` beyond that is not.
MOST_OF_ONE = 1 << 16
MOST = 1 << 20
#: Decided numbers that a heap may have beside as many as are awaited.
MANY_DECIDED = 1024

#: An object's store and key: whatever else is said of it, there is one object of that name.
Name = tuple[str, str]


def name_of(stored: StoredObject) -> Name:
    """By which an object is known."""
    return stored.store, stored.key


@dataclass(slots=True)
class _Needed:
    """samples: accepted ones in it that live.

    awaited: the numbers of those that may still come in, by producer.
    """

    stored: StoredObject
    samples: int = 0
    awaited: dict[str, set[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Awaited:
    """What is awaited of one producer: so many samples, in these objects.

    lowest: a heap of their numbers, and of such as are decided meanwhile.
    """

    samples: int = 0
    objects: dict[Name, None] = field(default_factory=dict)
    lowest: list[tuple[int, Name]] = field(default_factory=list)


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
        self._awaited: dict[str, _Awaited] = {}  # by producer
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
        if (awaited := self._awaited.get(push.producer)) is None:
            return
        lowest = awaited.lowest
        while lowest and lowest[0][0] < push.floor:
            number, name = heappop(lowest)
            if (needed := self._needed.get(name)) is not None:
                self._decided(needed, push.producer, number)

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

    def producer_gone(self, producer: str) -> None:
        """It sends nothing again."""
        self._await_nothing(producer)

    def producer_away(self, producer: str) -> None:
        """It may come back, and what it has pushed is awaited, unless that is too much by now."""
        if self._num_awaited > MOST:
            self._await_nothing(producer, theirs=True)

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
        awaited = self._awaited.get(producer)
        of_one = 0 if awaited is None else awaited.samples
        return of_one > MOST_OF_ONE or self._num_awaited > MOST

    def _await(self, needed: _Needed, producer: str, number: int) -> None:
        numbers = needed.awaited.setdefault(producer, set())
        if number in numbers:
            return
        numbers.add(number)
        self._num_awaited += 1
        awaited = self._awaited.setdefault(producer, _Awaited())
        awaited.samples += 1
        name = name_of(needed.stored)
        awaited.objects[name] = None
        heappush(awaited.lowest, (number, name))
        if len(awaited.lowest) > 2 * awaited.samples + MANY_DECIDED:
            awaited.lowest = [
                (number, name)
                for name in awaited.objects
                for number in self._needed[name].awaited[producer]
            ]
            heapify(awaited.lowest)

    def _await_nothing(self, producer: str, *, theirs: bool = False) -> None:
        awaited = self._awaited.get(producer)
        for name in () if awaited is None else list(awaited.objects):
            needed = self._needed[name]
            for number in list(needed.awaited[producer]):
                self._decided(needed, producer, number, theirs=theirs)

    def _decided(
        self, needed: _Needed, producer: str, number: int, *, theirs: bool = False
    ) -> None:
        """It is not awaited any more. theirs: it may come all the same, its producer's still."""
        numbers = needed.awaited.get(producer, set())
        if number in numbers:
            numbers.remove(number)
            self._num_awaited -= 1
            awaited = self._awaited[producer]
            awaited.samples -= 1
            if not numbers:
                del needed.awaited[producer], awaited.objects[name_of(needed.stored)]
            if not awaited.samples:
                del self._awaited[producer]
        self._check(needed, theirs=theirs)

    def _check(self, needed: _Needed, *, theirs: bool = False) -> None:
        name = name_of(needed.stored)
        if not needed.samples and not needed.awaited and self._needed.pop(name, None) is not None:
            self.nbytes -= needed.stored.nbytes
            if not theirs:
                self.unneeded[name] = needed.stored
