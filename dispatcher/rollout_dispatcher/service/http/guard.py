"""What an HTTP request must show, and how long it may take.

aiohttp limits the sizes of a request, and leaves its pace to us: a client that sends its request a
byte at a time, or never reads the answer, is ended by a deadline, and there are never more
connections than the limit.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rollout_dispatcher.errors import ConnectionLimit, Unauthorized
from rollout_dispatcher.service.access import Access
from rollout_dispatcher.service.config.options import ServeConfig

log = logging.getLogger(__name__)

#: Probes carry no secrets and learn none: only who serves, and whether.
OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
SCHEME = "bearer "


def problem(status: int, code: str, message: str, **headers: str) -> web.Response:
    """An error as every route answers it."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return web.json_response({"code": code, "message": message}, status=status, headers=named)


class HttpGuard:
    """Checks and times the requests of one HTTP plane; counts what it ends by reason."""

    def __init__(self, config: ServeConfig, access: Access, count: Callable[[str], None]) -> None:
        self._config, self._count = config, count
        self._access = access if access.tls_for(config.http) else Access(access.token)
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def protocol(self, server: web.Server) -> asyncio.BaseProtocol:
        """The protocol of a new connection, which has a while to ask for something."""
        limit = self._config.max_connections
        if len(server.connections) >= limit:
            self._count("connection-limit")
            return _Busy(ConnectionLimit(limit))
        handler = server()
        loop, timeout = asyncio.get_running_loop(), self._config.handshake_timeout
        self._silent[handler] = loop.call_later(timeout, self._end_silent, handler)
        return handler

    def close(self) -> None:
        """Forget the deadlines."""
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()

    @property
    def middleware(self) -> Middleware:
        """What every request passes through."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if (timer := self._silent.pop(request.protocol, None)) is not None:
                timer.cancel()
            refusal = None if request.path in OPEN_PATHS else self._refusal(request)
            answer = await _answered(request, handler) if refusal is None else refusal
            await self._write(request, answer)
            return answer

        return guard

    def _refusal(self, request: web.Request) -> web.Response | None:
        scheme, token = _split(request.headers.get("Authorization", ""))
        try:
            self._access.check_certificate(request.get_extra_info("peercert"))
            self._access.check_token(token if scheme == SCHEME else None)
        except Unauthorized as error:
            self._count(error.code)
            return problem(401, error.code, str(error), WWW_Authenticate="Bearer")
        return None

    async def _write(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Write the answer, which aiohttp would do without a deadline."""
        try:
            async with asyncio.timeout(self._config.write_timeout):
                await answer.prepare(request)
                await answer.write_eof()
        except ConnectionError:
            pass  # nobody is left to read it; aiohttp notices by itself
        except TimeoutError:
            self._count("write-timeout")
            if request.transport is not None:
                request.transport.abort()

    def _end_silent(self, handler: web.RequestHandler) -> None:
        del self._silent[handler]
        if handler.transport is not None:
            self._count("handshake-timeout")
            handler.force_close()


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the handler answers; where there is none, or not for this method, an error as ours."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        allow = {name: text for name, text in error.headers.items() if name == "Allow"}
        code = error.reason.lower().replace(" ", "-")
        return problem(
            error.status, code, f"{request.method} {request.path}: {error.reason}", **allow
        )


def _split(header: str) -> tuple[str, str]:
    """Scheme with the space behind it, in lower case, and what follows."""
    return header[: len(SCHEME)].lower(), header[len(SCHEME) :].strip()


class _Busy(asyncio.Protocol):
    """Turns a connection away."""

    def __init__(self, error: ConnectionLimit) -> None:
        self._body = f"{error}\n".encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        head = f"Content-Length: {len(self._body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head.encode() + self._body)
        transport.close()
