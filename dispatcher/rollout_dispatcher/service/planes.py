"""The two planes on their sockets, over TLS where asked for; both end with their context."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

from aiohttp import web

from rollout_dispatcher.errors import TlsFailed
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.service.access import exposed
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.connections.paced_tls import PacedTls
from rollout_dispatcher.service.connections.peer import Peer, PeerLimits
from rollout_dispatcher.service.http.guard import HttpGuard
from rollout_dispatcher.service.http.plane import HttpPlane
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.transport.listener import Listener
from rollout_dispatcher.transport.sockets import bound_endpoint, listening_socket
from rollout_dispatcher.transport.tls_listener import TlsListener, Visitors

log = logging.getLogger(__name__)

#: Headers hold a few hundred bytes a sample; this is room for some ten thousand in one frame.
MAX_HEADER_BYTES = 4 * 2**20
#: How long requests that are under way may hold up the end.
HTTP_SHUTDOWN_SECONDS = 2.0
SPEAKS_TLS = "this port speaks TLS; write its address as tls://host:port"


@contextlib.asynccontextmanager
async def sample_plane(config: ServeConfig, router: Router) -> AsyncIterator[list[Endpoint]]:
    """Serve peers on every `--listen` address; yields where."""
    limits = PeerLimits(
        frame=FrameLimits(MAX_HEADER_BYTES, config.max_frame_bytes),
        handshake_timeout=config.handshake_timeout,
        write_timeout=config.write_timeout,
    )

    def peer() -> Peer:
        return Peer(router, limits, router.clock)

    visitors = Visitors(
        protocol=lambda: PacedTls(peer(), router.access),
        connections=lambda: router.num_connections,
        turned_away=lambda reason: _count(router, "unknown", reason),
        to_plain=codec.encode(m.Error(code=TlsFailed.code, message=SPEAKS_TLS)),
    )
    _warn_if_open(config, router)
    async with contextlib.AsyncExitStack() as stack:
        bound: list[Endpoint] = []
        for endpoint in config.listen:
            sock = stack.enter_context(listening_socket(endpoint))
            bound.append(bound_endpoint(endpoint, sock, tls=router.access.tls is not None))
            if bound[-1].tls:
                await stack.enter_async_context(_tls_door(sock, config, router, visitors))
            else:
                stack.callback(Listener(sock, peer).close)
        yield bound


@contextlib.asynccontextmanager
async def http_plane(config: ServeConfig, router: Router) -> AsyncIterator[Endpoint]:
    """Serve HTTP on the `--http` address; yields where."""
    guard = HttpGuard(config, router.access, lambda reason: _count(router, "http", reason))
    # Signals are ours: aiohttp's own handling would run beside it.
    runner = web.AppRunner(
        HttpPlane(router, guard).application(),
        handle_signals=False,
        access_log=None,
        shutdown_timeout=HTTP_SHUTDOWN_SECONDS,
        keepalive_timeout=config.idle_timeout,
    )
    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(listening_socket(config.http))
        bound = bound_endpoint(config.http, sock, tls=router.access.tls is not None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.callback(guard.close)
        web_server = runner.server
        assert web_server is not None
        if bound.tls:
            visitors = Visitors(
                protocol=lambda: guard.protocol(web_server),
                connections=lambda: len(web_server.connections),
                turned_away=lambda reason: _count(router, "http", reason),
                to_plain=_speaks_tls_in_http(),
            )
            await stack.enter_async_context(_tls_door(sock, config, router, visitors))
        else:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: guard.protocol(web_server), sock=sock)
            stack.callback(server.close)
        yield bound


@contextlib.asynccontextmanager
async def _tls_door(
    sock: socket.socket, config: ServeConfig, router: Router, visitors: Visitors
) -> AsyncIterator[None]:
    """A door in a task of its own, which ends with this context."""
    assert router.access.tls is not None
    limit, timeout = config.max_connections, config.handshake_timeout
    door = TlsListener(sock, router.access.tls, visitors, limit=limit, timeout=timeout)
    task = asyncio.create_task(door.serve())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


def _count(router: Router, role: str, reason: str) -> None:
    router.metrics.connection_errors.labels(role, reason).inc()


def _speaks_tls_in_http() -> bytes:
    body = f"{SPEAKS_TLS}, or https:// for HTTP clients\n".encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def _warn_if_open(config: ServeConfig, router: Router) -> None:
    """Say so when what travels, or who may connect, is anybody's who reaches these addresses."""
    named = ", ".join(map(str, exposed([*config.listen, config.http])))
    if not named:
        return
    if router.access.token is None and not router.access.certificate:
        log.warning("--insecure: whoever reaches %s may push samples and take steps", named)
    if router.access.tls is None:
        log.warning("no TLS: samples, and a token, travel unencrypted to and from %s", named)
