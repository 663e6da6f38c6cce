"""Connections that have not introduced themselves: bounded by themselves, and the oldest make room.

A connection is pending from the moment it is accepted (TLS handshake included) until the plane
knows whom it has before it, or it is over. At the bound accepting pauses, so that what comes next
waits with the kernel, and the oldest strangers make room as soon as they have had their time.
How long that is follows from the bound: places become free at a pace that empties the backlog of a
listening socket within a second. So whoever comes while strangers hold every place, and come
again as fast as they can, is accepted soon, and then has that time to introduce itself.

Invariant: at most `limit` connections are pending at a time over all listeners of a plane, and
none is ended to make room unless somebody may be waiting for it.
"""

import asyncio
from collections.abc import Callable

from rollout_dispatcher.transport.sockets import BACKLOG

#: What a connection that made room is counted as.
MADE_ROOM = "made-room"
#: Within how many seconds a backlog that strangers have filled is through.
BACKLOG_SECONDS = 0.75


class Pending:
    """The pending connections of one plane, in order of arrival.

    limit: how many at a time. clock: in seconds, monotonic.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit, self._clock = limit, clock
        #: Seconds for which nobody has to make room.
        self.grace = BACKLOG_SECONDS * limit / BACKLOG
        self._places: dict[Place, None] = {}
        self._leaving: set[Place] = set()
        self._waiting: set[Callable[[], None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Connections that are pending."""
        return len(self._places)

    @property
    def limit(self) -> int:
        """How many may be."""
        return self._limit

    def is_full(self) -> bool:
        """Whether none may be accepted."""
        return len(self._places) >= self._limit

    def enter(self, end: Callable[[], None]) -> "Place":
        """A connection is pending. end: ends it; its place is left when it is over."""
        place = Place(self, end, self._clock())
        self._places[place] = None
        return place

    def when_free(self, call: Callable[[], None]) -> None:
        """Somebody waits: have this called once, in a turn of its own, when there is a place.

        If need be room is made.
        """
        self._waiting.add(call)
        self._free_or_make_room()

    def forget(self, call: Callable[[], None]) -> None:
        """Nobody waits for this call any more."""
        self._waiting.discard(call)

    def leave(self, place: "Place") -> None:
        """Its connection is pending no more; a second time does nothing."""
        if place in self._places:
            del self._places[place]
            self._leaving.discard(place)
            self._free_or_make_room()

    def renew(self, place: "Place") -> None:
        """Its time begins anew; it is the newest now."""
        if place in self._places and place not in self._leaving:
            del self._places[place]
            self._places[place] = None
            place.since = self._clock()

    def _free_or_make_room(self) -> None:
        """Tell those who wait that there is a place, or see to it that there will be one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if not self.is_full():
            for call in self._waiting:
                loop.call_soon(call)
            self._waiting.clear()
            return
        oldest = next((place for place in self._places if place not in self._leaving), None)
        if oldest is None:
            return  # all are about to leave
        due = oldest.since + self.grace - self._clock()
        if due > 0:
            self._timer = loop.call_later(due, self._free_or_make_room)
        else:
            self._leaving.add(oldest)
            oldest.end()


class Place:
    """The place of one pending connection; since: when it came, or its time began anew."""

    __slots__ = ("_of", "end", "since")

    def __init__(self, of: Pending, end: Callable[[], None], since: float) -> None:
        self._of, self.end, self.since = of, end, since

    def leave(self) -> None:
        """The connection has introduced itself, or is over."""
        self._of.leave(self)

    def renew(self) -> None:
        """It has had to wait for us, and has its time from now on; at most once a connection.

        A stranger who could ask for it again and again would never make room.
        """
        self._of.renew(self)
