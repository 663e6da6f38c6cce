"""Sweeps: what a producer has put and never pushed, found once nobody can push it any more.

    live --connection lost--> away --a goodbye, a successor, long silence, the end--> ended
      ^                        |                                                        |
      +------ connects --------+                   forgotten <--swept in every store----+

A producer puts an object before it pushes the references into it, so one that dies between the two
leaves what nobody knows of. Each of its processes is an *incarnation*, whose name its keys begin
with: once that has ended, what is there of it and not known is needed by nobody.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

#: A producer that was away for so long does not come back. Nothing is lost by waiting but room in
#: a store; one that comes back later would push what is gone.
AWAY_S = 3600.0
#: Incarnations that are known, far above any fleet; beyond it the oldest that is not connected is
#: forgotten.
MAX_INCARNATIONS = 65_536
#: Behind a producer's incarnation in each of its keys; before that, the producer's name and a dot.
SEPARATOR = "/"


@dataclass(slots=True, eq=False)
class Incarnation:
    """left: once it has ended, stores that are not swept, and whether a worker is asked to."""

    name: str
    producer: str
    ended: bool = False
    left: dict[str, bool] = field(default_factory=dict)


class Sweeps:
    """Incarnations by name, and the stores in which each may have put something."""

    def __init__(self, stores: Collection[str]) -> None:
        self._stores = sorted(stores)
        self._known: dict[str, Incarnation] = {}
        self._current: dict[str, str] = {}  # by producer
        self._away: dict[str, float] = {}  # since when, in that order
        self._ended: dict[str, Incarnation] = {}
        self._put_off: dict[tuple[Incarnation, str], None] = {}

    def __len__(self) -> int:
        """How many have ended and can be swept."""
        return len(self._ended) - len({ended for ended, _ in self._put_off})

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
        self._put_off = {each: None for each in self._put_off if each[0] is not known}
        self._known[name] = Incarnation(name, producer)  # what it was asked before is of another
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
        self._put_off = {each: None for each in self._put_off if each[0] is not known}
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

    def take(self, store: str) -> Incarnation:
        """The first that is to be swept in this store, one of `stores`: a worker is asked to."""
        ended = next(one for one in self._ended.values() if one.left.get(store) is False)
        ended.left[store] = True
        return ended

    def is_wanted(self, ended: Incarnation) -> bool:
        """Whether it is to be swept still: it has not come back meanwhile."""
        return self._ended.get(ended.name) is ended

    def put_back(self, ended: Incarnation, store: str) -> None:
        """It is to be swept in this store again, after the others."""
        if self.is_wanted(ended):
            ended.left[store] = False
            self._ended[ended.name] = self._ended.pop(ended.name)

    def put_off(self, ended: Incarnation, store: str) -> None:
        """What is needed of it in this store hides the rest, until some of that is not any more."""
        self._put_off[ended, store] = None

    def resume(self) -> None:
        """Something is needed no more."""
        put_off, self._put_off = self._put_off, {}
        for ended, store in put_off:
            self.put_back(ended, store)

    def swept(self, ended: Incarnation, store: str) -> bool:
        """All of it in this store is known; returns whether it is forgotten, as that was all."""
        ended.left.pop(store, None)
        if ended.left:
            return False
        del self._known[ended.name], self._ended[ended.name]
        return True
