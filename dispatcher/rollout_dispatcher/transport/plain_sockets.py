"""TCP and Unix sockets without TLS."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.interface import ConnectionHandler, Listener, Transport
from rollout_dispatcher.transport.listener import SocketListener
from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport
from rollout_dispatcher.transport.sockets import bound_endpoint, listening_socket


class PlainListener(SocketListener):
    """A connection has its protocol as soon as it is accepted."""

    def _adopt(self, sock: socket.socket) -> None:
        protocol = self._handler.protocol()
        if isinstance(protocol, StreamProtocol):
            StreamTransport(self._loop, sock, protocol)
            return
        self._start(lambda _: self._hand_over(sock, protocol))

    async def _hand_over(self, sock: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock)
        except OSError as error:
            self._ended_at_once(error)


class PlainSockets(Transport):
    """Streams of bytes as the kernel carries them."""

    @asynccontextmanager
    async def listen(
        self, endpoint: Endpoint, handler: ConnectionHandler
    ) -> AsyncIterator[Listener]:
        """Bind and accept."""
        with listening_socket(endpoint) as sock:
            listener = PlainListener(sock, bound_endpoint(endpoint, sock), handler)
            try:
                yield listener
            finally:
                listener.close()
                await listener.wait_closed()

    async def connect(
        self,
        endpoint: Endpoint,
        protocol: StreamProtocol,
        tls: ssl.SSLContext | None,  # noqa: ARG002  there is none here
    ) -> None:
        """Connect to the first of its addresses that answers."""
        loop = asyncio.get_running_loop()
        StreamTransport(loop, await _connected(loop, endpoint), protocol)


async def _connected(loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> socket.socket:
    if endpoint.path:
        return _connected_unix(endpoint.path)
    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for family, _, _, _, address in found:
        try:
            sock = await _try(loop, family, address)
        except OSError as error:
            failure = error
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise failure or OSError(f"{endpoint} has no address")


def _connected_unix(path: str) -> socket.socket:
    """At once, or not at all: asyncio takes one that finds no place in the line for connected."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BlockingIOError:
        sock.close()
        raise ConnectionError(f"as many connections wait for {path} already as may") from None
    except BaseException:
        sock.close()
        raise
    return sock


async def _try(
    loop: asyncio.AbstractEventLoop, family: int, address: tuple[object, ...]
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
