"""`POST /v1/samples`: a body is received, waits for its turn, is read and admitted.

Invariant: of what is read of bodies and not admitted yet there is one large one's, and one small
one's, in memory; and none of this keeps the event loop for more than a piece.
"""

import asyncio
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import ValidationError

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
from rollout_dispatcher.service.http.bodies.body import Body
from rollout_dispatcher.service.http.bodies.encoding import Decode, decoder
from rollout_dispatcher.service.http.bodies.pieces import PIECE, Turns, in_pieces
from rollout_dispatcher.service.http.bodies.samples import Read, first_of, read_samples
from rollout_dispatcher.service.http.bodies.tensors import Reading
from rollout_dispatcher.service.http.guard import problem
from rollout_dispatcher.service.http.places import HttpPlaces
from rollout_dispatcher.service.http.requests import PushQuery
from rollout_dispatcher.service.http.sample_push import RETRY_AFTER_SECONDS, SamplePush
from rollout_dispatcher.service.http.waiting import WaitingPushes
from rollout_dispatcher.service.router import Router

_REFUSED: Final[dict[type[DispatcherError], int]] = {
    BodyTooLarge: 413,
    UnknownEncoding: 415,
    ReceivingFull: 503,
    TooManyBodies: 503,
    Stopping: 503,
}


class Pushes:
    """The handler of pushes to one router."""

    def __init__(self, router: Router, places: HttpPlaces) -> None:
        self._router = router
        self._waiting = WaitingPushes(router, places)
        self._turns = Turns(router.config.max_waiting_bodies)

    async def push(self, request: web.Request) -> web.Response:
        """Accept samples: one JSON object, an array of them, or NDJSON."""
        config = self._router.config
        try:
            wait = PushQuery.model_validate(dict(request.query)).wait
        except ValidationError as error:
            return problem(400, "invalid", first_of(error, PushQuery.model_fields))
        try:
            self._check_serves()
            with Body(self._router.receiving) as room:
                decode = decoder(",".join(request.headers.getall("Content-Encoding", ())))
                async with asyncio.timeout(config.request_timeout):
                    chunks = await room.read(request, config.max_body_bytes)
                push = await self._take(request, chunks, decode)
            if wait is not None and push.is_full:
                await self._waiting.wait(request, push, min(wait, config.request_timeout))
        except TimeoutError:
            timeout = config.request_timeout
            return problem(408, "timeout", f"the request did not arrive within {timeout:g} s")
        except (ConnectionError, web.RequestPayloadError, HttpProcessingError):
            return problem(400, "invalid", "the body is cut off, or its chunks are malformed")
        except DispatcherError as error:
            return _refusal(error)
        await self._router.barrier.settled()
        return push.answer(self._router)

    async def _take(
        self, request: web.Request, chunks: list[bytes], decode: Decode | None
    ) -> SamplePush:
        """Read a body in its turn, and push what is in it. Raises ConnectionError, DispatcherError.

        What nobody waits for any more is left: it was not acknowledged, and may come again.
        """
        config = self._router.config
        small = decode is None and sum(map(len, chunks)) <= PIECE
        async with self._turns.turn(small=small):
            if request.transport is None:
                raise ConnectionResetError
            body = b"".join(chunks)
            chunks.clear()
            if decode is not None:
                body = await in_pieces(decode(body, config.max_body_bytes))
            read = await self._read(body)
            self._check_serves()
            self._router.metrics.loss_positions_left_out.inc(read.left_out)
            push = SamplePush(read.samples, named=read.named)
            del read
            await in_pieces(push.attempt(self._router, all_of_them=True))
            return push

    async def _read(self, body: bytes) -> Read:
        """As `read_samples`: once more if the run's fields were decided meanwhile."""
        reading = self._reading()
        found = await in_pieces(read_samples(body, reading))
        if reading.schema is not None or (decided := self._reading()).schema is None:
            return found
        del found  # there is one body's in memory
        return await in_pieces(read_samples(body, decided))

    def _reading(self) -> Reading:
        config, known = self._router.config, self._router.core.schema
        schema = None if known is None else known[0]
        return Reading(config.group_size, schema, config.allow_non_finite)

    def _check_serves(self) -> None:
        """Raise why nothing can be taken now, if that is so."""
        if (why := self._router.stopping or self._router.barrier.failure) is not None:
            raise why


def _refusal(error: DispatcherError) -> web.Response:
    """Why a body was not taken."""
    if isinstance(error, IllegalTransition):
        raise error  # a bug of ours
    status = _REFUSED.get(type(error), 400 if isinstance(error, ProtocolError) else 503)
    code = "invalid" if status == 400 else error.code
    headers = (
        {"Retry_After": str(RETRY_AFTER_SECONDS)}
        if type(error) in _REFUSED and error.retriable
        else {}
    )
    if isinstance(error, UnknownEncoding):
        headers["Accept_Encoding"] = error.supported
    return problem(status, code, str(error), **headers)
