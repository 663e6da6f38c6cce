"""What an HTTP connection may take and must show: a place, a token, and its time.

aiohttp limits the sizes of a request, and leaves its pace to us: a client that sends its request a
byte at a time, or never reads the answer, is ended by a deadline. Who has no place among the
connections is answered short questions, and sent away.

    connected --a request that is let in--> busy --answered--> resting --the next--> busy
    (pending)                                                     |
        +--- too long, or others need it ---> ended <--- others need its place

A connection is pending until a request of it is let in, and bounded by `Pending` like strangers on
the sample plane. One that has a place and rests makes room when all places are taken, the longest
resting first, so a probe is answered whoever holds the places. Invariant: no request that is under
way is ended for another's sake.

What aiohttp logs of clients' faults are no errors of ours, and their words stay out: its parser's
errors quote the header or the line that it could not read, which may be a token. That some came is
a figure in the metrics, and a line in the log for those who look for it. Such a line is all, too,
where a client hangs up before it is answered: whatever is written to it next fails.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from pydantic_core import to_json

from rollout_dispatcher.errors import ConnectionLimit, Forbidden, Unauthorized
from rollout_dispatcher.service.access import Access, Rights
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.transport.listener import MADE_ROOM, Pending, Place

log = logging.getLogger(__name__)


class HttpPlaces:
    """The places of one HTTP plane.

    limit: connections beside those that are pending. timeout: seconds until the first request is
    there. count: told why a connection was ended.
    """

    def __init__(
        self, limit: int, pending: Pending, timeout: float, count: Callable[[str], None]
    ) -> None:
        self.limit, self.pending = limit, pending
        self._timeout, self._count = timeout, count
        #: Pending connections: their place, and the end of our patience.
        self._newcomers: dict[web.RequestHandler, tuple[Place, asyncio.TimerHandle]] = {}
        self._placed: set[web.RequestHandler] = set()
        self._resting: dict[web.RequestHandler, None] = {}  # the longest first

    def begins(self, handler: web.RequestHandler) -> bool:
        """A request of this connection may be served: returns whether there is a place for it."""
        self._resting.pop(handler, None)
        if handler not in self._newcomers:
            return True
        if len(self._placed) >= self.limit and not self._end_longest_resting():
            self._count("connection-limit")
            return False
        self._no_newcomer(handler)
        self._placed.add(handler)
        return True

    def ends(self, handler: web.RequestHandler) -> None:
        """Its request is answered."""
        if handler in self._placed:
            self._resting[handler] = None

    def close(self) -> None:
        """Forget the deadlines."""
        for handler in list(self._newcomers):
            self._no_newcomer(handler)

    def connected(self, handler: web.RequestHandler) -> None:
        """A connection is made, and pending."""

        def end(reason: str) -> None:
            self._count(reason)
            if handler.transport is not None:
                handler.transport.abort()

        deadline = asyncio.get_running_loop().call_later(self._timeout, end, "handshake-timeout")
        place = self.pending.enter(lambda: end(MADE_ROOM))
        self._newcomers[handler] = place, deadline

    def lost(self, handler: web.RequestHandler) -> None:
        """A connection is over."""
        self._placed.discard(handler)
        self._resting.pop(handler, None)
        if handler in self._newcomers:
            self._no_newcomer(handler)

    def _no_newcomer(self, handler: web.RequestHandler) -> None:
        place, deadline = self._newcomers.pop(handler)
        place.leave()
        deadline.cancel()

    def _end_longest_resting(self) -> bool:
        """Make room, if there is anybody who rests."""
        longest = next(iter(self._resting), None)
        if longest is None:
            return False
        self._count(MADE_ROOM)
        self._placed.discard(longest)
        del self._resting[longest]
        longest.force_close()
        return True


def server_log(count: Callable[[str], None]) -> logging.Logger:
    """The log for one HTTP server; malformed requests are counted by this reason."""
    found = logging.Logger(log.name)
    found.parent, found.propagate = log, True
    found.addFilter(_ClientsFaults(count))
    return found


class _ClientsFaults(logging.Filter):
    """Counts what a parser's error led to, and puts the error's kind in the place of its words."""

    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__()
        self._count = count

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; it is changed where it quotes."""
        error = record.exc_info[1] if record.exc_info else None
        kinds = [type(it).__name__ for it in _chain(error) if isinstance(it, HttpProcessingError)]
        if kinds:
            self._count("malformed")
            return _quieter(record, "a malformed HTTP request was refused: %s", kinds[0])
        if isinstance(error, ConnectionError):
            return _quieter(record, "an HTTP client hung up: %s", type(error).__name__)
        return True


def _quieter(record: logging.LogRecord, words: str, kind: str) -> bool:
    """These words instead, for those who look for them; returns whether anybody does."""
    record.msg, record.args = words, (kind,)
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return log.isEnabledFor(logging.DEBUG)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


#: Probes carry no secrets and learn none: only who serves, and whether.
OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
SCHEME = "bearer "
#: What a producer's token opens.
PUSH_ROUTES: Final = frozenset({
    "/v1/samples", "/v1/groups/{group_id}/close", "/v1/phases/{policy_version}/end",
    "/v1/stream/end", "/openapi.json",
})  # fmt: skip
#: What a client is told to wait where there is no room; a step usually takes longer than this.
RETRY_AFTER_SECONDS: Final = 1
#: Methods of requests that are answered at once, even where there is no place for a connection.
SHORT: Final = frozenset({"GET", "HEAD"})


def dumps(body: object) -> str:
    """JSON that people read too; json itself takes ten times as long, and ranks may be hundreds."""
    return to_json(body, indent=2).decode()


def indented(body: object) -> web.Response:
    """An answer of that."""
    return web.json_response(text=dumps(body) + "\n")


def problem(status: int, code: str, message: str, **headers: str) -> web.Response:
    """An error as every route answers it, and whatever no route does."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return web.json_response({"code": code, "message": message}, status=status, headers=named)


class Refused(Exception):
    """A request is not served. answer: what it is answered with instead, as by `problem`."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.answer = problem(status, code, message, **headers)


class HttpGuard:
    """Checks and times the requests of one HTTP plane; counts what it ends by reason."""

    def __init__(
        self,
        config: ServeConfig,
        access: Access,
        count: Callable[[str], None],
        clock: Callable[[], float],
        *,
        max_connections: int,
        pending: Pending,
    ) -> None:
        self._config, self._count, self._clock = config, count, clock
        self._access = access
        self._asks_certificate = access.tls_for(config.http) is not None
        self.places = places = HttpPlaces(max_connections, pending, config.handshake_timeout, count)

        class Handler(_RequestHandler):
            """Of this plane."""

            __slots__ = ()

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                places.connected(self)

            def connection_lost(self, exc: BaseException | None) -> None:
                places.lost(self)
                super().connection_lost(exc)

        self._handler = Handler

    def protocol(self, server: web.Server) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        handler = server()
        handler.__class__ = self._handler  # aiohttp makes them itself, of no class but its own
        return handler

    @property
    def middleware(self) -> Middleware:
        """What every request passes through."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = self._refusal(request)
            stays = refusal is None and self.places.begins(request.protocol)
            if refusal is None and not stays and request.method not in SHORT:
                refusal = self._no_place()
            try:
                answer = await _answered(request, handler) if refusal is None else refusal
                if not stays:
                    answer.force_close()
                await self._write(request, answer)
            finally:
                self.places.ends(request.protocol)
            return answer

        return guard

    def _no_place(self) -> web.Response:
        error = ConnectionLimit(self.places.limit)
        return problem(503, error.code, str(error), Retry_After=str(RETRY_AFTER_SECONDS))

    def _refusal(self, request: web.Request) -> web.Response | None:
        if len(request.headers.getall("Authorization", ())) > 1:  # others may heed the other one
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
        """The answer to a producer's token that is shown for more. what: it does, in words."""
        error = Forbidden(what)
        self._count(error.code)
        return problem(403, error.code, str(error))

    def may_control(self, request: web.Request) -> bool:
        """Whether it has shown what opens everything; probes are answered otherwise too."""
        try:
            return self._rights(request) is Rights.ALL
        except Unauthorized:
            return False

    def _rights(self, request: web.Request) -> Rights:
        scheme, token = _split(request.headers.get("Authorization", ""))
        if self._asks_certificate:
            self._access.check_certificate(request.get_extra_info("peercert"))
        return self._access.rights(token if scheme == SCHEME else None, self._clock())

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


class _RequestHandler(web.RequestHandler):
    """Says in JSON what no route has a word in: that a request could not be read, or answered."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log it as aiohttp does; the connection is over afterwards."""
        super().handle_error(request, status, exc, message)
        answer = failed() if status == 500 else problem(status, _code(status), message or "")
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer, be it one that was raised before anything of ours was called."""
        answer = _said(request, resp) if isinstance(resp, web.HTTPException) else resp
        return await super().finish_response(request, answer, start_time)


def failed() -> web.Response:
    """What is answered where we have failed: the log says more."""
    return problem(500, "internal", "the dispatcher has failed to answer; its log says why")


def _code(status: int) -> str:
    return HTTPStatus(status).phrase.lower().replace(" ", "-")


def _said(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    allow = {name: text for name, text in error.headers.items() if name == "Allow"}
    text = f"{request.method} {request.path}: {error.reason}"
    return problem(error.status, _code(error.status), text, **allow)


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the handler answers; where there is none, or not for this method, an error as ours."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _said(request, error)
    except Exception as error:
        log.error(
            "%s %s was not answered", request.method, request.path,
            exc_info=error, extra={"event": "bug"},
        )  # fmt: skip
        return failed()


def _split(header: str) -> tuple[str, str]:
    """Scheme with the space behind it, in lower case, and what follows."""
    return header[: len(SCHEME)].lower(), header[len(SCHEME) :].strip()
