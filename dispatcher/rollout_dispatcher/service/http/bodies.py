"""The body of an HTTP request: received as far as there is room, and read by pieces.

Nobody else on the event loop waits for more than a piece.

A request body is read as JSON and admitted by generators that yield after each piece, in a
millisecond or so. In threads it would take as long, as all of it holds the interpreter's lock,
and the loop would get that lock back only every 5 ms.

Of large bodies one is worked on at a time, in order of arrival, so that however many wait there is
one piece a turn of the loop, and memory for what is read of one. Small ones have a line of their
own.

A compressed body is refused: aiohttp would decompress as it arrives, before anything is counted.

Among all that is received a body is counted by its Content-Length before any of it is read, and by
what arrives where there is none (chunks). It never waits in line: a client that finds no room is
told so at once, and when to come again.
"""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollout_dispatcher.errors import (
    BodyTooLarge,
    DispatcherError,
    IllegalTransition,
    ProtocolError,
    ReceivingFull,
    Stopping,
    TooManyBodies,
    UnknownEncoding,
)
from rollout_dispatcher.service.connections.receiving import Receiving
from rollout_dispatcher.service.http.guard import RETRY_AFTER_SECONDS, Refused

#: Bytes of text that are read at once; takes under a millisecond.
PIECE: Final = 32 * 1024

T = TypeVar("T")
Work = Generator[None, None, T]


async def in_pieces(work: Work[T]) -> T:
    """What comes of the work, which lets others in after each piece."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


class Turns:
    """Who may work on a body: one large and one small at a time. limit: bodies that may wait."""

    def __init__(self, limit: int) -> None:
        self._limit, self._waiting = limit, 0
        self._small, self._large = asyncio.Lock(), asyncio.Lock()

    @asynccontextmanager
    async def turn(self, *, small: bool) -> AsyncIterator[None]:
        """Wait for a turn, and have it. Raises TooManyBodies if as many wait as may."""
        line = self._small if small else self._large
        if line.locked() and self._waiting >= self._limit:
            raise TooManyBodies(self._limit)
        self._waiting += 1
        try:
            await line.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            line.release()


#: Chunks are put together up to this size: of single bytes each would take forty.
SMALL_CHUNK = 16 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Body:
    """Room for one request's body; within `with`, so that it is given back."""

    #: `request_timeout` ends a body that does not come, whether others wait or not.
    filled = None

    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._counted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.done()

    def done(self) -> None:
        """It was handed on."""
        self._receiving.done(self)

    def let_in(self) -> None:
        """Nothing to do: it never waits."""

    pause_reading = resume_reading = let_in

    async def read(self, request: web.Request, limit: int) -> list[bytes]:
        """The whole body as it came. Raises ReceivingFull, BodyTooLarge, UnknownEncoding.

        It is put together in its turn: many come at once, and to copy all of them takes long.
        """
        for coding in request.headers.getall("Content-Encoding", ()):
            if coding.strip().lower() not in ("", "identity"):
                raise UnknownEncoding(coding[:100])
        chunks, nbytes, announced = list[bytes](), 0, request.content_length or 0
        if announced > limit:
            raise BodyTooLarge(limit)
        self._count(announced)
        await _ask_for(request)
        while chunk := await _next_of(request):
            nbytes += len(chunk)
            if nbytes > limit:
                raise BodyTooLarge(limit)
            self._count(nbytes)
            if chunks and len(chunks[-1]) + len(chunk) <= SMALL_CHUNK:
                chunks[-1] += chunk
            else:
                chunks.append(chunk)
        return chunks

    def _count(self, nbytes: int) -> None:
        more, receiving = nbytes - self._counted, self._receiving
        if more <= 0:
            return
        if not receiving.claim_now(self, more):
            raise ReceivingFull(receiving.nbytes, receiving.limit)
        self._counted = nbytes


async def leave_unasked(_: web.Request) -> None:
    """An `Expect: 100-continue` waits until the body is wanted; aiohttp would answer it first."""


async def _next_of(request: web.Request) -> bytes:
    """What has come of the body; empty at its end. Raises ConnectionError if nothing more comes."""
    try:
        return await request.content.readany()
    except RuntimeError as error:  # aiohttp's word for it, if it was lost before it was waited for
        if request.protocol.connected:
            raise
        raise ConnectionResetError("the connection ended before the body did") from error


async def _ask_for(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # or aiohttp takes it for the beginning of the answer


_STATUS: Final[dict[type[DispatcherError], int]] = {
    BodyTooLarge: 413,
    UnknownEncoding: 415,
    ReceivingFull: 503,
    TooManyBodies: 503,
    Stopping: 503,
}


@contextmanager
def refusing(timeout: float) -> Iterator[None]:
    """Raise Refused for what is wrong with a body, or with how it comes within so many seconds."""
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
