"""Connections of the HTTP plane: their number, their deadlines, and the tokens of requests.

aiohttp limits the sizes of a request. Deadlines are set here, for clients that send a request a
byte at a time or never read the answer. A connection beyond the limit gets only short answers
(health, errors) and is closed.

    connected --a request is served--> busy --answered--> idle --the next request--> busy
    (pending)                                              |
        +--- deadline, or room for others ---> closed <--- room for others

A connection is pending until a request of it is served; `Pending` bounds those, as on the sample
plane. At the limit the connection that has been idle longest is closed, so a probe is answered
whoever holds the others. Invariant: no request under way is ended for another's sake.

aiohttp logs errors of clients as errors, and its parser's messages quote headers, which may be a
token. Here they are counted, and logged at DEBUG by their kind alone.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from pydantic_core import to_json

from rollout_dispatcher.errors import ConnectionLimit, Forbidden, Unauthorized
from rollout_dispatcher.service.access import Rights
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.transport.listener import MADE_ROOM, Pending, Place

log = logging.getLogger(__name__)


class HttpConnections:
    """The connections of one HTTP plane.

    limit: connections beside the pending ones. timeout: seconds until the first request is there.
    count: called with the reason why a connection was closed.
    """

    def __init__(
        self, limit: int, pending: Pending, timeout: float, count: Callable[[str], None]
    ) -> None:
        self.limit, self.pending = limit, pending
        self._timeout, self._count = timeout, count
        #: Pending connections: their place among all pending ones, and their deadline.
        self._newcomers: dict[web.RequestHandler, tuple[Place, asyncio.TimerHandle]] = {}
        self._admitted: set[web.RequestHandler] = set()
        self._idle: dict[web.RequestHandler, None] = {}  # the longest first

    def connected(self, handler: web.RequestHandler) -> None:
        """Add a pending connection."""

        def end(reason: str) -> None:
            self._count(reason)
            if handler.transport is not None:
                handler.transport.abort()

        deadline = asyncio.get_running_loop().call_later(self._timeout, end, "handshake-timeout")
        place = self.pending.enter(lambda: end(MADE_ROOM))
        self._newcomers[handler] = place, deadline

    def begin_request(self, handler: web.RequestHandler) -> bool:
        """Admit the connection of a request, closing an idle one if need be; False if none is."""
        self._idle.pop(handler, None)
        if handler not in self._newcomers:
            return True
        if len(self._admitted) >= self.limit and not self._close_longest_idle():
            self._count("connection-limit")
            return False
        self._not_pending(handler)
        self._admitted.add(handler)
        return True

    def end_request(self, handler: web.RequestHandler) -> None:
        """Mark an admitted connection as idle."""
        if handler in self._admitted:
            self._idle[handler] = None

    def is_pending(self, handler: web.RequestHandler) -> bool:
        """Return whether no request of it was admitted."""
        return handler in self._newcomers

    def lost(self, handler: web.RequestHandler) -> None:
        """Remove a connection that has ended."""
        self._admitted.discard(handler)
        self._idle.pop(handler, None)
        if handler in self._newcomers:
            self._not_pending(handler)

    def close(self) -> None:
        """Cancel the deadlines."""
        for handler in list(self._newcomers):
            self._not_pending(handler)

    def _not_pending(self, handler: web.RequestHandler) -> None:
        place, deadline = self._newcomers.pop(handler)
        place.leave()
        deadline.cancel()

    def _close_longest_idle(self) -> bool:
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        self._count(MADE_ROOM)
        self._admitted.discard(longest)
        del self._idle[longest]
        longest.force_close()
        return True


def log_error(what: str, error: BaseException | None, count: Callable[[str], None]) -> None:
    """Log what failed and why; errors of clients are counted and logged at DEBUG, unquoted."""
    cause = error
    while cause is not None:
        if isinstance(cause, HttpProcessingError):
            count("malformed")
            log.debug("a malformed HTTP request was refused: %s", type(cause).__name__)
            return
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ConnectionError):
        log.debug("an HTTP client hung up: %s", type(error).__name__)
    else:
        log.error("%s", what, exc_info=error, extra={"event": "bug"})


#: Probes need no token: their answers hold no names of clients.
OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
SCHEME = "bearer "
#: Routes that a producer's token opens.
PUSH_ROUTES: Final = frozenset({
    "/v1/samples", "/v1/groups/{group_id}/close", "/v1/phases/{policy_version}/end",
    "/v1/stream/end", "/openapi.json",
})  # fmt: skip
#: `Retry-After` where there is no room; a step usually takes longer.
RETRY_AFTER_SECONDS: Final = 1
#: Methods of requests that are answered on connections beyond the limit too.
SHORT: Final = frozenset({"GET", "HEAD"})


def dumps(body: object) -> str:
    """Return indented JSON; json takes ten times as long, and ranks may be hundreds."""
    return to_json(body, indent=2).decode()


def indented(body: object) -> web.Response:
    """Answer with indented JSON."""
    return web.json_response(text=dumps(body) + "\n")


def problem(status: int, code: str, message: str, **headers: str) -> web.Response:
    """Return the answer to a request that failed, which has one form for all."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return web.json_response({"code": code, "message": message}, status=status, headers=named)


class Refused(Exception):
    """A request is refused. answer: as `problem` makes it."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.answer = problem(status, code, message, **headers)


class HttpGuard:
    """Authorizes the requests of a router's HTTP plane, and limits its connections.

    count: called with the reason whenever a request is refused or a connection closed here.
    """

    def __init__(self, config: ServeConfig, router: Router, count: Callable[[str], None]) -> None:
        self._router, self._count = router, count
        self._asks_certificate = router.access.tls_for(config.http) is not None
        limit, timeout = router.limits.http, config.handshake_timeout
        self.connections = HttpConnections(limit, router.http_pending, timeout, count)
        self._handler = _handler_of(self.connections, count, config.write_timeout)

    def protocol(self, server: web.Server) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection."""
        handler = server()
        handler.__class__ = self._handler  # aiohttp makes them itself, of no class but its own
        return handler

    @property
    def middleware(self) -> Middleware:
        """Admits requests, or answers why not."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = self._refusal(request)
            if refusal is None:
                is_admitted = self.connections.begin_request(request.protocol)
                if is_admitted or request.method in SHORT:
                    return await handler(request)
                error = ConnectionLimit(self.connections.limit)
                retry = str(RETRY_AFTER_SECONDS)
                refusal = problem(503, error.code, str(error), Retry_After=retry)
            refusal.force_close()
            return refusal

        return guard

    def _refusal(self, request: web.Request) -> web.Response | None:
        # Of two headers a proxy may have checked the other one.
        if len(request.headers.getall("Authorization", ())) > 1:
            return problem(400, "invalid", "the request has more than one Authorization header")
        if request.path in OPEN_PATHS:
            return None
        resource = request.match_info.route.resource
        try:
            rights = self._rights(request)
        except Unauthorized as error:
            self._count(error.code)
            return problem(401, error.code, str(error), WWW_Authenticate="Bearer")
        if rights is Rights.PUSH and (resource is None or resource.canonical not in PUSH_ROUTES):
            return self.forbidden(f"{request.method} {request.path}")
        return None

    def forbidden(self, what: str) -> web.Response:
        """Return the answer to a producer's token. what: which act it does not open, in words."""
        error = Forbidden(what)
        self._count(error.code)
        return problem(403, error.code, str(error))

    def may_control(self, request: web.Request) -> bool:
        """Return whether a request shows the token that opens everything, or none is required."""
        try:
            return self._rights(request) is Rights.ALL
        except Unauthorized:
            return False

    def _rights(self, request: web.Request) -> Rights:
        header = request.headers.get("Authorization", "")
        scheme, token = header[: len(SCHEME)].lower(), header[len(SCHEME) :].strip()
        access = self._router.access
        if self._asks_certificate:
            access.check_certificate(request.get_extra_info("peercert"))
        return access.rights(token if scheme == SCHEME else None, self._router.clock())


def _handler_of(
    connections: HttpConnections, count: Callable[[str], None], write_timeout: float
) -> type[web.RequestHandler]:
    """Return aiohttp's handler of a connection, with our limits and our form of errors."""

    class Handler(web.RequestHandler):
        __slots__ = ()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            connections.connected(self)

        def connection_lost(self, exc: BaseException | None) -> None:
            connections.lost(self)
            super().connection_lost(exc)

        def log_exception(self, *args: Any, **kw: Any) -> None:
            log_error(str(args[0]), kw.get("exc_info"), count)

        def handle_error(
            self,
            request: web.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> web.StreamResponse:
            log_error(f"{request.method} {request.path} was not answered", exc, count)
            if request.writer.output_size > 0:
                raise ConnectionError("a part of the answer was sent already")
            if status == 500:
                message = "the dispatcher has failed to answer; its log says why"
                answer = problem(500, "internal", message)
            else:
                answer = problem(status, _code(status), message or "")
            answer.force_close()
            return answer

        async def finish_response(
            self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
        ) -> tuple[web.StreamResponse, bool]:
            answer = _from_exception(request, resp) if isinstance(resp, web.HTTPException) else resp
            if connections.is_pending(self):
                answer.force_close()
            try:
                async with asyncio.timeout(write_timeout):
                    return await super().finish_response(request, answer, start_time)
            except TimeoutError:
                count("write-timeout")
                if self.transport is not None:
                    self.transport.abort()
                return answer, True
            finally:
                connections.end_request(self)

    return Handler


def _code(status: int) -> str:
    return HTTPStatus(status).phrase.lower().replace(" ", "-")


def _from_exception(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    allow = {name: text for name, text in error.headers.items() if name == "Allow"}
    text = f"{request.method} {request.path}: {error.reason}"
    return problem(error.status, _code(error.status), text, **allow)
