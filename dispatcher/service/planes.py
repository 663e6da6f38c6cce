"""The two planes on their sockets, over TLS where asked for; both end with their context."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

from aiohttp import web

from dispatcher.errors import TlsFailed
from dispatcher.net.listener import Listener
from dispatcher.service.access import exposed
from dispatcher.service.config import ServeConfig
from dispatcher.service.doors import TlsDoor, Visitors
from dispatcher.service.http import HttpPlane
from dispatcher.service.http_guard import HttpGuard
from dispatcher.service.hub import Hub
from dispatcher.service.paced import PacedTls
from dispatcher.service.peer import Peer, PeerLimits
from dispatcher.service.sockets import bound_endpoint, listening_socket
from dispatcher.wire import codec
from dispatcher.wire import messages as m
from dispatcher.wire.endpoint import Endpoint
from dispatcher.wire.frame import FrameLimits

log = logging.getLogger(__name__)

#: Headers hold a few hundred bytes a sample; this is room for some ten thousand in one frame.
MAX_HEADER_BYTES = 4 * 2**20
#: How long requests that are under way may hold up the end.
HTTP_SHUTDOWN_SECONDS = 2.0
SPEAKS_TLS = "this port speaks TLS; write its address as tls://host:port"


@contextlib.asynccontextmanager
async def sample_plane(config: ServeConfig, hub: Hub) -> AsyncIterator[list[Endpoint]]:
    """Serve peers on every `--listen` address; yields where."""
    limits = PeerLimits(
        frame=FrameLimits(MAX_HEADER_BYTES, config.max_frame_bytes),
        handshake_timeout=config.handshake_timeout,
        write_timeout=config.write_timeout,
    )

    def peer() -> Peer:
        return Peer(hub, limits, hub.clock)

    visitors = Visitors(
        protocol=lambda: PacedTls(peer(), hub.access),
        connections=lambda: hub.connections,
        turned_away=lambda reason: _count(hub, "unknown", reason),
        to_plain=codec.encode(m.Error(code=TlsFailed.code, message=SPEAKS_TLS)),
    )
    _warn_if_open(config, hub)
    async with contextlib.AsyncExitStack() as stack:
        bound: list[Endpoint] = []
        for endpoint in config.listen:
            sock = stack.enter_context(listening_socket(endpoint))
            bound.append(bound_endpoint(endpoint, sock, tls=hub.access.tls is not None))
            if bound[-1].tls:
                await stack.enter_async_context(_tls_door(sock, config, hub, visitors))
            else:
                stack.callback(Listener(sock, peer).close)
        yield bound


@contextlib.asynccontextmanager
async def http_plane(config: ServeConfig, hub: Hub) -> AsyncIterator[Endpoint]:
    """Serve HTTP on the `--http` address; yields where."""
    guard = HttpGuard(config, hub.access, lambda reason: _count(hub, "http", reason))
    # Signals are ours: aiohttp's own handling would run beside it.
    runner = web.AppRunner(
        HttpPlane(hub, guard).application(),
        handle_signals=False,
        access_log=None,
        shutdown_timeout=HTTP_SHUTDOWN_SECONDS,
        keepalive_timeout=config.idle_timeout,
    )
    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(listening_socket(config.http))
        bound = bound_endpoint(config.http, sock, tls=hub.access.tls is not None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.callback(guard.close)
        web_server = runner.server
        assert web_server is not None
        if bound.tls:
            visitors = Visitors(
                protocol=lambda: guard.protocol(web_server),
                connections=lambda: len(web_server.connections),
                turned_away=lambda reason: _count(hub, "http", reason),
                to_plain=_speaks_tls_in_http(),
            )
            await stack.enter_async_context(_tls_door(sock, config, hub, visitors))
        else:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: guard.protocol(web_server), sock=sock)
            stack.callback(server.close)
        yield bound


@contextlib.asynccontextmanager
async def _tls_door(
    sock: socket.socket, config: ServeConfig, hub: Hub, visitors: Visitors
) -> AsyncIterator[None]:
    """A door in a task of its own, which ends with this context."""
    assert hub.access.tls is not None
    limit, timeout = config.max_connections, config.handshake_timeout
    door = TlsDoor(sock, hub.access.tls, visitors, limit=limit, timeout=timeout)
    task = asyncio.create_task(door.serve())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


def _count(hub: Hub, role: str, reason: str) -> None:
    hub.metrics.connection_errors.labels(role, reason).inc()


def _speaks_tls_in_http() -> bytes:
    body = f"{SPEAKS_TLS}, or https:// for HTTP clients\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def _warn_if_open(config: ServeConfig, hub: Hub) -> None:
    """Say so when what travels, or who may connect, is anybody's who reaches these addresses."""
    named = ", ".join(map(str, exposed([*config.listen, config.http])))
    if not named:
        return
    if hub.access.token is None and not hub.access.certificate:
        log.warning("--insecure: whoever reaches %s may push samples and take steps", named)
    if hub.access.tls is None:
        log.warning("no TLS: samples, and a token, travel unencrypted to and from %s", named)
