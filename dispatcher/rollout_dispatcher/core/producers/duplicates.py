"""Remembers what was accepted, so that a push which is sent again is not stored again.

And the digest of each producer's key, for as long as the rest: who raised the floor of another
would have its samples taken for duplicates.

Two memories, both bounded:

- per producer, the accepted sequence numbers at or above its *floor*: the lowest number that it
  may still send again, which it states with every push. What is below can never come back, so the
  memory is as small as the producer's unanswered pushes, and admission bounds those. The least
  recently active producer is forgotten when there are more than `MAX_PRODUCERS`.
- the last `horizon` sample ids that users gave themselves, over all producers, with the checksum of
  each sample's content: 192 bytes an id of 24 letters.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest

from rollout_dispatcher.core.producers.ranges import Ranges

#: A forgotten producer that comes back is treated as new; 64 ki is far above any fleet.
MAX_PRODUCERS = 65_536
#: How far below the newest of a producer's numbers it is remembered what it has withdrawn, and
#: closed; dozens of the largest pushes.
MAX_NUMBERS = 2**20


@dataclass(slots=True)
class _Producer:
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
        self._producers: OrderedDict[str, _Producer] = OrderedDict()

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

    def hears_close(self, producer: str, number: int) -> bool:
        """A producer closes a group; returns whether that is news, and not said again."""
        return _is_news(self._known(producer).closes, number)

    def forget(self, given_ids: Iterable[str]) -> None:
        """What these ids were given to is dropped: it may be pushed again."""
        for given_id in given_ids:
            self._ids.pop(given_id, None)

    def _active(self, producer: str) -> _Producer:
        """It is the last to be forgotten, if there are too many."""
        known = self._known(producer)
        self._producers.move_to_end(producer)
        while len(self._producers) > MAX_PRODUCERS:
            self._producers.popitem(last=False)
        return known

    def _known(self, producer: str) -> _Producer:
        found = self._producers.get(producer)
        if found is None:
            found = self._producers[producer] = _Producer()
        return found

    def restore(
        self,
        producers: Mapping[str, tuple[int, frozenset[int]]],
        given_ids: Iterable[tuple[str, int | None]],
        keys: Mapping[str, str],
    ) -> None:
        """Remember again what an earlier process remembered; ids oldest first."""
        for name, (floor, accepted) in producers.items():
            self._producers[name] = _Producer(keys.get(name, ""), floor, Ranges(accepted))
        self._ids.update(given_ids)


def _is_news(numbers: Ranges, number: int) -> bool:
    """Whether it was not among these numbers; it is now, and those far below it are forgotten."""
    if number in numbers:
        return False
    numbers.add(number, number + 1)
    numbers.remove_below(number - MAX_NUMBERS)
    return True
