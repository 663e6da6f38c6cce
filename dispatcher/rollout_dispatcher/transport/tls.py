"""TLS over TCP: bounded handshakes, and a stream with backpressure.

asyncio's own TLS server does not report a connection before its handshake is done, nor why it
failed; it allocates 256 KiB for each at its first byte, and encrypts a write of any size at once.
Here instead:

- A connection is pending during its handshake, with a bound and a deadline; failures are counted,
  and a client that does not speak TLS gets an answer in its own protocol.
- Bytes are passed to asyncio's transport a piece at a time, while it accepts more. Otherwise a
  frame of a hundred megabytes would be encrypted and copied at once, and its progress to a slow
  client could not be observed.

Invariant: bytes are sent in the order in which they were written.
"""

import asyncio
import logging
import socket
from asyncio import sslproto
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import partial
from typing import Any

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.listener import ConnectionHandler, Listener, ServerTls
from rollout_dispatcher.transport.plain import StreamProtocol

log = logging.getLogger(__name__)

#: First byte of a TLS handshake record (RFC 8446, section 5.1).
HANDSHAKE_RECORD = b"\x16"
#: Seconds for a refused client to read the reason, and for closing a TLS session.
GOODBYE_SECONDS = 2.0
#: A few TLS records: small compared with the kernel's buffer, large enough to make calls cheap.
PIECE_BYTES = 64 * 1024


class TlsListener(Listener):
    """Accepts TLS connections, and runs their handshakes."""

    def __init__(
        self, sock: socket.socket, endpoint: Endpoint, handler: ConnectionHandler, tls: ServerTls
    ) -> None:
        self._tls = tls
        super().__init__(sock, endpoint, handler)

    def _adopt(self, sock: socket.socket) -> None:
        self._start(self._receive(sock))

    async def _receive(self, sock: socket.socket) -> None:
        """Give a connection its protocol, or count its refusal."""
        try:
            async with asyncio.timeout(self._handler.handshake_timeout):
                reason = await self._shake_hands(sock)
        except TimeoutError:
            reason = "handshake-timeout"
        except OSError as error:
            fields = {"event": "handshake-failed", "kind": "tls"}
            log.info("a TLS handshake failed: %s", error, extra=fields)
            reason = "tls"
        except Exception:  # any bug ends this connection alone
            log.exception("a TLS handshake failed", extra={"event": "bug"})
            reason = "tls"
        if reason is not None:
            self._handler.refused(reason)

    async def _shake_hands(self, sock: socket.socket) -> str | None:
        """Run the handshake; returns the reason of a refusal, None once there is a protocol."""
        try:
            first = await _peek(sock)
        except BaseException:
            sock.close()
            raise
        if not first:
            sock.close()
            return "eof"
        if first != HANDSHAKE_RECORD:
            await _say_and_close(sock, self._tls.to_plain)
            return "plain"
        done: asyncio.Future[None] = self._loop.create_future()
        records = TlsRecords(
            self._loop,
            self._protocol(),
            self._tls.context(),
            done,
            server_side=True,
            ssl_handshake_timeout=self._handler.handshake_timeout,  # type: ignore[arg-type]  # seconds, any
            ssl_shutdown_timeout=GOODBYE_SECONDS,
        )
        transport, _ = await self._loop.connect_accepted_socket(lambda: records, sock)
        try:
            await done
        except BaseException:
            transport.abort()
            raise
        finally:
            # The future refers to the error, its traceback and this frame: a cycle that keeps the
            # session's memory until a garbage collection, which is rare.
            del done
        return None

    def _protocol(self) -> asyncio.BaseProtocol:
        protocol = self._handler.protocol()
        if isinstance(protocol, StreamProtocol):
            return PacedTls(protocol, partial(self._tls.secured, protocol))
        return protocol


async def _peek(sock: socket.socket) -> bytes:
    """The first byte, left in the socket; empty if the client closes the connection."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _resolve, arrived)
    try:
        await arrived
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _say_and_close(sock: socket.socket, words: bytes) -> None:
    """Send a short answer, and wait until the client closes, for `GOODBYE_SECONDS` at most.

    Closing with unread bytes would reset the connection, and the answer might be lost.
    """
    loop = asyncio.get_running_loop()
    with closing(sock), suppress(TimeoutError, OSError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await loop.sock_sendall(sock, words)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 65536):
                pass


class TlsRecords(sslproto.SSLProtocol):
    """asyncio's TLS protocol with a smaller receive buffer."""

    max_size = 32 * 1024


class PacedTls(asyncio.BufferedProtocol, asyncio.Transport):
    """Sits between a TLS transport and a stream protocol, and is each one's counterpart.

    secured: called with the client's certificate once the protocol has this transport.
    """

    def __init__(self, inner: StreamProtocol, secured: Callable[[object], None]) -> None:
        asyncio.Transport.__init__(self)
        self._inner, self._secured = inner, secured
        self._tls: asyncio.Transport | None = None
        self._waiting: deque[memoryview] = deque()
        self._full = self._inner_paused = self._closing = False

    # -- as the TLS transport's protocol ------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done."""
        assert isinstance(transport, asyncio.Transport)
        self._tls = transport
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        self._inner.connection_made(self)
        self._secured(transport.get_extra_info("peercert"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; drop unsent bytes."""
        self._closing = True
        self._waiting.clear()
        self._inner.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> Any:
        """The protocol's memory."""
        return self._inner.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypted bytes have arrived."""
        self._inner.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        """The client has sent everything."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """The TLS transport's buffer is full."""
        self._full = True
        if not self._inner_paused:
            self._inner_paused = True
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The TLS transport has room again."""
        self._full = False
        self._forward()
        if self._inner_paused and not self._full:
            self._inner_paused = False
            self._inner.resume_writing()

    # -- as the protocol's transport --------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Queue bytes; they must not change until sent."""
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Queue several pieces of bytes."""
        if self._closing:
            return
        self._waiting.extend(memoryview(data).cast("B") for data in list_of_data if len(data))
        self._forward()

    def get_write_buffer_size(self) -> int:
        """Unsent bytes; they shrink with every piece that the client reads."""
        held = 0 if self._tls is None else self._tls.get_write_buffer_size()
        return held + sum(map(len, self._waiting))

    def can_write_eof(self) -> bool:
        """TLS has no half-closed state."""
        return False

    def is_closing(self) -> bool:
        """Whether it is closed, or closes once everything is sent."""
        return self._closing

    def close(self) -> None:
        """Close once everything is sent."""
        self._closing = True
        if not self._waiting and self._tls is not None:
            self._tls.close()

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        self._waiting.clear()
        if self._tls is not None:
            self._tls.abort()

    def pause_reading(self) -> None:
        """Stop reading."""
        if self._tls is not None:
            self._tls.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._tls is not None:
            self._tls.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The TLS transport's extra info."""
        return default if self._tls is None else self._tls.get_extra_info(name, default)

    def _forward(self) -> None:
        """Pass pieces on while the TLS transport has room."""
        assert self._tls is not None
        if self._tls.is_closing():
            self._waiting.clear()
        while self._waiting and not self._full:
            first = self._waiting.popleft()
            if len(first) > PIECE_BYTES:
                self._waiting.appendleft(first[PIECE_BYTES:])
            self._tls.write(first[:PIECE_BYTES])
        if self._closing and not self._waiting:
            self._tls.close()
