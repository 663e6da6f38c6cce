"""Things by a number that may change, of which the lowest is asked for: O(log n) for each change.

A heap whose entries are left behind when a number changes, and are passed by when they come up.
Invariant: there are never many more of these than of things.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: Entries that may be left behind before it pays to clear them away.
SPARE = 64


class Lowest(Generic[T]):
    """Numbers of things, which stay in memory for a while after `remove`: names, not samples."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._heap: list[tuple[int, int, T]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, thing: object) -> bool:
        return thing in self._numbers

    def set(self, thing: T, number: int) -> None:
        """It has this number from now on."""
        if self._numbers.get(thing) == number:
            return
        self._numbers[thing] = number
        self._pushed += 1
        heappush(self._heap, (number, self._pushed, thing))
        if len(self._heap) > 2 * len(self._numbers) + SPARE:
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[2]) == entry[0]]
            heapify(self._heap)

    def remove(self, thing: T) -> None:
        """It is not asked for any more, if it was."""
        self._numbers.pop(thing, None)

    @property
    def lowest(self) -> int | None:
        """The lowest number; None if there is nothing."""
        heap, numbers = self._heap, self._numbers
        while heap and numbers.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_below(self, number: int) -> list[T]:
        """Remove what has a lower number than this, and return it, lowest first."""
        found = []
        while (lowest := self.lowest) is not None and lowest < number:
            thing = heappop(self._heap)[2]
            del self._numbers[thing]
            found.append(thing)
        return found
