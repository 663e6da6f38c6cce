"""How slowly a frame may come while nobody waits for its memory (receiving.py is for when they do).

A frame that has begun has to be whole within `patience` seconds, or at least `FLOOR_RATE` bytes a
second must have come of it meanwhile, and so on until it is whole; whatever it is a frame of.

A client that was stopped in the midst of a frame (a debugger, a suspended machine) is silent, and
silence has deadlines of its own: time in which nothing came counts for nothing here, as long as it
is less than `silence` seconds for one frame. Nor does time in which this process was stopped, or
did not read. Pure: time is an argument.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

#: Bytes a second that come of a frame at the least, on average over `patience`: a hundredth of what
#: a bad line carries. Whoever holds memory and place by dripping sends that much or is ended.
FLOOR_RATE = 4096
#: How often frames are looked at, in parts of `patience`.
LOOKS = 4


class Arriving(Protocol):
    """Whoever receives one frame after the other."""

    @property
    def arriving(self) -> tuple[int, int] | None:
        """The number of the frame that has begun, and bytes that have come of it.

        None where none has, or while it is we who do not read.
        """


_Who = TypeVar("_Who", bound=Arriving)


@dataclass(slots=True)
class _Mark:
    """A frame as it was when its time began: at, filled. seen: bytes at the last look.

    silent: seconds in which nothing came of it, so far.
    """

    frame: int
    at: float
    filled: int
    seen: int
    silent: float = 0.0


class Pace:
    """Looks at the frames that have begun, now and then."""

    def __init__(self, patience: float, silence: float) -> None:
        self.patience, self._silence = patience, silence
        self._marks: dict[Arriving, _Mark] = {}
        self._looked_at, self._away = 0.0, 0.0

    def too_slow(self, those: Iterable[_Who], now: float, away: float = 0.0) -> list[_Who]:
        """Whose frames come too slowly; to be asked often, and answered when it is time to look.

        those: all that there are. away: seconds since the last call in which this process was
        stopped.
        """
        self._away += away
        passed = now - self._looked_at - self._away
        if passed < self.patience / LOOKS:
            return []
        marks = self._marks
        self._marks = {}
        away, self._looked_at, self._away = self._away, now, 0.0
        return [who for who in those if self._is_slow(who, marks.get(who), now, away, passed)]

    def _is_slow(
        self, who: Arriving, mark: _Mark | None, now: float, away: float, passed: float
    ) -> bool:
        arriving = who.arriving
        if arriving is None:
            return False
        frame, filled = arriving
        if mark is None or mark.frame != frame:
            self._marks[who] = _Mark(frame, now, filled, filled)
            return False
        mark.at += away
        if filled == mark.seen and mark.silent + passed < self._silence:
            mark.silent += passed
            mark.at += passed
        mark.seen = filled
        self._marks[who] = mark
        if now - mark.at < self.patience:
            return False
        came, mark.at, mark.filled = filled - mark.filled, now, filled
        return came < FLOOR_RATE * self.patience
