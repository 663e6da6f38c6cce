"""Turns of the event loop: who is served in the next one, in which order, and when it is over.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) of the event loop's seconds. What a peer
takes moves its place in line back by as much; who took nothing of late stands in front:

    peer     took         place     next turn
    flood a  3 ms         3         2nd
    flood b  4 ms         4         not any more, if the turn is over by then: then 1st
    quiet    0 ms         0         1st

So a peer that says little waits for what is being served and for nothing that others have in line.
Invariants: a turn is over after `TURN_SECONDS`, plus what its last peer takes; somebody is served
in each turn; a place is at most one service ahead of those who wait. Pure: the clock is given.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: A turn serves nobody else after so long: timers, plans and answers want theirs too.
TURN_SECONDS = 0.004
#: Sockets that are served in one turn: whoever does not say what it takes is bounded by number.
AT_ONCE = 64
#: What each service takes at least, which is all that is known of those who do not say.
LEAST_SECONDS = 20e-6
#: Who waited for longer than this, waited for something to happen.
AWAITED_SECONDS = 0.001


class Turns:
    """Shares of the event loop's time, by file descriptor. clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._places: dict[int, float] = {}
        self._front = 0.0
        self._ends, self._anybody = math.inf, False
        self._looked = self._since = clock()
        self._put_off: dict[int, float] = {}

    def begin(self, asked: float) -> None:
        """A turn begins: it was found out who is ready, and asked for at this time."""
        now = self.clock()
        # Who is ready at once may have been since it was looked last.
        self._since = now if now - asked > AWAITED_SECONDS else self._looked
        self._looked, self._ends, self._anybody = now, now + TURN_SECONDS, False

    def in_order(self, ready: Sequence[_T], descriptor: Callable[[_T], int]) -> list[_T]:
        """Who is served in this turn, first to last; at most `AT_ONCE`."""
        places, front = self._places, self._front
        line = sorted(ready, key=lambda one: places.get(descriptor(one), 0.0))
        for one in line[AT_ONCE:]:
            self._put_off.setdefault(descriptor(one), self._since)
        line = line[:AT_ONCE]
        self._front = front = max(front, places.get(descriptor(line[0]), front))
        for one in line:
            at = descriptor(one)
            places[at] = max(places.get(at, front), front) + LEAST_SECONDS
        if len(places) > 2 * len(ready) + AT_ONCE:
            self._places = {at: place for at, place in places.items() if place > front}
        return line

    def serve(self, descriptor: int) -> float | None:
        """Since when this one may have been ready; None: the turn is over, and it is put off."""
        now = self.clock()
        if now > self._ends and self._anybody:
            self._put_off.setdefault(descriptor, self._since)
            return None
        self._anybody = True
        return self._put_off.pop(descriptor, self._since)

    def took(self, descriptor: int, seconds: float) -> None:
        """What it took to serve this one."""
        front = self._front
        self._places[descriptor] = max(self._places.get(descriptor, front), front) + seconds
