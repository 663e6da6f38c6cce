"""A budget of work: what a split may spend to wait less, counted in operations, not by a clock.

Invariant: a plan depends on nothing but its arguments, so the same ways are tried on a fast machine
and on a slow one. An operation is about a nanosecond of one core; how many a method takes was
fitted to its time (`tuning.py`).
"""

from dataclasses import dataclass

#: Operations a second.
_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class Price:
    """Operations of a method: once, for each sample, for each rank, and for each sample and
    micro-batch of a rank, where samples look for room in one after the other.
    """

    once: float
    sample: float
    rank: float = 0.0
    look: float = 0.0

    def of(self, n: int, R: int, M: int) -> float:
        """For n samples over R ranks in M micro-batches each."""
        return self.once + self.sample * n + self.rank * R + self.look * n * M


class Work:
    """Operations that are left."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds * _PER_SECOND

    def affords(self, operations: float, leaving: float = 0.0) -> bool:
        """Whether so many are left, and some besides; if they are, they are spent."""
        if operations + leaving > self.left:
            return False
        self.left -= operations
        return True
