"""Frames being received: how much memory all of them may have, and who waits for some.

A frame has its memory before its bytes are there, so it is counted whole from when it is let in
until its message was handed on; from then on it is the buffer's, or a held push's.

- At most `limit` bytes at a time. A frame that finds no room waits in line, first come first
  served. A large frame is let in whatever its size when no other is being received, so that one
  larger than the limit does not wait for ever.
- Small frames are counted and never wait: all of them together are a `SMALL_BYTES` a connection.
- Nobody holds the line up for long. While others wait, a frame of which nothing comes within
  `patience` seconds is given up. Of those that came more slowly than `MIN_RATE` the slowest are, as
  many as the first in line needs; the others get another `patience`, so that where a link is slow
  for everybody most frames arrive all the same. While nobody waits, a frame may take its time.
- Nobody stands behind many others' bytes at the journal. While more than `BEHIND_BYTES` that were
  handed on are not durable, no large frame is let in, and those under way are not read from: of
  sixteen floods one after the other becomes whole, and a small push between them waits for what the
  journal has by then, not for all that they have sent.

Pure: time is an argument, and whoever is let in or given up is told by the caller's own methods.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

#: To wait with less than this takes longer than to receive it.
SMALL_BYTES = 64 * 1024
#: Bytes a second that a frame has to come at, on average over `patience`, while others wait.
MIN_RATE = 2**20
#: Bytes that may wait for the journal before no large frame comes to them: what a good disk writes
#: in some ten milliseconds, and enough for its writes to be long.
BEHIND_BYTES = 8 * 2**20


class Receiver(Protocol):
    """Whoever receives one frame after the other."""

    @property
    def filled(self) -> int | None:
        """Bytes of its frame that have arrived; None where its pace is no concern of ours."""

    def let_in(self) -> None:
        """The frame that waited is counted, and may have memory."""

    def pause_reading(self) -> None:
        """Receive nothing more of the frame until `resume_reading`."""

    def resume_reading(self) -> None:
        """Go on receiving."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """How much of a frame had arrived when."""

    at: float
    filled: int


class Receiving:
    """The frames that are being received, and the line of those that wait.

    limit: bytes. patience: seconds. nbytes: of memory that frames have at present.
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
        """Those in line, in order, and those whose frames are put off."""
        return (*self._line, *self._paused)

    def claim(self, who: Receiver, nbytes: int) -> bool:
        """Count so many bytes more for `who`, if it need not wait in line."""
        if nbytes >= SMALL_BYTES and self._is_behind:
            return False
        return self.claim_now(who, nbytes)

    def claim_now(self, who: Receiver, nbytes: int) -> bool:
        """The same for who cannot stand in line: if there is room and nobody waits for it.

        What comes in small parts, as a body in chunks may, is as large as all of them.
        """
        awaited = self._line and not self._is_behind
        is_large = self._shares.get(who, 0) + nbytes >= SMALL_BYTES
        if is_large and (awaited or not self._has_capacity(who, nbytes)):
            return False
        self._count(who, nbytes)
        return True

    def wait(self, who: Receiver, nbytes: int) -> None:
        """Stand in line; `who` is let in when its turn has come."""
        self._line[who] = nbytes

    def done(self, who: Receiver) -> None:
        """The frame of `who` was handed on, or will not come; likewise if it stood in line."""
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
        """So many of these bytes wait no more."""
        self._behind -= nbytes
        if not self._is_behind:
            paused, self._paused = self._paused, []
            for who in paused:
                who.resume_reading()
            self._let_in()

    # -- what comes too slowly --------------------------------------------------------------

    def too_slow(self, now: float, away: float = 0.0) -> list[Receiver]:
        """Whose frames are to be given up for those who wait; to be asked now and then.

        away: seconds since the last time in which this process was stopped, which count for none.
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
        """Frames that came too slowly over their last `patience`, with what came of them."""
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
