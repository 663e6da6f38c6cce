"""`POST /v1/samples`: a body is received, parsed and admitted.

Samples without room are answered `full`, and 429: the client pushes them again. One large body and
one small one are parsed at a time, in order of arrival. Invariant: parsed samples of one of each
are in memory, and the event loop is never blocked for more than a piece.
"""

import asyncio
from collections.abc import Iterable
from contextlib import closing
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_dispatcher import errors
from rollout_dispatcher.sample import Outcome, Sample
from rollout_dispatcher.service.http.bodies import (
    PIECE,
    Body,
    Work,
    in_pieces,
    refusing,
)
from rollout_dispatcher.service.http.guard import RETRY_AFTER_SECONDS, Refused
from rollout_dispatcher.service.http.samples import Read, first_of, read_samples
from rollout_dispatcher.service.http.tensors import Reading
from rollout_dispatcher.service.router import Router

#: Samples that are pushed to the core at once, in a millisecond or so.
PUSHED_AT_ONCE: Final = 64
_STATUS: Final = {Outcome.REFUSED: 422, Outcome.FULL: 429}


M = TypeVar("M", bound=BaseModel)


class Query(BaseModel):
    """The query of a URL, without unknown keys."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def valid(model: type[M], given: dict[str, Any], known: Iterable[str] | None = None) -> M:
    """Return a request's values as this model. Raises Refused. known: keys to suggest."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        why = first_of(error, model.model_fields if known is None else known)
        raise Refused(400, "invalid", why) from None


class SamplePush:
    """Samples of one request. named: their ids were given."""

    def __init__(self, samples: list[Sample], *, named: bool) -> None:
        self._samples, self._named = samples, named
        self._outcomes: list[Outcome] = []
        self._errors: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        versions = {sample.judged_version for sample in samples}
        self._oldest = min((version for version in versions if version is not None), default=None)

    def push(self, router: Router) -> Work[None]:
        """Push them to the core, some at a time."""
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
        """Return the answer to that host: their outcomes, and the trainer's progress."""
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
        self._small, self._large = asyncio.Lock(), asyncio.Lock()

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
            with closing(Body(self._router.receiving)) as room:
                async with asyncio.timeout(config.request_timeout):
                    body = await room.read(request, config.max_body_bytes)
                push = await self._take(request, body)
        await self._router.barrier.settled()
        return push

    async def _take(self, request: web.Request, body: bytearray) -> SamplePush:
        """Parse a body and push its samples. Raises ConnectionError, DispatcherError."""
        async with self._small if len(body) <= PIECE else self._large:
            if request.transport is None:  # its samples are not acknowledged, and may come again
                raise ConnectionResetError
            read = await self._read(body)
            self._check_serves()
            self._router.metrics.loss_positions_left_out.inc(read.left_out)
            push = SamplePush(read.samples, named=read.named)
            del read
            await in_pieces(push.push(self._router))
            return push

    async def _read(self, body: bytearray) -> Read:
        """Parse as `read_samples`; once more if the run's fields were decided meanwhile."""
        reading = self._reading()
        found = await in_pieces(read_samples(body, reading))
        if reading.schema is not None or (decided := self._reading()).schema is None:
            return found
        del found
        return await in_pieces(read_samples(body, decided))

    def _reading(self) -> Reading:
        config, known = self._router.config, self._router.core.schema
        schema = None if known is None else known[0]
        return Reading(config.group_size, schema, config.allow_non_finite)

    def _check_serves(self) -> None:
        """Raise the error that keeps samples from being accepted, if there is one."""
        if (why := self._router.stopping or self._router.barrier.failure) is not None:
            raise why
