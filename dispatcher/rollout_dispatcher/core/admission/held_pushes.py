"""Pushes that are held back, in order of arrival, and the memory that their payloads take.

    held with its payload --------------------------------its turn--> decided
    held without (`held_bytes` were used up) --its turn--> asked for again --arrives--> decided

Invariant: payload bytes of held pushes stay within `held_bytes`, but for one push, so that there is
always one that can come in at once.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.sample import Sample

#: How long a payload that was asked for again keeps others from being asked for theirs.
RESEND_SECONDS = 10.0


@dataclass(slots=True)
class _Held:
    """nbytes: payload bytes in memory. asked: its payload is on its way."""

    nbytes: int = 0
    emptied: bool = False
    asked: bool = False


class HeldPushes:
    """held_bytes: cap on their payloads."""

    def __init__(self, held_bytes: int) -> None:
        self._limit = held_bytes
        self._held: OrderedDict[Push, _Held] = OrderedDict()
        self._of_producer: defaultdict[str, dict[Push, None]] = defaultdict(dict)
        self._of_group: defaultdict[str, dict[Push, None]] = defaultdict(dict)
        self._emptied: dict[tuple[str, int], Push] = {}
        self._asked: dict[Push, float] = {}  # since when, in that order
        #: Samples of payloads that were asked for again and are expected to come.
        self.asked_samples = 0
        #: Pushes that have waited and wait no more: whoever stands behind them may come in.
        self.departures = 0
        #: Payload bytes in memory.
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Push]:
        """In order of arrival."""
        return iter(self._held)

    def __contains__(self, push: object) -> bool:
        return push in self._held

    def first(self) -> Push:
        """The push that has waited longest; there has to be one."""
        return next(iter(self._held))

    def of_producer(self, producer: str) -> list[Push]:
        """This producer's pushes."""
        return list(self._of_producer.get(producer, ()))

    def of_group(self, group_id: str) -> list[Push]:
        """Pushes that may have a waiting sample of this group."""
        return list(self._of_group.get(group_id, ()))

    def members(self, group_id: str) -> int:
        """How many samples of this group wait."""
        waiting = (sample for push in self.of_group(group_id) for sample in push.waiting)
        return sum(sample.group_id == group_id for sample in waiting)

    def add(self, push: Push) -> None:
        """Hold a push; its payload goes if there is no memory for it."""
        self._held[push] = _Held()
        self._of_producer[push.producer][push] = None
        for sample in push.waiting:
            if sample.group_id is not None:
                self._of_group[sample.group_id][push] = None
        self.weigh(push)

    def remove(self, push: Push) -> None:
        """It is decided, or its producer is gone."""
        self._unmark(push)
        self.departures += 1
        self.nbytes -= self._held.pop(push).nbytes
        _discard(self._of_producer, push.producer, push)
        for sample in push.samples:
            if sample.group_id is not None:
                _discard(self._of_group, sample.group_id, push)

    def weigh(self, push: Push) -> None:
        """Some of its samples may be decided by now: see what the others hold of memory."""
        held = self._held[push]
        before, held.nbytes = held.nbytes, sum(sample.memory_bytes for sample in push.waiting)
        self.nbytes += held.nbytes - before
        if self.nbytes > self._limit and self.nbytes > held.nbytes > 0:
            push.samples = tuple(map(Sample.with_producer, push.samples))
            self._emptied[push.producer, push.first_seq] = push
            held.emptied = True
            self.nbytes -= held.nbytes
            held.nbytes = 0

    # -- without their payloads ---------------------------------------------------------------

    def is_emptied(self, push: Push) -> bool:
        """Whether its payload was let go."""
        return self._held[push].emptied

    def ask(self, push: Push, now: float) -> bool:
        """Its payload is wanted again; returns whether it was not asked for before."""
        held = self._held[push]
        if held.asked:
            return False
        held.asked = True
        self._asked[push] = now
        self.asked_samples += len(push.undecided)
        return True

    def give_up_late(self, now: float) -> bool:
        """Expect no longer what was asked for long ago; returns whether there was any."""
        late = [push for push, since in self._asked.items() if since + RESEND_SECONDS <= now]
        for push in late:
            self._expect_no_more(push)
        return bool(late)

    def next_deadline(self) -> float | None:
        """When a payload that was asked for is late."""
        since = next(iter(self._asked.values()), None)
        return None if since is None else since + RESEND_SECONDS

    def _expect_no_more(self, push: Push) -> None:
        if self._asked.pop(push, None) is not None:
            self.asked_samples -= len(push.undecided)

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
        held = self._held[push]
        self._expect_no_more(push)
        if held.emptied:
            del self._emptied[push.producer, push.first_seq]
        held.emptied = held.asked = False


def _discard(index: dict[str, dict[Push, None]], key: str, push: Push) -> None:
    found = index.get(key, {})
    found.pop(push, None)
    if not found:
        index.pop(key, None)
