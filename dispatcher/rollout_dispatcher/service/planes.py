"""The sample plane and the HTTP plane on their sockets, with TLS if configured."""

import contextlib
import errno
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import web

from rollout_dispatcher.errors import TlsFailed, Unauthorized
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.service.access import Access, exposed
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections.peer import Peer, PeerLimits
from rollout_dispatcher.service.http.guard import HttpGuard
from rollout_dispatcher.service.http.plane import HttpPlane
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.transport.listener import ConnectionHandler, ServerTls
from rollout_dispatcher.transport.plain import StreamProtocol
from rollout_dispatcher.transport.sockets import listen

log = logging.getLogger(__name__)

#: A header has up to a few hundred bytes a sample, and a push at most `m.MAX_SAMPLES`; parsing one
#: of this size takes milliseconds.
MAX_HEADER_BYTES = 2**20
#: Deadline for requests under way at the end.
HTTP_SHUTDOWN_SECONDS = 2.0
SPEAKS_TLS = "this port speaks TLS; write its address as tls://host:port"


@contextlib.asynccontextmanager
async def sample_plane(config: ServeConfig, router: Router) -> AsyncIterator[list[Endpoint]]:
    """Serve peers on every `--listen` address; yields the bound addresses."""
    limits = PeerLimits(
        frame=FrameLimits(MAX_HEADER_BYTES, config.max_frame_bytes),
        handshake_timeout=config.handshake_timeout,
        write_timeout=config.write_timeout,
    )
    to_plain = codec.encode(m.Error(code=TlsFailed.code, message=SPEAKS_TLS))
    _warn_if_open(config, router)
    async with contextlib.AsyncExitStack() as stack:
        bound: list[Endpoint] = []
        for endpoint in config.listen:
            handler = ConnectionHandler(
                protocol=lambda: Peer(router, limits, router.clock),
                pending=router.pending,
                refused=lambda reason: _count(router, "unknown", reason),
                died=router.fail,
                handshake_timeout=config.handshake_timeout,
                tls=_tls(router.access, endpoint, to_plain),
            )
            bound.append(await _listen(stack, "--listen", endpoint, handler))
        yield bound


@contextlib.asynccontextmanager
async def http_plane(config: ServeConfig, router: Router) -> AsyncIterator[Endpoint]:
    """Serve HTTP on the `--http` address; yields the bound address."""
    count = partial(_count, router, "http")
    guard = HttpGuard(config, router, count)
    # Signals are ours: aiohttp's own handling would run beside it.
    runner = web.AppRunner(
        HttpPlane(router, guard).application(),
        handle_signals=False,
        access_log=None,
        auto_decompress=False,
        shutdown_timeout=HTTP_SHUTDOWN_SECONDS,
        keepalive_timeout=config.idle_timeout,
    )
    async with contextlib.AsyncExitStack() as stack:
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.callback(guard.connections.close)
        web_server = runner.server
        assert web_server is not None
        handler = ConnectionHandler(
            protocol=lambda: guard.protocol(web_server),
            pending=guard.connections.pending,
            refused=count,
            died=router.fail,
            handshake_timeout=config.handshake_timeout,
            tls=_tls(router.access, config.http, _speaks_tls_in_http()),
        )
        yield await _listen(stack, "--http", config.http, handler)


async def _listen(
    stack: contextlib.AsyncExitStack, option: str, endpoint: Endpoint, handler: ConnectionHandler
) -> Endpoint:
    """Listen until the stack ends. Raises OSError that names option and address."""
    try:
        listener = await stack.enter_async_context(listen(endpoint, handler))
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = (
                f"{os.strerror(error.errno)}: is a dispatcher running there already? Stop it, or "
                f"choose another {option}"
            )
        raise OSError(error.errno, f"{option} {endpoint}: {why}") from error
    return listener.endpoint


def _tls(access: Access, endpoint: Endpoint, to_plain: bytes) -> ServerTls | None:
    """Return how to serve TLS on this address; None: without."""
    if access.tls_for(endpoint) is None:
        return None

    def context() -> ssl.SSLContext:
        assert access.tls is not None
        return access.tls

    def secured(peer: StreamProtocol, certificate: object) -> None:
        """Reject a peer without the required certificate, in its own protocol."""
        assert isinstance(peer, Peer)
        try:
            access.check_certificate(certificate)
        except Unauthorized as error:
            peer.fail(error)

    return ServerTls(context, secured, to_plain)


def _count(router: Router, role: str, reason: str) -> None:
    router.metrics.connection_errors.labels(role, reason).inc()


def _speaks_tls_in_http() -> bytes:
    message = f"{SPEAKS_TLS}, or https:// for HTTP clients"
    body = json.dumps({"code": TlsFailed.code, "message": message}).encode()
    head = (
        "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _warn_if_open(config: ServeConfig, router: Router) -> None:
    """Warn if addresses that other machines reach have no token, certificates or TLS."""
    named = ", ".join(map(str, exposed([*config.listen, config.http])))
    if not named:
        return
    if router.access.token is None and not router.access.certificate:
        text = "--insecure: whoever reaches %s may push samples and take steps"
        log.warning(text, named, extra={"event": "no-token"})
    if router.access.tls is None:
        text = "no TLS: samples, and a token, travel unencrypted to and from %s"
        log.warning(text, named, extra={"event": "no-tls"})
