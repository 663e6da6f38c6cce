"""`POST /v1/samples`: a body is received, waits for its turn, is read and admitted.

Requests that are held while a cap is reached (`?wait=5s`) wait in line. The first tries again
whenever something may have made room, and now and then. Invariant: what waits is bounded in number,
bytes and time, and is let go of when its client hangs up or we stop.

Invariant: of what is read of bodies and not admitted yet there is one large one's, and one small
one's, in memory; and none of this keeps the event loop for more than a piece.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_dispatcher import errors
from rollout_dispatcher.sample import Outcome, Sample
from rollout_dispatcher.service.config.values import Duration
from rollout_dispatcher.service.http.bodies import (
    PIECE,
    Body,
    Turns,
    Work,
    gunzipped,
    in_pieces,
    is_gzipped,
    refusing,
)
from rollout_dispatcher.service.http.guard import RETRY_AFTER_SECONDS, HttpPlaces, Refused
from rollout_dispatcher.service.http.samples import Read, first_of, read_samples
from rollout_dispatcher.service.http.tensors import Reading
from rollout_dispatcher.service.router import Router

#: Samples that the core is told of at once; it takes a millisecond or so.
PUSHED_AT_ONCE: Final = 64
_STATUS: Final = {Outcome.REFUSED: 422, Outcome.FULL: 429}


M = TypeVar("M", bound=BaseModel)


class Query(BaseModel):
    """What stands behind the question mark; nothing else may."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PushQuery(Query):
    """Of `POST /v1/samples`."""

    wait: Duration | None = None
    """how long the request may be held while a cap is reached, at most --set request-timeout;
    without it a push that finds no room is answered 429 at once"""


def valid(model: type[M], given: dict[str, Any], known: Iterable[str] | None = None) -> M:
    """What a request says, as this model. Raises Refused. known: keys that may be meant."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        why = first_of(error, model.model_fields if known is None else known)
        raise Refused(400, "invalid", why) from None


class SamplePush:
    """Samples that are pushed, again and again if need be. named: their ids were given."""

    def __init__(self, samples: list[Sample], *, named: bool) -> None:
        self._left = dict(enumerate(samples))
        self._outcomes = [Outcome.FULL] * len(samples)
        self._errors: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._named = named
        versions = {sample.judged_version for sample in samples}
        self._oldest = min((version for version in versions if version is not None), default=None)

    @property
    def is_full(self) -> bool:
        """Whether some of them found no room."""
        return bool(self._left)

    @property
    def nbytes(self) -> int:
        """Of memory, that those take."""
        return sum(sample.memory_bytes for sample in self._left.values())

    def attempt(self, router: Router, *, all_of_them: bool) -> Work[None]:
        """Push what is left; unless `all_of_them`, up to where nothing finds room."""
        left = list(self._left)
        for first in range(0, len(left), PUSHED_AT_ONCE):
            if first:
                yield
            some = left[first : first + PUSHED_AT_ONCE]
            answer = router.push_now(tuple(self._left[at] for at in some), named=self._named)
            for at, outcome in zip(some, answer.outcomes, strict=True):
                self._outcomes[at] = outcome
                if outcome is not Outcome.FULL:
                    del self._left[at]
            self._errors |= {str(some[index]): text for index, text in answer.errors.items()}
            self._reasons |= {str(some[index]): word for index, word in answer.reasons.items()}
            if not all_of_them and set(answer.outcomes) == {Outcome.FULL}:
                return

    def answer(self, router: Router, host: str) -> web.Response:
        """What is said of them to that host, and of where the trainer is."""
        accepted = self._outcomes.count(Outcome.ACCEPTED)
        router.pushed_over_http(host, accepted, next(iter(self._errors.values()), ""))
        worst = max((_STATUS.get(outcome, 200) for outcome in set(self._outcomes)), default=200)
        if errors.RunFinished.code in self._reasons.values():
            worst = 410
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if worst == 429 else {}
        progress = router.core.trainer_progress
        body = {
            "outcomes": self._outcomes,
            "errors": self._errors,
            "reasons": self._reasons,
            "policy_version": progress.policy_version,
            "expected_version": progress.expected_version,
            "staleness": progress.staleness(self._oldest),
            "max_staleness": router.config.max_staleness,
            "remaining": progress.remaining,
        }
        return web.json_response(body, status=worst, headers=headers)


class WaitingPushes:
    """The line of one router, of as many as `max_waiting_bodies` and `held_bytes` say."""

    def __init__(self, router: Router, places: HttpPlaces) -> None:
        self._router, self._places = router, places
        self._line = asyncio.Lock()
        self._number = self._nbytes = 0
        self._max_number = router.config.max_waiting_bodies
        self._max_nbytes = router.config.held_memory

    async def wait(self, request: web.Request, push: SamplePush, seconds: float) -> None:
        """Try what found no room again, for so long; at once back where too much waits already."""
        nbytes = push.nbytes
        if self._number >= self._max_number or self._nbytes + nbytes > self._max_nbytes:
            return
        self._number, self._nbytes = self._number + 1, self._nbytes + nbytes
        try:
            with self._places.cancelled_when_lost(request.protocol), suppress(TimeoutError):
                async with asyncio.timeout(seconds), self._line:
                    await self._try_again(push)
        finally:
            self._number, self._nbytes = self._number - 1, self._nbytes - nbytes

    async def _try_again(self, push: SamplePush) -> None:
        router = self._router
        while router.stopping is None and router.barrier.failure is None:
            moves = router.feedback.moves
            await in_pieces(push.attempt(router, all_of_them=False))
            if not push.is_full:
                return
            # As a client would that was told so: at a hard cap ranks get a smaller step for those
            # alone who keep asking.
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_AFTER_SECONDS):
                    await router.feedback.next_move(moves)


class Pushes:
    """The handler of pushes to one router."""

    def __init__(self, router: Router, places: HttpPlaces) -> None:
        self._router = router
        self._waiting = WaitingPushes(router, places)
        self._turns = Turns(router.config.max_waiting_bodies)

    async def push(self, request: web.Request) -> web.Response:
        """Accept samples: one JSON object, an array of them, or NDJSON."""
        host = request.remote or ""
        try:
            push = await self._push(request)
        except Refused as refused:
            self._router.pushed_over_http(host, 0, str(refused))
            raise
        return push.answer(self._router, host)

    async def _push(self, request: web.Request) -> SamplePush:
        config = self._router.config
        wait = valid(PushQuery, dict(request.query)).wait
        with refusing(config.request_timeout):
            self._check_serves()
            with Body(self._router.receiving) as room:
                gzipped = is_gzipped(",".join(request.headers.getall("Content-Encoding", ())))
                async with asyncio.timeout(config.request_timeout):
                    chunks = await room.read(request, config.max_body_bytes)
                push = await self._take(request, chunks, gzipped=gzipped)
            if wait is not None and push.is_full:
                await self._waiting.wait(request, push, min(wait, config.request_timeout))
        await self._router.barrier.settled()
        return push

    async def _take(
        self, request: web.Request, chunks: list[bytes], *, gzipped: bool
    ) -> SamplePush:
        """Read a body in its turn, and push what is in it. Raises ConnectionError, DispatcherError.

        What nobody waits for any more is left: it was not acknowledged, and may come again.
        """
        config = self._router.config
        small = not gzipped and sum(map(len, chunks)) <= PIECE
        async with self._turns.turn(small=small):
            if request.transport is None:
                raise ConnectionResetError
            body = b"".join(chunks)
            chunks.clear()
            if gzipped:
                body = await in_pieces(gunzipped(body, config.max_body_bytes))
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
