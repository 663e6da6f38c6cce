"""`POST /v1/samples`: a body is received, waits for its turn, is read and admitted.

What finds no room is answered `full`, and 429: its client pushes it again. Invariant: of what is
read of bodies and not admitted yet there is one large one's, and one small one's, in memory; and
none of this keeps the event loop for more than a piece.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_dispatcher import errors
from rollout_dispatcher.sample import Outcome, Sample
from rollout_dispatcher.service.http.bodies import (
    PIECE,
    Body,
    Turns,
    Work,
    in_pieces,
    refusing,
)
from rollout_dispatcher.service.http.guard import RETRY_AFTER_SECONDS, Refused
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


def valid(model: type[M], given: dict[str, Any], known: Iterable[str] | None = None) -> M:
    """What a request says, as this model. Raises Refused. known: keys that may be meant."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        why = first_of(error, model.model_fields if known is None else known)
        raise Refused(400, "invalid", why) from None


class SamplePush:
    """Samples that are pushed. named: their ids were given."""

    def __init__(self, samples: list[Sample], *, named: bool) -> None:
        self._samples, self._named = samples, named
        self._outcomes: list[Outcome] = []
        self._errors: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        versions = {sample.judged_version for sample in samples}
        self._oldest = min((version for version in versions if version is not None), default=None)

    def push(self, router: Router) -> Work[None]:
        """Push all of them, some at a time."""
        for first in range(0, len(self._samples), PUSHED_AT_ONCE):
            if first:
                yield
            some = tuple(self._samples[first : first + PUSHED_AT_ONCE])
            answer = router.push_now(some, named=self._named)
            self._outcomes += answer.outcomes
            self._errors |= {str(first + index): text for index, text in answer.errors.items()}
            self._reasons |= {str(first + index): word for index, word in answer.reasons.items()}
        self._samples = []

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


class Pushes:
    """The handler of pushes to one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
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
        valid(Query, dict(request.query))
        with refusing(config.request_timeout):
            self._check_serves()
            with Body(self._router.receiving) as room:
                async with asyncio.timeout(config.request_timeout):
                    chunks = await room.read(request, config.max_body_bytes)
                push = await self._take(request, chunks)
        await self._router.barrier.settled()
        return push

    async def _take(self, request: web.Request, chunks: list[bytes]) -> SamplePush:
        """Read a body in its turn, and push what is in it. Raises ConnectionError, DispatcherError.

        What nobody waits for any more is left: it was not acknowledged, and may come again.
        """
        small = sum(map(len, chunks)) <= PIECE
        async with self._turns.turn(small=small):
            if request.transport is None:
                raise ConnectionResetError
            body = b"".join(chunks)
            chunks.clear()
            read = await self._read(body)
            self._check_serves()
            self._router.metrics.loss_positions_left_out.inc(read.left_out)
            push = SamplePush(read.samples, named=read.named)
            del read
            await in_pieces(push.push(self._router))
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
