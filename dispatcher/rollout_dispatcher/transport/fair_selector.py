"""An event loop whose turns are short, and shared fairly, however many peers speak at once.

asyncio serves every socket that is ready before it looks at the clock again, in no order. When
hundreds of ranks answer a step in the same millisecond, or a few producers push as fast as they
can, that is one long turn, in which no plan, deadline, heartbeat or quiet peer gets its own.
"""

import asyncio
import selectors
from time import monotonic
from typing import Any

from rollout_dispatcher.transport.turns import Turns

_Ready = tuple[selectors.SelectorKey, int]


class FairSelector(selectors.DefaultSelector):
    """Reports the ready sockets that have their turn, in order; the others are ready later too."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[_Ready]:
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
