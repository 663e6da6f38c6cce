"""Producers as the core knows them: who is there, who has contributed, and who is done.

    there --lost without a goodbye--> away --`timeout` passes--> gone
      ^          (or a restart)         |
      +--------- connects again --------+        there --goodbye--> gone

A phase, and the stream, end when everybody who has contributed to the run has said so or is gone:
one producer's last sample says nothing of the others', and a slow one's first sample of a phase
comes after a fast one's last. Who has contributed nothing is not waited for, and what is remembered
of somebody who is gone is nothing.

`Ranges`: a set of integers that lie close together: disjoint ranges, in order, none touching the
next. Numbers that are given out one after the other and come back nearly in order make one range or
a few, however many they are, and cost what the ranges cost.

`DuplicateMemory` remembers what was accepted, so that a push which is sent again is not stored
again; and the digest of each producer's key, for as long as the rest: who raised the floor of
another would have its samples taken for duplicates.

Two memories, both bounded:

- per producer, the accepted sequence numbers at or above its *floor*: the lowest number that it
  may still send again, which it states with every push. What is below can never come back, so the
  memory is as small as the producer's unanswered pushes, and admission bounds those. The least
  recently active producer is forgotten when there are more than `MAX_PRODUCERS`.
- the last `horizon` sample ids that users gave themselves, over all producers, with the checksum of
  each sample's content: 192 bytes an id of 24 letters.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from itertools import islice


class Ranges:
    """Integers; `stops[i]` is one above the last of the range that begins at `starts[i]`."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for number in sorted(numbers):
            self.add(number, number + 1)

    def __len__(self) -> int:
        """How many ranges."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        return self.meets(number, number + 1)

    def meets(self, start: int, stop: int) -> bool:
        """Whether one of the numbers from `start` to below `stop` is here."""
        first = bisect_right(self._stops, start)  # the first range that goes beyond `start`
        return first < len(self._starts) and self._starts[first] < stop

    @property
    def last(self) -> int:
        """The largest, -1 if there is none."""
        return self._stops[-1] - 1 if self._stops else -1

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from `start` to below `stop`, which is above it."""
        if self._stops and self._stops[-1] == start:  # as nearly always
            self._stops[-1] = stop
            return
        # Of the ranges that these numbers overlap or touch, the first and one behind the last.
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


#: A forgotten producer that comes back is treated as new; 64 ki is far above any fleet.
MAX_PRODUCERS = 65_536
#: How far below the newest of a producer's numbers it is remembered what it has withdrawn, and
#: closed; dozens of the largest pushes.
MAX_NUMBERS = 2**20


@dataclass(slots=True)
class _Numbers:
    """refused: members of groups that were, each of which its group lacks once.

    closes: numbers of the closes of groups that were heard. key: the digest of its key, if any.
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
        """Whether the digest of this key goes with that producer's name, or none does yet."""
        known = self._producers.get(producer)
        return known is None or not known.key or compare_digest(known.key, key)

    def bind(self, producer: str, key: str) -> bool:
        """The producer's name goes with the digest of its key; returns whether that is news."""
        if not key:
            return False
        known = self._active(producer)
        news, known.key = known.key != key, key
        return news

    def raise_floor(self, producer: str, floor: int) -> bool:
        """Forget what this producer will never send again; returns whether that was news."""
        known = self._active(producer)
        if floor <= known.floor:
            return False
        known.floor = floor
        known.accepted.remove_below(floor)
        known.refused.remove_below(floor)
        return True

    def newest(self, producer: str) -> int:
        """The largest number that is known of this producer's accepted samples, -1 for none."""
        known = self._producers.get(producer)
        return -1 if known is None else max(known.floor - 1, known.accepted.last)

    def seen(self, producer: str, seq: int, given_id: str | None) -> bool:
        """Whether this number of this producer, or this user-given id, was accepted before.

        A push without a producer (empty name) is never sent again under the same number.
        """
        return (given_id is not None and given_id in self._ids) or self.is_resent(producer, seq)

    def conflicts(self, given_id: str, checksum: int | None) -> bool:
        """Whether the sample that this id was given to has other content, as far as is known."""
        known = self._ids.get(given_id)
        return known is not None and checksum is not None and known != checksum

    def is_resent(self, producer: str, seq: int) -> bool:
        """Whether this number of this producer was accepted before."""
        known = self._producers.get(producer) if producer else None
        return known is not None and (seq < known.floor or seq in known.accepted)

    def are_new(self, producer: str, numbers: range, given_ids: Sequence[str]) -> bool:
        """Whether none of these numbers and ids was accepted before, and no id comes twice."""
        if not self._ids.keys().isdisjoint(given_ids) or len({*given_ids}) < len(given_ids):
            return False
        known = self._producers.get(producer) if producer else None
        return known is None or not (
            numbers.start < known.floor or known.accepted.meets(numbers.start, numbers.stop)
        )

    def accept(self, producer: str, numbers: range, given: Mapping[str, int | None]) -> None:
        """Remember accepted samples by their numbers, and by the ids that users gave them.

        given: checksums by these ids, in the order of the samples.
        """
        if producer:
            self._known(producer).accepted.add(numbers.start, numbers.stop)
        if given:
            self._ids.update(given)
        while len(self._ids) > self._horizon:
            self._ids.popitem(last=False)

    def refuse(self, producer: str, seq: int) -> bool:
        """Remember that a group's member was refused; returns whether that is news."""
        return not producer or _is_news(self._known(producer).refused, seq)

    def is_new_close(self, producer: str, number: int) -> bool:
        """Record the number of a producer's request to close a group; returns whether it is new."""
        return _is_news(self._known(producer).closes, number)

    def forget(self, given_ids: Iterable[str]) -> None:
        """What these ids were given to is dropped: it may be pushed again."""
        for given_id in given_ids:
            self._ids.pop(given_id, None)

    def _active(self, producer: str) -> _Numbers:
        """It is the last to be forgotten, if there are too many."""
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
        """Remember again what an earlier process remembered; ids oldest first."""
        for name, (floor, accepted) in producers.items():
            self._producers[name] = _Numbers(keys.get(name, ""), floor, Ranges(accepted))
        self._ids.update(given_ids)


def _is_news(numbers: Ranges, number: int) -> bool:
    """Whether it was not among these numbers; it is now, and those far below it are forgotten."""
    if number in numbers:
        return False
    numbers.add(number, number + 1)
    numbers.remove_below(number - MAX_NUMBERS)
    return True


#: Who is away longest is given up beyond so many; far above any fleet.
MAX_AWAY = 65_536


@dataclass(slots=True)
class _Producer:
    """away_since: None while it is there. contributed: whether a sample of it was accepted, or has
    waited for room.

    phase: the newest phase that it has ended, 0 for none. ended: its stream. incarnation: tells its
    process from others of its name; empty if it said none.
    """

    away_since: float | None = None
    contributed: bool = False
    phase: int = 0
    ended: bool = False
    incarnation: str = ""

    @property
    def owes_after(self) -> int | None:
        """Phases that end after this version wait for its word; None if none does."""
        return None if self.ended or not self.contributed else self.phase


#: Who is not known.
_NOBODY = _Producer()


class Producers:
    """Those who are there or may come back. timeout: seconds until who is away counts as gone."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[str, _Producer] = {}
        self._away: dict[str, None] = {}  # in order of leaving
        #: Who speaks without a connection, as over HTTP: it may be anybody, and binds nobody.
        self._nameless = _Producer()
        #: Whether anybody has contributed anything.
        self.begun = False

    @property
    def num_there(self) -> int:
        """How many are there now."""
        return len(self._known) - len(self._away)

    def __contains__(self, producer: object) -> bool:
        """Whether it is there or may come back."""
        return producer in self._known

    def is_away(self, producer: str) -> bool:
        """Whether it is not there now; of nobody in particular, as over HTTP, that is not known."""
        return producer != "" and (producer not in self._known or producer in self._away)

    # -- they come and go -------------------------------------------------------------------

    def connected(self, producer: str, incarnation: str = "") -> bool:
        """It is there; returns whether it is another incarnation than was there before."""
        known = self._known.get(producer)
        if known is None:
            known = self._known[producer] = _Producer()
        elif known.away_since is not None:
            known.away_since = None
            del self._away[producer]
        before, known.incarnation = known.incarnation, incarnation or known.incarnation
        return before not in ("", known.incarnation)

    def disconnected(self, producer: str, now: float, *, for_good: bool) -> list[str]:
        """A producer's connection is lost, `for_good` if it said goodbye; returns the producers
        that are gone.
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
        """Producers that contributed to an earlier process may come back; the ends that they
        announced stand.
        """
        self.begun = len(contributed) > 0
        for producer, (phase, ended) in words.items():
            if not producer:
                self._nameless.phase, self._nameless.ended = phase, ended
                continue
            self._known[producer] = _Producer(now, producer in contributed, phase, ended)
            self._away[producer] = None

    def expire(self, now: float) -> list[str]:
        """Give up who has been away for too long; returns who is gone."""
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

    # -- they speak -------------------------------------------------------------------------

    def contributed(self, producer: str) -> None:
        """Samples of it were accepted, or wait for room."""
        self.begun = True
        if not producer:
            return
        known = self._known.get(producer)
        if known is None:
            self.connected(producer)
            known = self._known[producer]
        known.contributed = True

    def ends(self, producer: str, end: int | None) -> None:
        """It will push nothing older than this policy version any more; None: nothing at all."""
        known = self._nameless
        if producer:
            self.connected(producer)
            known = self._known[producer]
        known.phase, known.ended = max(known.phase, end or 0), known.ended or end is None

    def ends_of(self, producer: str) -> tuple[int, bool]:
        """The newest phase that it has ended, 0 for none, and whether it has ended its stream."""
        known = self._known.get(producer, _NOBODY) if producer else self._nameless
        return known.phase, known.ended

    def phase(self, producer: str) -> int:
        """The newest phase that it has ended, which binds it; 0 for none."""
        return self._known.get(producer, _NOBODY).phase

    def has_ended(self, producer: str) -> bool:
        """Whether the producer has ended its stream, which is final."""
        return self._known.get(producer, _NOBODY).ended

    # -- who is waited for --------------------------------------------------------------------

    def is_waited_for(self, end: int | None) -> bool:
        """Whether there is anybody in `before`."""
        return any(True for _ in self.before(end))

    def before(self, end: int | None) -> Iterator[str]:
        """Who has contributed, and may still push what is older than this version.

        None: who has not said that it is done; before anybody has contributed, who is there. A
        worker with nothing to do does not end a run that others have not begun yet.
        """
        for producer, known in self._known.items():
            if end is None and not self.begun:
                waits = not known.ended
            else:
                after = known.owes_after
                waits = after is not None and (end is None or after < end)
            if waits:
                yield producer
