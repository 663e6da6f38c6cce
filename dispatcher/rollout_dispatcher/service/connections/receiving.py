"""Bounds the memory of frames that are being received, and queues frames beyond the bound.

A frame's memory is allocated before its bytes arrive, so the whole frame counts from its admission
until its message was handed on; from then on the buffer or a blocked push owns the memory.

- At most `limit` bytes at a time; further frames wait in a queue, first come first served. A large
  frame is always admitted when no other is being received, so that one larger than the limit does
  not wait for ever.
- Small frames are counted and never wait: they are at most `SMALL_BYTES` per connection.
- No frame blocks the queue for long. While others wait, a frame that receives no byte within
  `patience` seconds is given up. Of those slower than `MIN_RATE` only the slowest are, as many as
  the first in the queue needs; the others get another `patience`, so that most frames still arrive
  over a link that is slow for all. While none waits, a frame may take any time.
- No small push waits behind many large ones at the journal. While more than `BEHIND_BYTES` of
  handed-on frames are not durable, no large frame is admitted, and those being received are paused:
  sixteen floods complete one after the other, and a small push waits only for bytes that the
  journal already has.

Pure: time is an argument, and receivers are admitted or given up through the caller's methods.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

#: Below this size, waiting takes longer than receiving.
SMALL_BYTES = 64 * 1024
#: Bytes per second that a frame has to reach on average over `patience` while others wait.
MIN_RATE = 2**20
#: Bytes waiting for the journal above which no large frame is admitted: what a good disk writes in
#: some ten milliseconds, and enough for efficient writes.
BEHIND_BYTES = 8 * 2**20


class Receiver(Protocol):
    """A receiver of consecutive frames."""

    @property
    def filled(self) -> int | None:
        """Bytes of its frame that have arrived; None if its pace does not count."""

    def let_in(self) -> None:
        """The waiting frame is counted, and may have memory."""

    def pause_reading(self) -> None:
        """Stop receiving until `resume_reading`."""

    def resume_reading(self) -> None:
        """Receive again."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Bytes of a frame that had arrived at a time."""

    at: float
    filled: int


class Receiving:
    """Frames that are being received, and the queue of those that wait.

    limit: bytes. patience: seconds. nbytes: memory of frames at present.
    """

    def __init__(self, limit: int, patience: float) -> None:
        self.limit, self.patience = limit, patience
        self.nbytes = self._large = self._behind = 0
        self._shares: dict[Receiver, int] = {}
        self._line: dict[Receiver, int] = {}
        self._marks: dict[Receiver, _Mark] = {}
        self._paused: list[Receiver] = []

    @property
    def waiting(self) -> Collection[Receiver]:
        """Receivers in the queue, in order, and paused ones."""
        return (*self._line, *self._paused)

    def claim(self, who: Receiver, nbytes: int) -> bool:
        """Count `nbytes` more bytes for `who`, unless it has to wait in the queue."""
        if nbytes >= SMALL_BYTES and self._is_behind:
            return False
        return self.claim_now(who, nbytes)

    def claim_now(self, who: Receiver, nbytes: int) -> bool:
        """The same for receivers that cannot wait: only if there is room that none waits for.

        The parts of a body that arrives in chunks count as one frame.
        """
        awaited = self._line and not self._is_behind
        is_large = self._shares.get(who, 0) + nbytes >= SMALL_BYTES
        if is_large and (awaited or not self._has_capacity(who, nbytes)):
            return False
        self._count(who, nbytes)
        return True

    def wait(self, who: Receiver, nbytes: int) -> None:
        """Queue `who`; it is admitted by `let_in`."""
        self._line[who] = nbytes

    def done(self, who: Receiver) -> None:
        """The frame of `who` was handed on, or will not complete; also while it is queued."""
        nbytes = self._shares.pop(who, 0)
        if nbytes:
            self.nbytes -= nbytes
            self._large -= nbytes >= SMALL_BYTES
        if self._marks:
            self._marks.pop(who, None)
        if self._line:
            self._line.pop(who, None)
            self._let_in()

    # -- the journal ------------------------------------------------------------------------

    def queued(self, who: Receiver) -> int:
        """The frame of `who` was handed on, and waits for the journal; returns its bytes."""
        nbytes = self._shares.get(who, 0)
        self._behind += nbytes
        if self._is_behind and not self._paused:
            others = self._shares.items() - {(who, nbytes)}
            self._paused = [other for other, share in others if share >= SMALL_BYTES]
            for other in self._paused:
                other.pause_reading()
        return nbytes

    def durable(self, nbytes: int) -> None:
        """`nbytes` of these bytes are durable."""
        self._behind -= nbytes
        if not self._is_behind:
            paused, self._paused = self._paused, []
            for who in paused:
                who.resume_reading()
            self._let_in()

    # -- slow frames ------------------------------------------------------------------------

    def too_slow(self, now: float, away: float = 0.0) -> list[Receiver]:
        """Receivers whose frames are to be given up for waiting ones; call it regularly.

        away: seconds since the last call in which this process was stopped, which do not count.
        """
        if not self._line:
            self._marks.clear()
            return []
        slow = sorted(self._overdue(now, away), key=lambda found: found[0])
        lacking = next(iter(self._line.values())) + self.nbytes - self.limit
        chosen: list[Receiver] = []
        for gained, who in slow:
            if gained > 0 >= lacking:
                break
            chosen.append(who)
            lacking -= self._shares[who]
        return chosen

    def _overdue(self, now: float, away: float) -> Iterator[tuple[int, Receiver]]:
        """Receivers too slow over their last `patience` seconds, with their bytes in that time."""
        for who in self._shares:
            filled, mark = who.filled, self._marks.get(who)
            if filled is None or mark is None:
                self._marks.pop(who, None)
                if filled is not None:
                    self._marks[who] = _Mark(now, filled)
                continue
            gained, at = filled - mark.filled, mark.at + away
            if now - at < self.patience:
                self._marks[who] = _Mark(at, mark.filled)
                continue
            self._marks[who] = _Mark(now, filled)
            if gained < self.patience * MIN_RATE:
                yield gained, who

    @property
    def _is_behind(self) -> bool:
        return self._behind > BEHIND_BYTES

    def _has_capacity(self, who: Receiver, nbytes: int) -> bool:
        if self.nbytes + nbytes <= self.limit:
            return True
        return self._large == (self._shares.get(who, 0) >= SMALL_BYTES)  # no other large one

    def _count(self, who: Receiver, nbytes: int) -> None:
        before = self._shares.get(who, 0)
        self._shares[who] = before + nbytes
        self.nbytes += nbytes
        self._large += before < SMALL_BYTES <= before + nbytes

    def _let_in(self) -> None:
        while self._line and not self._is_behind:
            who, nbytes = next(iter(self._line.items()))
            if not self._has_capacity(who, nbytes):
                return
            del self._line[who]
            self._count(who, nbytes)
            who.let_in()
