"""A line in which nobody stands behind more than a turn of each other's, whatever they bring.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): what somebody adds starts where his own last
ends, but not before what is being taken now, and what starts first is first.

    a adds 4, 4, 4 units; they start at 0, 4, 8
    the first of a is taken; now b adds 1 unit, which starts at 0: before the second of a
    b adds 4 units more, which start at 1: before the second of a, too

Who decides when something is taken is not the line's affair: whoever takes all that there is, as
admission does while no step can be planned, does so in any order.

Invariant: of one owner, first come is first served.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: Owners without anything in line that are remembered before those are forgotten who owe nothing.
REMEMBERED = 64


class Line(Generic[T]):
    """What waits, with its owner and how much it is."""

    def __init__(self) -> None:
        self._line: list[tuple[int, int, T]] = []
        self._places: dict[T, tuple[int, int]] = {}
        #: Where the next of an owner starts, if that is behind `_now`.
        self._ends: dict[str, int] = {}
        self._now = self._added = 0

    def __iter__(self) -> Iterator[T]:
        """From the first to the last."""
        return (item for _, _, item in self._line)

    def first(self) -> T:
        """Whose turn it is; there has to be one."""
        return self._line[0][2]

    def in_order(self, items: Iterable[T]) -> list[T]:
        """These, as they stand in line."""
        return sorted(items, key=self._places.__getitem__)

    def add(self, item: T, owner: str, units: int) -> None:
        """It waits from now on."""
        start = max(self._now, self._ends.get(owner, 0))
        self._ends[owner] = start + units
        self._added += 1
        self._places[item] = (start, self._added)
        insort(self._line, (start, self._added, item))

    def give_up(self, item: T, owner: str, units: int) -> None:
        """It waits no more and was not taken: its owner, who may come again with it, owes none."""
        self.remove(item)
        if owner in self._ends:
            self._ends[owner] -= units

    def remove(self, item: T) -> None:
        """It was taken, and waits no more."""
        place = self._places.pop(item)
        at = bisect_left(self._line, place, key=_place)
        del self._line[at]
        if at == 0:
            self._now = place[0]
        if not self._line:  # everybody starts anew
            self._ends.clear()
            self._now = 0
        elif len(self._ends) > 2 * len(self._line) + REMEMBERED:
            self._ends = {owner: end for owner, end in self._ends.items() if end > self._now}


def _place(entry: tuple[int, int, T]) -> tuple[int, int]:
    return entry[:2]
