"""The state of each producer: connected or away, contributed or not, done or not.

    there --lost without a goodbye--> away --`timeout` passes--> gone
      ^          (or a restart)         |
      +--------- connects again --------+        there --goodbye--> gone

A phase or the stream ends once every producer that has contributed to the run has announced it or
is gone: a slow producer's first sample of a phase may arrive after a fast one's last. Nothing waits
for a producer without a contribution, and a producer that is gone is forgotten.

`Ranges`: a set of integers as sorted disjoint ranges that do not touch. Consecutive numbers that
return nearly in order make a few ranges, and cost only these.

`DuplicateMemory` remembers accepted samples, so that a push which is sent again is not stored
again. It also keeps the digest of each producer's key: a client that raised another's floor would
turn the other's samples into duplicates.

Its two memories are bounded:

- per producer, the accepted sequence numbers at or above its *floor*: the lowest number that it may
  still send again, which every push states. Lower numbers never return, so the memory is as small
  as the producer's unanswered pushes, which admission bounds. Beyond `MAX_PRODUCERS` the least
  recently active producer is forgotten.
- the last `horizon` sample ids given by users, over all producers, with the checksum of each
  sample's content: 192 bytes for an id of 24 letters.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from itertools import islice


class Ranges:
    """Integers: range i has the numbers from `starts[i]` to below `stops[i]`."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for number in sorted(numbers):
            self.add(number, number + 1)

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        return self.meets(number, number + 1)

    def meets(self, start: int, stop: int) -> bool:
        """Whether it has a number from `start` to below `stop`."""
        first = bisect_right(self._stops, start)  # the first range that goes beyond `start`
        return first < len(self._starts) and self._starts[first] < stop

    @property
    def last(self) -> int:
        """The largest, -1 if there is none."""
        return self._stops[-1] - 1 if self._stops else -1

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from `start` to below `stop`, which is above it."""
        if self._stops and self._stops[-1] == start:  # the common case
            self._stops[-1] = stop
            return
        # The ranges that these numbers overlap or touch: index of the first, and one past the last.
        first, behind = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < behind:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[behind - 1])
        self._starts[first:behind] = [start]
        self._stops[first:behind] = [stop]

    def remove_below(self, number: int) -> None:
        """Forget every integer below `number`."""
        gone = bisect_right(self._stops, number)
        del self._starts[:gone], self._stops[:gone]
        if self._starts:
            self._starts[0] = max(self._starts[0], number)


#: A forgotten producer that returns is treated as new; far above any fleet.
MAX_PRODUCERS = 65_536
#: Numbers below a producer's newest for which withdrawals and closes are remembered: dozens of the
#: largest pushes.
MAX_NUMBERS = 2**20


@dataclass(slots=True)
class _Numbers:
    """What is remembered of one producer.

    refused: numbers of refused members, each of which its group lacks once. closes: numbers of its
    requests to close a group. key: digest of its key, empty without one.
    """

    key: str = ""

    floor: int = 0
    accepted: Ranges = field(default_factory=Ranges)
    refused: Ranges = field(default_factory=Ranges)
    closes: Ranges = field(default_factory=Ranges)


class DuplicateMemory:
    """Answers whether a sample was accepted before."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._ids: OrderedDict[str, int | None] = OrderedDict()
        self._producers: OrderedDict[str, _Numbers] = OrderedDict()

    def is_ours(self, producer: str, key: str) -> bool:
        """Whether this digest belongs to the producer's name, or the name has none yet."""
        known = self._producers.get(producer)
        return known is None or not known.key or compare_digest(known.key, key)

    def bind(self, producer: str, key: str) -> bool:
        """Bind the producer's name to the digest of its key; returns whether it is new."""
        if not key:
            return False
        known = self._active(producer)
        news, known.key = known.key != key, key
        return news

    def raise_floor(self, producer: str, floor: int) -> bool:
        """Forget numbers that this producer will never send again; returns whether it rose."""
        known = self._active(producer)
        if floor <= known.floor:
            return False
        known.floor = floor
        known.accepted.remove_below(floor)
        known.refused.remove_below(floor)
        return True

    def newest(self, producer: str) -> int:
        """The largest known accepted number of this producer, -1 for none."""
        known = self._producers.get(producer)
        return -1 if known is None else max(known.floor - 1, known.accepted.last)

    def seen(self, producer: str, seq: int, given_id: str | None) -> bool:
        """Whether this number of this producer, or this user-given id, was accepted before.

        A push without a producer (empty name) is never sent again under the same number.
        """
        return (given_id is not None and given_id in self._ids) or self.is_resent(producer, seq)

    def conflicts(self, given_id: str, checksum: int | None) -> bool:
        """Whether the accepted sample of this id has other content, as far as is known."""
        known = self._ids.get(given_id)
        return known is not None and checksum is not None and known != checksum

    def is_resent(self, producer: str, seq: int) -> bool:
        """Whether this number of this producer was accepted before."""
        known = self._producers.get(producer) if producer else None
        return known is not None and (seq < known.floor or seq in known.accepted)

    def are_new(self, producer: str, numbers: range, given_ids: Sequence[str]) -> bool:
        """Whether none of these numbers and ids was accepted before, and the ids differ."""
        if not self._ids.keys().isdisjoint(given_ids) or len({*given_ids}) < len(given_ids):
            return False
        known = self._producers.get(producer) if producer else None
        return known is None or not (
            numbers.start < known.floor or known.accepted.meets(numbers.start, numbers.stop)
        )

    def accept(self, producer: str, numbers: range, given: Mapping[str, int | None]) -> None:
        """Remember accepted samples by their numbers, and by ids that users gave.

        given: checksums by these ids, in the order of the samples.
        """
        if producer:
            self._known(producer).accepted.add(numbers.start, numbers.stop)
        if given:
            self._ids.update(given)
        while len(self._ids) > self._horizon:
            self._ids.popitem(last=False)

    def refuse(self, producer: str, seq: int) -> bool:
        """Remember a refused member of a group; returns whether it is new."""
        return not producer or _is_news(self._known(producer).refused, seq)

    def is_new_close(self, producer: str, number: int) -> bool:
        """Record the number of a producer's request to close a group; returns whether it is new."""
        return _is_news(self._known(producer).closes, number)

    def forget(self, given_ids: Iterable[str]) -> None:
        """Forget these ids: their samples were dropped, and may be pushed again."""
        for given_id in given_ids:
            self._ids.pop(given_id, None)

    def _active(self, producer: str) -> _Numbers:
        """The producer's record, marked as active; forgets the least recent beyond the cap."""
        known = self._known(producer)
        self._producers.move_to_end(producer)
        while len(self._producers) > MAX_PRODUCERS:
            self._producers.popitem(last=False)
        return known

    def _known(self, producer: str) -> _Numbers:
        found = self._producers.get(producer)
        if found is None:
            found = self._producers[producer] = _Numbers()
        return found

    def restore(
        self,
        producers: Mapping[str, tuple[int, frozenset[int]]],
        given_ids: Iterable[tuple[str, int | None]],
        keys: Mapping[str, str],
    ) -> None:
        """Restore the memory of an earlier process; ids oldest first."""
        for name, (floor, accepted) in producers.items():
            self._producers[name] = _Numbers(keys.get(name, ""), floor, Ranges(accepted))
        self._ids.update(given_ids)


def _is_news(numbers: Ranges, number: int) -> bool:
    """Add a number, forget those far below; returns whether it is new."""
    if number in numbers:
        return False
    numbers.add(number, number + 1)
    numbers.remove_below(number - MAX_NUMBERS)
    return True


#: Beyond this number the producer that is away longest is forgotten; far above any fleet.
MAX_AWAY = 65_536


@dataclass(slots=True)
class _Producer:
    """A producer that is there or may come back.

    away_since: None while it is there. contributed: whether a sample of it was accepted, or was
    blocked. phase: the newest phase that it has ended, 0 for none. ended: whether it has ended its
    stream. incarnation: identifies its process among those of its name; empty without one.
    """

    away_since: float | None = None
    contributed: bool = False
    phase: int = 0
    ended: bool = False
    incarnation: str = ""

    @property
    def owes_after(self) -> int | None:
        """Phases that end after this version wait for it; None if none does."""
        return None if self.ended or not self.contributed else self.phase


#: Stands for an unknown producer.
_NOBODY = _Producer()


class Producers:
    """Producers that are there or may come back. timeout: seconds away until one is gone."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[str, _Producer] = {}
        self._away: dict[str, None] = {}  # in order of leaving
        #: Clients without a connection, as over HTTP: no end of theirs binds a producer.
        self._nameless = _Producer()
        #: Whether any producer has contributed.
        self.begun = False

    @property
    def num_there(self) -> int:
        """Number of connected producers."""
        return len(self._known) - len(self._away)

    def __contains__(self, producer: object) -> bool:
        """Whether the producer is there or may come back."""
        return producer in self._known

    def is_away(self, producer: str) -> bool:
        """Whether the producer is not connected; false for clients without a name, as over HTTP."""
        return producer != "" and (producer not in self._known or producer in self._away)

    # -- connections ------------------------------------------------------------------------

    def connected(self, producer: str, incarnation: str = "") -> bool:
        """A producer connected; returns whether its incarnation has changed."""
        known = self._known.get(producer)
        if known is None:
            known = self._known[producer] = _Producer()
        elif known.away_since is not None:
            known.away_since = None
            del self._away[producer]
        before, known.incarnation = known.incarnation, incarnation or known.incarnation
        return before not in ("", known.incarnation)

    def disconnected(self, producer: str, now: float, *, for_good: bool) -> list[str]:
        """A producer's connection is lost; returns the producers that are gone.

        for_good: after a goodbye.
        """
        known = self._known.get(producer)
        if known is None:
            return []
        if for_good or not known.contributed:
            self._forget(producer)
            return [producer]
        if known.away_since is None:
            known.away_since = now
            self._away[producer] = None
        beyond = list(islice(self._away, max(0, len(self._away) - MAX_AWAY)))
        for other in beyond:
            self._forget(other)
        return beyond

    def restore(
        self, words: Mapping[str, tuple[int, bool]], now: float, *, contributed: Collection[str]
    ) -> None:
        """Restore producers that contributed to an earlier process, and the ends they announced."""
        self.begun = len(contributed) > 0
        for producer, (phase, ended) in words.items():
            if not producer:
                self._nameless.phase, self._nameless.ended = phase, ended
                continue
            self._known[producer] = _Producer(now, producer in contributed, phase, ended)
            self._away[producer] = None

    def expire(self, now: float) -> list[str]:
        """Forget producers that are away for too long; returns them."""
        gone = []
        for producer in self._away:
            since = self._known[producer].away_since
            if since is None or since + self._timeout > now:
                break
            gone.append(producer)
        for producer in gone:
            self._forget(producer)
        return gone

    def next_deadline(self) -> float | None:
        """When the next producer expires."""
        first = next(iter(self._away), None)
        since = None if first is None else self._known[first].away_since
        return None if since is None else since + self._timeout

    def _forget(self, producer: str) -> None:
        del self._known[producer]
        self._away.pop(producer, None)

    # -- contributions and ends -------------------------------------------------------------

    def contributed(self, producer: str) -> None:
        """Samples of the producer were accepted or blocked."""
        self.begun = True
        if not producer:
            return
        known = self._known.get(producer)
        if known is None:
            self.connected(producer)
            known = self._known[producer]
        known.contributed = True

    def ends(self, producer: str, end: int | None) -> None:
        """The producer pushes nothing older than this version any more; None: nothing at all."""
        known = self._nameless
        if producer:
            self.connected(producer)
            known = self._known[producer]
        known.phase, known.ended = max(known.phase, end or 0), known.ended or end is None

    def ends_of(self, producer: str) -> tuple[int, bool]:
        """The newest phase that a producer has ended, 0 for none; whether its stream has ended."""
        known = self._known.get(producer, _NOBODY) if producer else self._nameless
        return known.phase, known.ended

    def phase(self, producer: str) -> int:
        """The newest phase that a producer has ended, 0 for none; older samples are refused."""
        return self._known.get(producer, _NOBODY).phase

    def has_ended(self, producer: str) -> bool:
        """Whether the producer has ended its stream, which is final."""
        return self._known.get(producer, _NOBODY).ended

    # -- producers that an end waits for ------------------------------------------------------

    def is_waited_for(self, end: int | None) -> bool:
        """Whether `before` has any producer."""
        return any(True for _ in self.before(end))

    def before(self, end: int | None) -> Iterator[str]:
        """Producers that have contributed, and may still push samples older than this version.

        None: those that have not ended their stream; before any contribution, all that are there,
        so that an idle worker does not end a run that others have not begun.
        """
        for producer, known in self._known.items():
            if end is None and not self.begun:
                waits = not known.ended
            else:
                after = known.owes_after
                waits = after is not None and (end is None or after < end)
            if waits:
                yield producer
