"""Control messages of a producer: each waits for the pushes it is about, and for its Pong.

The dispatcher handles messages in order, so a Pong confirms all that was said before its Ping; the
pings of a connection are counted for that, those of heartbeats too.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m

#: What a producer says beside its pushes.
Control = m.CloseGroup | m.EndPhase | m.EndStream


@dataclass(slots=True)
class _Pending:
    """A message that waits for the pushes before it; `ping` is the Ping that confirms it."""

    message: Control
    after: frozenset[int]
    ping: int | None = None


class Controls:
    """Control messages that are not confirmed, by handles, which are negative."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._handles = count(-1, -1)
        self._pings = self._pongs = 0

    def add(self, message: Control, after: frozenset[int]) -> int:
        """Queue a message behind these pushes; return its handle."""
        handle = next(self._handles)
        if isinstance(message, m.CloseGroup):
            message = message.model_copy(update={"number": -handle})
        self._pending[handle] = _Pending(message, after)
        return handle

    def forget(self, handle: int) -> None:
        """Nobody waits for this one any more; it is not sent unless it already was."""
        self._pending.pop(handle, None)

    def lost(self) -> None:
        """Everything unconfirmed has to be said again on the next connection."""
        self._pings = self._pongs = 0
        for control in self._pending.values():
            control.ping = None

    def take(self, outstanding: Collection[int]) -> Iterator[m.Message]:
        """What waits for none of the outstanding pushes, each with its Ping."""
        for control in list(self._pending.values()):
            if control.ping is None and control.after.isdisjoint(outstanding):
                yield control.message
                control.ping = self._pings
                yield self.ping()

    def ping(self) -> m.Ping:
        """A Ping to send at once."""
        self._pings += 1
        return m.Ping()

    def ponged(self) -> list[int]:
        """A Pong came; returns the handles of what it confirms. Raises ProtocolError."""
        number = self._pongs
        if number >= self._pings:
            raise ProtocolError("a Pong without a Ping")
        self._pongs += 1
        done = [handle for handle, item in self._pending.items() if item.ping == number]
        for handle in done:
            del self._pending[handle]
        return done
