"""The connections of the HTTP plane: who is pending, who has a place, and who makes room.

    connected --a request that is let in--> busy --answered--> resting --the next--> busy
    (pending)                                                     |
        +--- too long, or others need it ---> ended <--- others need its place

A connection is pending until a request of it is let in, and bounded by `Pending` like strangers on
the sample plane. One that has a place and rests makes room when all places are taken, the longest
resting first, so a probe is answered whoever holds the places. Invariant: no request that is under
way is ended for another's sake.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from rollout_dispatcher.transport.listener import MADE_ROOM, Pending, Place


@dataclass(slots=True)
class _Newcomer:
    """A connection that is pending, and the end of its patience."""

    place: Place
    deadline: asyncio.TimerHandle

    def leave(self) -> None:
        self.place.leave()
        self.deadline.cancel()


class HttpPlaces:
    """The places of one HTTP plane.

    limit: connections beside those that are pending. timeout: seconds until the first request is
    there. count: told why a connection was ended.
    """

    def __init__(
        self, limit: int, pending: Pending, timeout: float, count: Callable[[str], None]
    ) -> None:
        self.limit, self.pending = limit, pending
        self._timeout, self._count = timeout, count
        self._newcomers: dict[web.RequestHandler, _Newcomer] = {}
        self._placed: set[web.RequestHandler] = set()
        self._resting: dict[web.RequestHandler, None] = {}  # the longest first
        self._waiting: dict[web.RequestHandler, asyncio.Task[object]] = {}

    def watched(self, handler: web.RequestHandler) -> asyncio.BaseProtocol:
        """The protocol of a new connection, whose requests `handler` serves."""
        return _Watched(handler, self)

    def begins(self, handler: web.RequestHandler) -> bool:
        """A request of this connection may be served: returns whether there is a place for it."""
        self._resting.pop(handler, None)
        newcomer = self._newcomers.get(handler)
        if newcomer is None:
            return True
        if len(self._placed) >= self.limit and not self._end_longest_resting():
            self._count("connection-limit")
            return False
        del self._newcomers[handler]
        newcomer.leave()
        self._placed.add(handler)
        return True

    def ends(self, handler: web.RequestHandler) -> None:
        """Its request is answered."""
        if handler in self._placed:
            self._resting[handler] = None

    def close(self) -> None:
        """Forget the deadlines."""
        for newcomer in self._newcomers.values():
            newcomer.leave()
        self._newcomers.clear()

    def connected(self, handler: web.RequestHandler) -> None:
        """A connection is made, and pending."""

        def end(reason: str) -> None:
            self._count(reason)
            if handler.transport is not None:
                handler.transport.abort()

        deadline = asyncio.get_running_loop().call_later(self._timeout, end, "handshake-timeout")
        place = self.pending.enter(lambda: end(MADE_ROOM))
        self._newcomers[handler] = _Newcomer(place, deadline)

    def lost(self, handler: web.RequestHandler) -> None:
        """A connection is over."""
        self._placed.discard(handler)
        self._resting.pop(handler, None)
        if (newcomer := self._newcomers.pop(handler, None)) is not None:
            newcomer.leave()
        if (waiting := self._waiting.get(handler)) is not None:
            waiting.cancel()

    @contextmanager
    def cancelled_when_lost(self, handler: web.RequestHandler) -> Iterator[None]:
        """Cancel the task that runs this block when the connection is over: nobody waits for it."""
        task = asyncio.current_task()
        assert task is not None, "requests are served by tasks"
        self._waiting[handler] = task
        try:
            yield
        finally:
            del self._waiting[handler]

    def _end_longest_resting(self) -> bool:
        """Make room, if there is anybody who rests."""
        longest = next(iter(self._resting), None)
        if longest is None:
            return False
        self._count(MADE_ROOM)
        self._placed.discard(longest)
        del self._resting[longest]
        longest.force_close()
        return True


class _Watched(asyncio.Protocol):
    """Hands everything on to aiohttp, and tells when a connection is made and lost."""

    def __init__(self, handler: web.RequestHandler, places: HttpPlaces) -> None:
        self._handler, self._places = handler, places
        self.data_received = handler.data_received  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handler.connection_made(transport)
        self._places.connected(self._handler)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.lost(self._handler)
        self._handler.connection_lost(exc)
