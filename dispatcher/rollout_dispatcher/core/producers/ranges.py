"""A set of integers that lie close together: disjoint ranges, in order, none touching the next.

Numbers that are given out one after the other and come back nearly in order make one range or a
few, however many they are, and cost what the ranges cost.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


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
