"""The body of an HTTP request, received as far as there is room for it among all that is received.

It is counted by its Content-Length before any of it is read, and by what arrives where there is
none (chunks). It never waits in line: a client that finds no room is told so at once, and when to
come again.
"""

from types import TracebackType
from typing import Self

from aiohttp import web

from rollout_dispatcher.errors import BodyTooLarge, ReceivingFull
from rollout_dispatcher.service.connections.receiving import Receiving

#: Chunks are put together up to this size: of single bytes each would take forty.
SMALL_CHUNK = 16 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Body:
    """Room for one request's body; within `with`, so that it is given back."""

    #: `--request-timeout` ends a body that does not come, whether others wait or not.
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

    put_off = take_up = let_in

    async def read(self, request: web.Request, limit: int) -> list[bytes]:
        """The whole body, as it was sent and as it came. Raises ReceivingFull, BodyTooLarge.

        It is put together in its turn: many come at once, and to copy all of them takes long.
        """
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
