"""TLS over TCP: a handshake that is counted from its first byte, and a stream with backpressure.

asyncio's own TLS server tells nobody of a connection before its handshake is done, nor why it
failed; it has 256 KiB for each from its first byte on, and takes whatever it is given to send:

- One that never completes its handshake is pending, with a bound and a deadline; failures are
  counted, and a client that does not speak TLS is told so in its own protocol.
- Bytes are handed to asyncio's transport a piece at a time, as long as it wants more: a frame of a
  hundred megabytes would be encrypted and copied at once, and a deadline for reading would see
  neither a frame that nobody reads nor the progress of one that is read slowly.

Invariant: bytes leave in the order in which they were written.
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
#: For a client that is refused to read why, and for the closing words of a TLS session.
GOODBYE_SECONDS = 2.0
#: A few TLS records: small beside the kernel's buffer, large beside the cost of a call.
PIECE_BYTES = 64 * 1024


class TlsListener(Listener):
    """Accepts TLS connections, which are pending until their handshake is done."""

    def __init__(
        self, sock: socket.socket, endpoint: Endpoint, handler: ConnectionHandler, tls: ServerTls
    ) -> None:
        self._tls = tls
        super().__init__(sock, endpoint, handler)

    def _adopt(self, sock: socket.socket) -> None:
        self._start(self._receive(sock))

    async def _receive(self, sock: socket.socket) -> None:
        """Give a connection its protocol, or count why not."""
        try:
            async with asyncio.timeout(self._handler.handshake_timeout):
                reason = await self._shake_hands(sock)
        except TimeoutError:
            reason = "handshake-timeout"
        except OSError as error:
            fields = {"event": "handshake-failed", "kind": "tls"}
            log.info("a TLS handshake failed: %s", error, extra=fields)
            reason = "tls"
        except Exception:  # whatever it was, it is this connection's alone
            log.exception("a TLS handshake failed", extra={"event": "bug"})
            reason = "tls"
        if reason is not None:
            self._handler.refused(reason)

    async def _shake_hands(self, sock: socket.socket) -> str | None:
        """None once the connection has its protocol, else why it has not."""
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
            # It holds the error, that its traceback, that this frame: a cycle that would keep all
            # that the session takes until the garbage collector looks, which is seldom.
            del done
        return None

    def _protocol(self) -> asyncio.BaseProtocol:
        protocol = self._handler.protocol()
        if isinstance(protocol, StreamProtocol):
            return PacedTls(protocol, partial(self._tls.secured, protocol))
        return protocol


async def _peek(sock: socket.socket) -> bytes:
    """The first byte that arrives, left where it is; nothing if the client hangs up."""
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
    """Write a few words and wait a little until they are read.

    Closing with bytes unread would reset the connection, and the words might be lost.
    """
    loop = asyncio.get_running_loop()
    with closing(sock), suppress(TimeoutError, OSError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await loop.sock_sendall(sock, words)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 65536):
                pass


class TlsRecords(sslproto.SSLProtocol):
    """Leads a handshake, then carries records; of what is encrypted it receives less at a time."""

    max_size = 32 * 1024


class PacedTls(asyncio.BufferedProtocol, asyncio.Transport):
    """Stands between a TLS transport and a stream protocol: each takes it for the other.

    secured: called once the protocol has this transport, with the certificate that was shown.
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
        """The connection is over, and what waits with it."""
        self._closing = True
        self._waiting.clear()
        self._inner.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> Any:
        """Straight into the protocol's memory."""
        return self._inner.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes arrived, decrypted."""
        self._inner.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        """Nothing more will come."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """The TLS transport holds enough."""
        self._full = True
        if not self._inner_paused:
            self._inner_paused = True
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It wants more."""
        self._full = False
        self._forward()
        if self._inner_paused and not self._full:
            self._inner_paused = False
            self._inner.resume_writing()

    # -- as the protocol's transport --------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Send these bytes behind those that wait; they must not change until they are sent."""
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send these bytes behind those that wait."""
        if self._closing:
            return
        self._waiting.extend(memoryview(data).cast("B") for data in list_of_data if len(data))
        self._forward()

    def get_write_buffer_size(self) -> int:
        """Bytes that are not sent yet; it shrinks with every piece that the client reads."""
        held = 0 if self._tls is None else self._tls.get_write_buffer_size()
        return held + sum(map(len, self._waiting))

    def can_write_eof(self) -> bool:
        """TLS has no half-closed state."""
        return False

    def is_closing(self) -> bool:
        """Whether it is closed, or will be once everything is sent."""
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
        """Leave what arrives where it is."""
        if self._tls is not None:
            self._tls.pause_reading()

    def resume_reading(self) -> None:
        """Take it again."""
        if self._tls is not None:
            self._tls.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the TLS transport knows."""
        return default if self._tls is None else self._tls.get_extra_info(name, default)

    def _forward(self) -> None:
        """Hand over pieces as long as the TLS transport wants more."""
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
