"""Listeners accept connections, which are pending until their client is identified.

A connection is pending from its accept (including a TLS handshake) until the plane has identified
its client, or the connection ends. At the bound accepting pauses, further connections wait in the
kernel, and the oldest pending ones are ended once their grace is over. The grace follows from the
bound: places become free fast enough to empty the backlog of a listening socket within a second.
So a client that connects while strangers hold every place, and reconnect as fast as they can, is
soon accepted, and has the grace to introduce itself. Accepting also pauses for lack of file
descriptors or memory.

Invariants: at most `limit` connections are pending over all listeners of a plane, and none is ended
to make room unless another may be waiting; a listener that stops accepting was closed, or has
reported it to its handler.
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

#: Connections that wait in the kernel to be accepted, per socket; it may allow fewer.
BACKLOG = 1024
#: Reason for counting a connection that was ended to make room.
MADE_ROOM = "made-room"
#: Seconds within which a backlog filled by strangers is accepted.
BACKLOG_SECONDS = 0.75
#: Connections to accept in one turn of the event loop.
ACCEPT_AT_ONCE = 64
#: Seconds after which a failed accept is retried; the usual cause is a lack of descriptors.
ACCEPT_RETRY_SECONDS = 1.0
#: Seconds between two log lines on failed accepts.
SAY_SECONDS = 60.0
#: Errors of accept(2) on a socket that will never accept again.
_NOT_LISTENING = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})


class Pending:
    """The pending connections of one plane, in order of arrival.

    limit: their number at a time. clock: in seconds, monotonic.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit, self._clock = limit, clock
        #: Seconds for which a connection is never ended to make room.
        self.grace = BACKLOG_SECONDS * limit / BACKLOG
        self._places: dict[Place, None] = {}
        self._leaving: set[Place] = set()
        self._waiting: set[Callable[[], None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Number of pending connections."""
        return len(self._places)

    @property
    def limit(self) -> int:
        """The bound on pending connections."""
        return self._limit

    def is_full(self) -> bool:
        """Whether the bound is reached."""
        return len(self._places) >= self._limit

    def enter(self, end: Callable[[], None]) -> "Place":
        """Add a pending connection. end: ends it; call `leave` on its place when it is over."""
        place = Place(self, end, self._clock())
        self._places[place] = None
        return place

    def when_free(self, call: Callable[[], None]) -> None:
        """Call this once, in its own iteration of the event loop, when a place is free.

        Ends the oldest connection for it if necessary.
        """
        self._waiting.add(call)
        self._free_or_make_room()

    def forget(self, call: Callable[[], None]) -> None:
        """Cancel a call of `when_free`."""
        self._waiting.discard(call)

    def leave(self, place: "Place") -> None:
        """A connection is no longer pending. Idempotent."""
        if place in self._places:
            del self._places[place]
            self._leaving.discard(place)
            self._free_or_make_room()

    def _free_or_make_room(self) -> None:
        """Make the waiting calls if a place is free, else end the oldest when its grace is over."""
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
            return  # all are being ended
        due = oldest.since + self.grace - self._clock()
        if due > 0:
            self._timer = loop.call_later(due, self._free_or_make_room)
        else:
            self._leaving.add(oldest)
            oldest.end()


class Place:
    """The place of one pending connection. since: time of its arrival."""

    __slots__ = ("_of", "end", "since")

    def __init__(self, of: Pending, end: Callable[[], None], since: float) -> None:
        self._of, self.end, self.since = of, end, since

    def leave(self) -> None:
        """The connection has introduced itself, or is over."""
        self._of.leave(self)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Parameters of a TLS server.

    context: for the next connection, as certificates are renewed. secured: called with a stream
    protocol after its handshake, and the client's certificate, if any. to_plain: the answer to a
    client that does not speak TLS.
    """

    context: Callable[[], ssl.SSLContext]
    secured: Callable[[StreamProtocol, object], None]
    to_plain: bytes


@dataclass(frozen=True, slots=True)
class ConnectionHandler:
    """A plane's handling of connections.

    protocol: makes the protocol of an accepted connection; a `StreamProtocol` gets the transports
    of this package, any other asyncio's. Once connected it holds its own place in `pending`; before
    that the listener holds one. refused: counts a connection that got no protocol, by reason. died:
    called once when the listener can accept no more. handshake_timeout: seconds until a connection
    has its protocol.
    """

    protocol: Callable[[], asyncio.BaseProtocol]
    pending: Pending
    refused: Callable[[str], None]
    died: Callable[[ListenerFailed], None]
    handshake_timeout: float
    tls: ServerTls | None = None


class Listener:
    """Accepts on a bound socket, which the caller owns, until closed or failed.

    endpoint: its address. A connection without TLS has its protocol at once.
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
        """Connections without a protocol."""
        return len(self._tasks)

    def close(self) -> None:
        """Stop accepting, end connections without a protocol, and keep the others."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._handler.pending.forget(self._accept_again)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is without a protocol."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _adopt(self, sock: socket.socket) -> None:
        """Take over an accepted, non-blocking socket."""
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
        """Run the handshake of an accepted connection in a task; it is pending until then."""

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
                return  # the next event shows whether another connection waits
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
            except Exception as error:  # a bug here
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
