"""Turns of the event loop: who is served in the next one, in which order, and when it is over.

asyncio serves every socket that is ready before it looks at the clock again, in no order. When
hundreds of ranks answer a step in the same millisecond, or a few producers push as fast as they
can, that is one long turn, in which no plan, deadline, heartbeat or quiet peer gets its own.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) of the event loop's seconds. What a peer
takes moves its place in line back by as much; who took nothing of late stands in front:

    peer     took         place     next turn
    flood a  3 ms         3         2nd
    flood b  4 ms         4         not any more, if the turn is over by then: then 1st
    quiet    0 ms         0         1st

So a peer that says little waits for what is being served and for nothing that others have in line.
Invariants: a turn is over after `TURN_SECONDS`, plus what its last peer takes; somebody is served
in each turn; a place is at most one service ahead of those who wait. `Turns` itself is pure: the
clock is given.
"""

import asyncio
import math
import selectors
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

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

    def begin(self, asked: float) -> None:
        """A turn begins: it was found out who is ready, and asked for at this time."""
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


class FairSelector(selectors.DefaultSelector):
    """Reports the ready sockets that have their turn, in order; the others are ready later too."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait as the base does."""
        asked = self._turns.clock()
        ready = super().select(timeout)
        self._turns.begin(asked)
        if len(ready) < 2:
            if ready:
                self._turns.in_order((ready[0][0].fd,))
            return ready
        found = {one[0].fd: one for one in ready}
        return [found[descriptor] for descriptor in self._turns.in_order(found)]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Watch this socket, or its descriptor, no more."""
        key = super().unregister(fileobj)
        self._turns.forget(key.fd)
        return key


class FairEventLoop(asyncio.SelectorEventLoop):
    """An event loop with short turns."""

    time = staticmethod(monotonic)  # as the base's does, which is asked several times a turn

    def __init__(self) -> None:
        self.turns = Turns(monotonic)
        super().__init__(FairSelector(self.turns))


def turns_of(loop: asyncio.AbstractEventLoop) -> Turns | None:
    """The turns of this event loop; None of any other than ours, where each is as long as it gets.

    Clients have such: there is nobody to share it with.
    """
    return loop.turns if isinstance(loop, FairEventLoop) else None
