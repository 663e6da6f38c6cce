"""Connects to an endpoint and makes a protocol's transport of the connection."""

import asyncio
import socket
import ssl

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport


async def connect(
    endpoint: Endpoint, protocol: StreamProtocol, tls: ssl.SSLContext | None = None
) -> None:
    """Connect `protocol` to `endpoint`, to the first of its addresses that answers.

    tls: how to lead the handshake; the connection is asyncio's own then. Raises OSError; put a
    deadline around it.
    """
    loop = asyncio.get_running_loop()
    if tls is not None:
        await loop.create_connection(lambda: protocol, endpoint.host, endpoint.port, ssl=tls)
    else:
        StreamTransport(loop, await _connected(loop, endpoint), protocol)


async def _connected(loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> socket.socket:
    if endpoint.path:
        return await _try(loop, socket.AF_UNIX, endpoint.path)
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


async def _try(
    loop: asyncio.AbstractEventLoop, family: int, address: str | tuple[object, ...]
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
