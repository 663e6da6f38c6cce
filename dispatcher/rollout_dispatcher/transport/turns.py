"""Fair scheduling of sockets in the event loop, in turns of bounded length.

asyncio serves all ready sockets, in no order, before it reads the clock again. When hundreds of
ranks answer a step in the same millisecond, or a few producers push as fast as they can, that is
one long turn without plans, deadlines, heartbeats or quiet peers.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) of the event loop's seconds: the time that a
peer takes moves its place back by as much, and idle peers are in front:

    peer     took         place     next turn
    flood a  3 ms         3         2nd
    flood b  4 ms         4         not served if the turn is over by then: then 1st
    quiet    0 ms         0         1st

So a quiet peer waits for the service in progress only, not for queued peers. Invariants: a turn is
over after `TURN_SECONDS` plus the service of its last peer; each turn serves a peer; a place is at
most one service ahead of those that wait. `Turns` is pure: the clock is an argument.
"""

import asyncio
import math
import selectors
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

#: Seconds after which a turn serves no further peer: timers, plans and answers follow.
TURN_SECONDS = 0.004
#: Sockets served in one turn, a bound for those whose service is not measured.
AT_ONCE = 64
#: Seconds charged for each service at least, and for one that is not measured.
LEAST_SECONDS = 20e-6
#: A select that took longer than this has waited for an event.
AWAITED_SECONDS = 0.001


class Turns:
    """Shares of the event loop's time, by file descriptor. clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._places: defaultdict[int, float] = defaultdict(float)
        self._front = 0.0
        self._ends, self._anybody = math.inf, False
        self._selected = self._since = clock()
        self._put_off: dict[int, float] = {}

    def begin(self, asked: float) -> None:
        """A turn begins, after a select that was called at `asked`."""
        now = self.clock()
        # A socket that is ready at once may have been so since the last select.
        self._since = now if now - asked > AWAITED_SECONDS else self._selected
        self._selected, self._ends, self._anybody = now, now + TURN_SECONDS, False

    def in_order(self, ready: Iterable[int]) -> list[int]:
        """The ready descriptors to serve in this turn, in order; at most `AT_ONCE`."""
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
        """Time since which a descriptor may have been ready; None: the turn is over, it waits."""
        now = self.clock()
        if now > self._ends and self._anybody:
            self._put_off.setdefault(descriptor, self._since)
            return None
        self._anybody = True
        return self._put_off.pop(descriptor, self._since)

    def took(self, descriptor: int, seconds: float) -> None:
        """Charge a descriptor for its service."""
        self._places[descriptor] = max(self._places[descriptor], self._front) + seconds

    def forget(self, descriptor: int) -> None:
        """Forget that a descriptor waits: it is not read now, and its number may be reused."""
        self._put_off.pop(descriptor, None)


class FairSelector(selectors.DefaultSelector):
    """Reports the ready sockets of this turn, in order; the others stay ready."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait as the base class does."""
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
        """Stop watching this socket or descriptor."""
        key = super().unregister(fileobj)
        self._turns.forget(key.fd)
        return key


class FairEventLoop(asyncio.SelectorEventLoop):
    """An event loop with short turns."""

    time = staticmethod(monotonic)  # as in the base class, where each call costs more

    def __init__(self) -> None:
        self.turns = Turns(monotonic)
        super().__init__(FairSelector(self.turns))


def turns_of(loop: asyncio.AbstractEventLoop) -> Turns | None:
    """The turns of a `FairEventLoop`; None for other event loops, as in clients."""
    return loop.turns if isinstance(loop, FairEventLoop) else None
