"""Long work on the event loop, a piece at a time, so that nobody else waits for more than a piece.

A request body is decompressed, read as JSON and admitted by generators that yield after each piece,
in a millisecond or so. In threads it would take as long, as all of it holds the interpreter's lock,
and the loop would get that lock back only every 5 ms.

Of large bodies one is worked on at a time, in order of arrival, so that however many wait there is
one piece a turn of the loop, and memory for what is read of one. Small ones have a line of their
own.
"""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from rollout_dispatcher.errors import TooManyBodies

#: Bytes of text that are read, or written by decompression, at once; takes under a millisecond.
PIECE: Final = 32 * 1024

T = TypeVar("T")
Work = Generator[None, None, T]


async def in_pieces(work: Work[T]) -> T:
    """What comes of the work, which lets others in after each piece."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


class Turns:
    """Who may work on a body: one large and one small at a time. limit: bodies that may wait."""

    def __init__(self, limit: int) -> None:
        self._limit, self._waiting = limit, 0
        self._small, self._large = asyncio.Lock(), asyncio.Lock()

    @asynccontextmanager
    async def turn(self, *, small: bool) -> AsyncIterator[None]:
        """Wait for a turn, and have it. Raises TooManyBodies if as many wait as may."""
        line = self._small if small else self._large
        if line.locked() and self._waiting >= self._limit:
            raise TooManyBodies(self._limit)
        self._waiting += 1
        try:
            await line.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            line.release()
