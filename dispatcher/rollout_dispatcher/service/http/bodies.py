"""The body of an HTTP request: received if there is room for it, and read by pieces.

A body is parsed as JSON and admitted by generators that yield after each piece, of a millisecond or
so, which is the longest that the event loop is blocked. Threads would take as long, as all of it
holds the interpreter's lock, and the loop would get that lock back only every 5 ms.

A compressed body is refused: aiohttp would decompress it before anything is counted.

A body counts among the bytes being received from before it is read until its samples are admitted:
by its Content-Length, or by its chunks as they arrive. Without room it is refused at once, with
Retry-After.
"""

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollout_dispatcher.errors import (
    BodyTooLarge,
    DispatcherError,
    IllegalTransition,
    ProtocolError,
    ReceivingFull,
    Stopping,
    UnknownEncoding,
)
from rollout_dispatcher.service.connections.receiving import Receiving
from rollout_dispatcher.service.http.guard import RETRY_AFTER_SECONDS, Refused

#: Bytes of text that are parsed at once, in less than a millisecond.
PIECE: Final = 32 * 1024

T = TypeVar("T")
Work = Generator[None, None, T]


async def in_pieces(work: Work[T]) -> T:
    """Return the work's result; other callbacks run after each piece."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Body:
    """The room of one request's body, until it is closed."""

    #: `request_timeout` ends a slow body, whether others wait or not.
    filled = None

    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._counted = 0

    def close(self) -> None:
        """Release the room."""
        self._receiving.done(self)

    def let_in(self) -> None:
        """Do nothing: a body never waits for room."""

    pause_reading = resume_reading = let_in

    async def read(self, request: web.Request, limit: int) -> bytearray:
        """Return the body. Raises ReceivingFull, BodyTooLarge, UnknownEncoding."""
        for coding in request.headers.getall("Content-Encoding", ()):
            if coding.strip().lower() not in ("", "identity"):
                raise UnknownEncoding(coding[:100])
        body, announced = bytearray(), request.content_length or 0
        if announced > limit:
            raise BodyTooLarge(limit)
        self._count(announced)
        await _ask_for(request)
        while chunk := await _next_of(request):
            body += chunk
            if len(body) > limit:
                raise BodyTooLarge(limit)
            self._count(len(body))
        return body

    def _count(self, nbytes: int) -> None:
        more, receiving = nbytes - self._counted, self._receiving
        if more <= 0:
            return
        if not receiving.claim_now(self, more):
            raise ReceivingFull(receiving.nbytes, receiving.limit)
        self._counted = nbytes


async def leave_unasked(_: web.Request) -> None:
    """Leave `Expect: 100-continue` to `Body.read`, which may refuse; aiohttp answers at once."""


async def _next_of(request: web.Request) -> bytes:
    """Return the next chunk; empty at the end. Raises ConnectionError if the connection is lost."""
    try:
        return await request.content.readany()
    except RuntimeError as error:  # raised by aiohttp if it was lost before this call
        if request.protocol.connected:
            raise
        raise ConnectionResetError("the connection ended before the body did") from error


async def _ask_for(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # aiohttp takes any output for the beginning of the answer


_STATUS: Final[dict[type[DispatcherError], int]] = {
    BodyTooLarge: 413,
    UnknownEncoding: 415,
    ReceivingFull: 503,
    Stopping: 503,
}


@contextmanager
def refusing(timeout: float) -> Iterator[None]:
    """Turn errors of a body into Refused. timeout: that of its arrival, in seconds."""
    try:
        yield
    except TimeoutError:
        why = f"the request did not arrive within {timeout:g} s"
        raise Refused(408, "timeout", why) from None
    except (ConnectionError, web.RequestPayloadError, HttpProcessingError):
        why = "the body is cut off, or its chunks are malformed"
        raise Refused(400, "invalid", why) from None
    except IllegalTransition:
        raise  # a bug of ours
    except DispatcherError as error:
        status = _STATUS.get(type(error), 400 if isinstance(error, ProtocolError) else 503)
        headers = {}
        if type(error) in _STATUS and error.retriable:
            headers["Retry_After"] = str(RETRY_AFTER_SECONDS)
        if isinstance(error, UnknownEncoding):
            headers["Accept_Encoding"] = "identity"
        code = "invalid" if status == 400 else error.code
        raise Refused(status, code, str(error), **headers) from None
