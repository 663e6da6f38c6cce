"""Whose TLS handshake is led next, when more clients come at once than can be served at once.

To answer a client's first words costs a signature: milliseconds, far more than all else that a
newcomer asks for. Who answers a crowd in order of arrival has everybody wait for everybody before
him, until the first have hung up and come again, and so on: each answer goes to somebody who has
just given up, and nobody ever gets in. So the newest is next. It has come a moment ago and waits
for the answer still; who is passed over hangs up, or makes room, and is the newest when it comes
again. ("Adaptive LIFO", Maurer, Fail at Scale, ACM Queue 2015.)

Invariant: at most `AT_ONCE` are being answered, so no turn of the event loop is longer than that.
"""

import asyncio

#: Answers between two looks at everybody else.
AT_ONCE = 4


class Handshakes:
    """The clients of one listener that have said their first words."""

    def __init__(self) -> None:
        self._free = AT_ONCE
        self._waiting: list[asyncio.Future[None]] = []  # the newest last

    async def begin(self) -> None:
        """Return when it is this one's turn, which somebody ends by `answered`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had just come
                self.answered()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def answered(self) -> None:
        """Somebody's turn is over: the answer is out, or there will be none."""
        while self._waiting:
            if not (newest := self._waiting.pop()).done():
                newest.set_result(None)
                return
        self._free += 1
