"""Memory in pieces that bytes are received into, from its start to its end."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate


class Pieces:
    """Pieces of memory, one after the other.

    is_full: whether no byte is missing; asked several times a frame.
    """

    def __init__(self, pieces: Iterable[memoryview] = ()) -> None:
        self._pieces = list(filter(len, pieces))
        #: Where each piece ends, counted from the start of the first.
        self._ends = list(accumulate(map(len, self._pieces)))
        self._full = self._filled = 0  # pieces, and bytes
        self.is_full = not self._pieces

    @property
    def nbytes_filled(self) -> int:
        """Bytes that were written so far."""
        return self._filled

    def missing(self, count: int) -> list[memoryview]:
        """The memory that the next bytes belong into, in order: at most so many pieces."""
        found = self._pieces[self._full : self._full + count]
        if found:
            found[0] = found[0][self._filled - self._ends[self._full] :]
        return found

    def next(self, count: int, nbytes: int) -> tuple[list[memoryview], bool]:
        """The same, fewer pieces than that and at most so many bytes; and whether that is all."""
        end = self._filled + nbytes
        last = bisect_left(self._ends, end, lo=self._full)  # that has the last of these bytes
        found = self.missing(min(count - 1, last + 1 - self._full))
        behind = self._full + len(found)
        if behind > last and (beyond := self._ends[last] - end) > 0:
            found[-1] = found[-1][:-beyond]
            return found, False
        return found, behind == len(self._pieces)

    def filled(self, nbytes: int) -> int:
        """Note that so many more bytes were written; returns how many of them had no room here."""
        total = self._ends[-1] if self._ends else 0
        beyond = max(0, self._filled + nbytes - total)
        self._filled += nbytes - beyond
        self._full = bisect_right(self._ends, self._filled, lo=self._full)
        self.is_full = self._full == len(self._pieces)
        return beyond

    def copy(self, data: memoryview) -> int:
        """Take over as much as is missing; returns how many bytes that was."""
        copied = 0
        for piece in self.missing(len(self._pieces)):
            taken = min(len(piece), len(data) - copied)
            piece[:taken] = data[copied : copied + taken]
            copied += taken
            if copied == len(data):
                break
        self.filled(copied)
        return copied
