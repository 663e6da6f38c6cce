"""Remembers what was accepted, so that a push which is sent again is not stored again.

Two memories, both bounded:

- per producer, the accepted sequence numbers at or above its *floor*: the lowest number that it
  may still send again, which it states with every push. What is below can never come back, so the
  memory is as small as the producer's unanswered pushes, and admission bounds those. The least
  recently active producer is forgotten when there are more than `MAX_PRODUCERS`.
- the last `horizon` sample ids that users gave themselves, over all producers.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: A forgotten producer that comes back is treated as new; 64 ki is far above any fleet.
MAX_PRODUCERS = 65_536


@dataclass(slots=True)
class _Producer:
    floor: int = 0
    accepted: set[int] = field(default_factory=set)


class DuplicateMemory:
    """Answers whether a sample was accepted before."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._producers: OrderedDict[str, _Producer] = OrderedDict()

    def raise_floor(self, producer: str, floor: int) -> bool:
        """Forget what this producer will never send again; returns whether that was news."""
        known = self._producers.setdefault(producer, _Producer())
        self._producers.move_to_end(producer)
        while len(self._producers) > MAX_PRODUCERS:
            self._producers.popitem(last=False)
        if floor <= known.floor:
            return False
        known.floor = floor
        known.accepted = {seq for seq in known.accepted if seq >= floor}
        return True

    def seen(self, producer: str, seq: int, given_id: str | None) -> bool:
        """Whether this number of this producer, or this user-given id, was accepted before.

        A push without a producer (empty name) is never sent again under the same number.
        """
        if given_id is not None and given_id in self._ids:
            return True
        known = self._producers.get(producer) if producer else None
        return known is not None and (seq < known.floor or seq in known.accepted)

    def accept(self, producer: str, seq: int, given_id: str | None) -> None:
        """Remember an accepted sample."""
        if producer:
            self._producers.setdefault(producer, _Producer()).accepted.add(seq)
        if given_id is not None and self._horizon > 0:
            self._ids[given_id] = None
            if len(self._ids) > self._horizon:
                self._ids.popitem(last=False)

    def restore(
        self, producers: Mapping[str, tuple[int, frozenset[int]]], given_ids: Iterable[str]
    ) -> None:
        """Remember again what an earlier process remembered; ids oldest first."""
        for name, (floor, accepted) in producers.items():
            self._producers[name] = _Producer(floor, set(accepted))
        for given_id in given_ids:
            self._ids[given_id] = None
