"""TLS over TCP: leads connections through the handshake, and counts them from the first byte.

asyncio's own TLS server tells nobody of a connection before its handshake is done, nor why it
failed. Here one that never completes it is pending, with a bound and a deadline; failures are
counted, and a client that does not speak TLS is told so in its own protocol.
"""

import asyncio
import logging
import select
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from functools import partial

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.interface import (
    ConnectionHandler,
    Listener,
    ServerTls,
    Transport,
)
from rollout_dispatcher.transport.listener import SocketListener
from rollout_dispatcher.transport.pending import Place
from rollout_dispatcher.transport.plain import StreamProtocol
from rollout_dispatcher.transport.sockets import bound_endpoint, listening_socket
from rollout_dispatcher.transport.tls.handshakes import Handshakes
from rollout_dispatcher.transport.tls.paced import PacedTls
from rollout_dispatcher.transport.tls.records import BUFFER_BYTES, TlsRecords

log = logging.getLogger(__name__)

#: First byte of a TLS handshake record (RFC 8446, section 5.1).
HANDSHAKE_RECORD = b"\x16"
#: What poll(2) says of a client that has hung up; 0 where there is no such thing, which finds none.
POLLRDHUP: int = getattr(select, "POLLRDHUP", 0)
#: For a client that is refused to read why, and for the closing words of a TLS session.
GOODBYE_SECONDS = 2.0


class TlsListener(SocketListener):
    """Accepts TLS connections, which are pending until their handshake is done."""

    def __init__(
        self, sock: socket.socket, endpoint: Endpoint, handler: ConnectionHandler, tls: ServerTls
    ) -> None:
        self._tls, self._handshakes = tls, Handshakes()
        self._buffer = bytearray(BUFFER_BYTES)
        super().__init__(sock, endpoint, handler)

    def _adopt(self, sock: socket.socket) -> None:
        self._start(partial(self._receive, sock))

    async def _receive(self, sock: socket.socket, place: Place) -> None:
        """Give a connection its protocol, or count why not."""
        try:
            async with asyncio.timeout(self._handler.handshake_timeout):
                reason = await self._shake_hands(sock, place)
        except TimeoutError:
            reason = "handshake-timeout"
        except OSError as error:
            log.info("a TLS handshake failed: %s", error, extra={"kind": "tls"})
            reason = "tls"
        except Exception:  # whatever it was, it is this connection's alone
            log.exception("a TLS handshake failed")
            reason = "tls"
        if reason is not None:
            self._handler.refused(reason)

    async def _shake_hands(self, sock: socket.socket, place: Place) -> str | None:
        """None once the connection has its protocol, else why it has not."""
        try:
            first = await _peek(sock)
            if first == HANDSHAKE_RECORD:
                await self._handshakes.begin()
        except BaseException:
            sock.close()
            raise
        if not first:
            sock.close()
            return "eof"
        if first != HANDSHAKE_RECORD:
            await _say_and_close(sock, self._tls.to_plain)
            return "plain"
        with ExitStack() as turn:
            turn.callback(self._handshakes.answered)
            if _hung_up(sock):
                sock.close()
                return "eof"
            await self._secure(sock, place, turn)
        return None

    async def _secure(self, sock: socket.socket, place: Place, turn: ExitStack) -> None:
        """Return once the handshake is done, and the protocol is connected.

        turn: ended as soon as the client's first words were answered.
        """

        def answered() -> None:
            turn.close()
            place.renew()

        done: asyncio.Future[None] = self._loop.create_future()
        records = TlsRecords(
            self._protocol(),
            self._tls.context(),
            done,
            answered=answered,
            buffer=self._buffer,
            handshake_timeout=self._handler.handshake_timeout,
            shutdown_timeout=GOODBYE_SECONDS,
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

    def _protocol(self) -> asyncio.BaseProtocol:
        protocol = self._handler.protocol()
        if isinstance(protocol, StreamProtocol):
            return PacedTls(protocol, partial(self._tls.secured, protocol))
        return protocol


class TlsSockets(Transport):
    """Streams of bytes, encrypted."""

    @asynccontextmanager
    async def listen(
        self, endpoint: Endpoint, handler: ConnectionHandler
    ) -> AsyncIterator[Listener]:
        """Bind and accept, as `handler.tls` says."""
        assert handler.tls is not None
        with listening_socket(endpoint) as sock:
            at = bound_endpoint(endpoint, sock)
            listener = TlsListener(sock, at, handler, handler.tls)
            try:
                yield listener
            finally:
                listener.close()
                await listener.wait_closed()

    async def connect(
        self, endpoint: Endpoint, protocol: StreamProtocol, tls: ssl.SSLContext | None
    ) -> None:
        """Connect and lead the handshake; the connection is asyncio's own."""
        assert tls is not None, "a tls:// endpoint needs a context"
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: protocol, endpoint.host, endpoint.port, ssl=tls)


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


def _hung_up(sock: socket.socket) -> bool:
    """Whether the client will say nothing more, though there may be something to read."""
    look = select.poll()
    look.register(sock, POLLRDHUP)
    return bool(look.poll(0))


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
