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
from collections import defaultdict
from collections.abc import Callable, Iterable

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
        self._places: defaultdict[int, float] = defaultdict(float)
        self._front = 0.0
        self._ends, self._anybody = math.inf, False
        self._looked = self._since = clock()
        self._put_off: dict[int, float] = {}
        #: Told when a turn has ended, and at what time: what was written in it leaves now.
        self.ended: list[Callable[[float], None]] = []

    def begin(self, asked: float) -> None:
        """A turn begins: it was found out who is ready, and asked for at this time."""
        for told in self.ended:
            told(asked)
        now = self.clock()
        # Who is ready at once may have been since it was looked last.
        self._since = now if now - asked > AWAITED_SECONDS else self._looked
        self._looked, self._ends, self._anybody = now, now + TURN_SECONDS, False

    def in_order(self, ready: Iterable[int]) -> list[int]:
        """Who is served in this turn, of those who are ready, first to last; at most `AT_ONCE`."""
        places = self._places
        line = sorted(ready, key=places.__getitem__)
        num_ready = len(line)
        for descriptor in line[AT_ONCE:]:
            self._put_off.setdefault(descriptor, self._since)
        del line[AT_ONCE:]
        self._front = front = max(self._front, places[line[0]])
        for descriptor in line:
            places[descriptor] = max(places[descriptor], front) + LEAST_SECONDS
        if len(places) > 2 * num_ready + AT_ONCE:
            behind = ((at, place) for at, place in places.items() if place > front)
            self._places = defaultdict(float, behind)
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
        self._places[descriptor] = max(self._places[descriptor], self._front) + seconds

    def forget(self, descriptor: int) -> None:
        """This one is not read from, or gone: whoever has its number next was not put off."""
        self._put_off.pop(descriptor, None)
