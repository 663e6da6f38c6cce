"""Short turns of the event loop, however many peers speak at once.

asyncio serves every socket that is ready before it looks at the clock again. When hundreds of ranks
answer a step in the same millisecond that is one long turn, in which no plan, deadline, heartbeat
or HTTP request gets its own.
"""

import asyncio
import selectors
from bisect import bisect_right

#: Sockets that are served in one turn: a few milliseconds.
AT_ONCE = 64

_Ready = tuple[selectors.SelectorKey, int]


class FairSelector(selectors.DefaultSelector):
    """Reports at most `AT_ONCE` of the ready sockets, in turn; the others are still ready later."""

    _last = -1

    def select(self, timeout: float | None = None) -> list[_Ready]:
        """Wait as the base does; by ascending descriptor, from where the last call left off."""
        ready = super().select(timeout)
        if len(ready) <= AT_ONCE:
            return ready
        ready.sort(key=_descriptor)
        start = bisect_right(ready, self._last, key=_descriptor)
        served = (ready[start:] + ready[:start])[:AT_ONCE]
        self._last = _descriptor(served[-1])
        return served


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop with short turns."""
    return asyncio.SelectorEventLoop(FairSelector())


def _descriptor(ready: _Ready) -> int:
    return ready[0].fd
