"""Listeners accept connections, which are pending until the plane knows whom it has before it.

A connection is pending from the moment it is accepted (TLS handshake included) until the plane
knows whom it has before it, or it is over. At the bound accepting pauses, so that what comes next
waits with the kernel, and the oldest strangers make room as soon as they have had their time.
How long that is follows from the bound: places become free at a pace that empties the backlog of a
listening socket within a second. So whoever comes while strangers hold every place, and come
again as fast as they can, is accepted soon, and then has that time to introduce itself. For want
of file descriptors or memory nothing is accepted either.

Invariants: at most `limit` connections are pending at a time over all listeners of a plane, and
none is ended to make room unless somebody may be waiting for it; a listener that accepts no more
has been closed, or has told its handler so.
"""

import asyncio
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial

from rollout_dispatcher.errors import ListenerFailed
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport

log = logging.getLogger(__name__)

#: Connections that the kernel has made and we have not accepted, per socket; it may allow fewer.
BACKLOG = 1024
#: What a connection that made room is counted as.
MADE_ROOM = "made-room"
#: Within how many seconds a backlog that strangers have filled is through.
BACKLOG_SECONDS = 0.75
#: Connections to accept in one turn of the event loop.
ACCEPT_AT_ONCE = 64
#: When accepting fails, mostly for want of file descriptors, some may be free after this long.
ACCEPT_RETRY_SECONDS = 1.0
#: How often to say that accepting fails, with how often it has.
SAY_SECONDS = 60.0
#: What accept(2) fails with for a socket that will never accept again.
_NOT_LISTENING = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})


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
    """The place of one pending connection; since: when it came."""

    __slots__ = ("_of", "end", "since")

    def __init__(self, of: Pending, end: Callable[[], None], since: float) -> None:
        self._of, self.end, self.since = of, end, since

    def leave(self) -> None:
        """The connection has introduced itself, or is over."""
        self._of.leave(self)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """How to serve TLS.

    context: of the next connection, as certificates are renewed. secured: called with a stream
    protocol whose session is there, and the certificate that its client has shown, if any.
    to_plain: what a client reads that does not speak TLS.
    """

    context: Callable[[], ssl.SSLContext]
    secured: Callable[[StreamProtocol, object], None]
    to_plain: bytes


@dataclass(frozen=True, slots=True)
class ConnectionHandler:
    """What a plane does about the connections of its listeners.

    protocol: makes the protocol of one that is accepted; a `StreamProtocol` is driven by our own
    transports, any other by asyncio's. From when it is connected it has its place in `pending`
    itself; before that the listener has one for it. refused: counts one that never came to have a
    protocol, by reason. died: is told once that nobody can connect any more. handshake_timeout:
    seconds, for what has to happen before there is a protocol.
    """

    protocol: Callable[[], asyncio.BaseProtocol]
    pending: Pending
    refused: Callable[[str], None]
    died: Callable[[ListenerFailed], None]
    handshake_timeout: float
    tls: ServerTls | None = None


class Listener:
    """Accepts on a bound socket, which stays the caller's, until it is closed or dies.

    endpoint: where. A connection without TLS has its protocol as soon as it is accepted.
    """

    def __init__(self, sock: socket.socket, endpoint: Endpoint, handler: ConnectionHandler) -> None:
        sock.setblocking(False)
        self.endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._sock, self._handler = sock, handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._failures, self._logged_at = 0, -math.inf
        self._loop.add_reader(sock, self._accept)

    @property
    def num_pending(self) -> int:
        """Connections that have no protocol yet."""
        return len(self._tasks)

    def close(self) -> None:
        """Accept no more, and end what is pending; connections with a protocol live on."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._handler.pending.forget(self._accept_again)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Return once nothing is pending any more."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _adopt(self, sock: socket.socket) -> None:
        """Take over an accepted socket, which does not block."""
        protocol = self._handler.protocol()
        if isinstance(protocol, StreamProtocol):
            StreamTransport(self._loop, sock, protocol)
            return
        self._start(self._hand_over(sock, protocol))

    async def _hand_over(self, sock: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock)
        except OSError as error:
            self._ended_at_once(error)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Have a task do what an accepted connection still needs; it is pending until then."""

        def end() -> None:
            if task.cancel():
                self._handler.refused(MADE_ROOM)

        place = self._handler.pending.enter(end)
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, place))

    def _done(self, place: Place, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        place.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _accept(self) -> None:
        pending = self._handler.pending
        if pending.is_full():
            self._loop.remove_reader(self._sock)
            pending.when_free(self._accept_again)
            return
        for _ in range(ACCEPT_AT_ONCE):
            if pending.is_full():
                return  # whether somebody else waits is told by the next event
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            try:
                sock.setblocking(False)
                self._adopt(sock)
            except OSError as error:
                sock.close()
                self._ended_at_once(error)
            except Exception as error:  # a bug of ours
                sock.close()
                self._die(error)
                return

    def _ended_at_once(self, error: OSError) -> None:
        ended, fields = "a connection to %s ended at once: %s", {"event": "connection-ended"}
        log.info(ended, self.endpoint, error, extra=fields | {"kind": "ended-at-once"})

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno in _NOT_LISTENING:
            self._die(error)
            return
        self._failures += 1
        if (now := self._loop.time()) >= self._logged_at + SAY_SECONDS:
            self._logged_at = now
            log.error(
                "connections to %s could not be accepted (%d times so far): %s; they wait, and "
                "accepting is tried again every %g s",
                self.endpoint, self._failures, error, ACCEPT_RETRY_SECONDS,
                extra={"event": "accept-failed"},
            )  # fmt: skip
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _die(self, error: BaseException) -> None:
        if self._closed:
            return
        self.close()
        failed = ListenerFailed(self.endpoint, error)
        failed.__cause__ = error
        self._handler.died(failed)
