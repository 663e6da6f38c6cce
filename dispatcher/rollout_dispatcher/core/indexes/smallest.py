"""Things by size, of which those that are small enough are asked for, without the others."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Smallest(Generic[T]):
    """Things in ascending order; serial: tells each from others of its size."""

    def __init__(self) -> None:
        self._line: list[tuple[int, int, T]] = []

    def move(self, thing: T, serial: int, before: int | None, size: int | None) -> None:
        """It has another size than before; None: it is not here."""
        if size == before:
            return
        if before is not None:
            del self._line[bisect_left(self._line, (before, serial))]
        if size is not None:
            insort(self._line, (size, serial, thing))

    @property
    def largest(self) -> int | None:
        """The largest size; None if nothing is here."""
        return self._line[-1][0] if self._line else None

    def fitting(self, fits: Callable[[int], bool]) -> Iterator[T]:
        """Those that fit; if a size does not, no larger one does."""
        count = bisect_left(self._line, True, key=lambda entry: not fits(entry[0]))
        return (thing for _, _, thing in self._line[:count])
