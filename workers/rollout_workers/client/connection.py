"""A framed connection for one thread that waits on the network and on other threads at once.

The socket never blocks: `poll` waits until bytes arrive, room to write appears, somebody calls
`Waker.wake`, or its timeout passes, and does what can be done. Whatever goes wrong with the
connection is a ConnectionError; what goes wrong with the bytes is a ProtocolError.
"""

import selectors
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.protocol.sessions import Session, Side
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.client.tls_socket import TlsSocket

#: Bytes to read before other duties (a ping, a commit) get their turn.
READ_AT_ONCE = 4 * 1024 * 1024
NO_PAYLOAD = memoryview(b"")


class Waker:
    """Interrupts a `poll` from any thread; until it is cleared, one wake stands for many."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._woken = False

    def wake(self) -> None:
        """Have the running `poll`, or the next one, return at once."""
        if self._woken:
            return
        self._woken = True
        with suppress(BlockingIOError):  # full: many wakes are one
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Forget the wakes so far; look for what they were about afterwards."""
        with suppress(BlockingIOError):
            self.receiver.recv(4096)
        self._woken = False

    def close(self) -> None:
        """Free the sockets."""
        self.receiver.close()
        self._sender.close()


class Connection:
    """A DP rank's messages in and out of a connected socket; payloads go straight into `memory`.

    bytes_received: total on this connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        waker: Waker,
        limits: FrameLimits,
        memory: Memory = uninitialised,
    ) -> None:
        sock.setblocking(False)
        self._sock, self._waker = sock, waker
        # Bytes that TLS has decrypted already make no socket readable.
        self._decrypted = sock.pending if isinstance(sock, ssl.SSLSocket) else int
        self._session = Session(Side.RANK, limits, memory)
        self._unsent = bytearray()  # bounded: a rank says a few short words a step
        self._selector = selectors.DefaultSelector()
        self._selector.register(waker.receiver, selectors.EVENT_READ)
        self._selector.register(sock, selectors.EVENT_READ)
        self._events = selectors.EVENT_READ
        self.bytes_received = 0

    def send(self, messages: Iterable[m.Message]) -> None:
        """Queue messages; `poll` writes them."""
        for message in messages:
            self._unsent += self._session.say(message)

    def poll(self, timeout: float) -> list[tuple[m.Message, memoryview]]:
        """Wait at most `timeout` seconds; return the messages that arrived, maybe none.

        Raises ConnectionError when the connection is over, ProtocolError for malformed bytes.
        """
        self._flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._sock, events)
        held = self._decrypted()
        ready = {key.fileobj: mask for key, mask in self._selector.select(0.0 if held else timeout)}
        if self._waker.receiver in ready:
            self._waker.clear()
        self._flush()
        if held or ready.get(self._sock, 0) & selectors.EVENT_READ:
            return self._read()
        return []

    def close(self) -> None:
        """Close the socket; what is queued is lost."""
        self._selector.close()
        self._sock.close()

    def _flush(self) -> None:
        while self._unsent:
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except BlockingIOError:
                return
            except ConnectionError:
                # The dispatcher may have said why before it closed: let reading find out.
                self._unsent.clear()

    def _read(self) -> list[tuple[m.Message, memoryview]]:
        found: list[tuple[m.Message, memoryview]] = []
        budget = READ_AT_ONCE
        while budget > 0:
            try:
                nbytes = self._sock.recvmsg_into(self._session.get_buffers())[0]
            except BlockingIOError:
                break
            if not nbytes:
                if found:
                    break  # the next poll sees the end again
                raise ConnectionError("the dispatcher closed the connection")
            budget -= nbytes
            self.bytes_received += nbytes
            for message, parts in self._session.received(nbytes):
                found.append((message, parts[0] if parts else NO_PAYLOAD))
        return found


def connect(endpoint: Endpoint, timeout: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connected socket. Raises OSError; each step blocks for at most `timeout` seconds.

    tls: how to lead the handshake of a `tls://` endpoint.
    """
    if not endpoint.path:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock if tls is None else _secured(sock, endpoint.host, tls)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(endpoint.path)
    except BaseException:
        sock.close()
        raise
    return sock


def _secured(sock: socket.socket, host: str, tls: ssl.SSLContext) -> ssl.SSLSocket:
    tls.sslsocket_class = TlsSocket
    try:
        return tls.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


def take_leave(connection: Connection, deadline: float) -> None:
    """Say Bye and wait until the dispatcher says it too: what was said before is safe then.

    Raises OSError when it does not before `deadline` (of `time.monotonic`): an end without an
    answer may be that of a dispatcher that has read nothing.
    """
    connection.send([m.Bye()])
    while (left := deadline - monotonic()) > 0:
        for message, _ in connection.poll(left):
            if isinstance(message, m.Bye):
                return
    raise TimeoutError("the dispatcher did not answer the goodbye")
