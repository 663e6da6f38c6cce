"""The body of an HTTP request, received as far as there is room for it among all that is received.

It is counted by its Content-Length before any of it is read, and by what arrives where there is
none, or more comes than it says (chunks, compression). It never waits in line: a client that finds
no room is told so at once, and when to come again.
"""

from types import TracebackType
from typing import Self

from aiohttp import web

from rollout_dispatcher.errors import ReceivingFull
from rollout_dispatcher.service.connections.receiving import Receiving


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

    async def read(self, request: web.Request, limit: int) -> bytearray:
        """The whole body. Raises ReceivingFull; for more than `limit` bytes, aiohttp's 413."""
        body, announced = bytearray(), request.content_length or 0
        if announced > limit:
            raise web.HTTPRequestEntityTooLarge(limit, announced)
        self._count(announced)
        while chunk := await request.content.readany():
            if len(body) + len(chunk) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, len(body) + len(chunk))
            self._count(len(body) + len(chunk))
            body += chunk
        return body

    def _count(self, nbytes: int) -> None:
        more, receiving = nbytes - self._counted, self._receiving
        if more <= 0:
            return
        if not receiving.claim_now(self, more):
            raise ReceivingFull(receiving.nbytes, receiving.limit)
        self._counted = nbytes
