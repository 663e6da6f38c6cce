"""The HTTP plane: metrics, health, status, and pushes from producers in any language.

aiohttp parses, limits and serves; here is only what the answers mean. Reading a large body as JSON
happens in a worker thread, so that it does not keep the sample plane waiting.
"""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Annotated

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_dispatcher import __version__
from rollout_dispatcher.core.decision import Decision
from rollout_dispatcher.errors import DispatcherError, ReceivingFull
from rollout_dispatcher.sample import Outcome, Sample
from rollout_dispatcher.service.config.types import RUN_HEADER, VERSION_HEADER
from rollout_dispatcher.service.http.body import Body
from rollout_dispatcher.service.http.guard import HttpGuard, problem
from rollout_dispatcher.service.http.samples import PushRequest, parse_body
from rollout_dispatcher.service.http.tensors import Reading
from rollout_dispatcher.service.router import Router

#: What a producer is told to wait when a cap is reached; a step usually takes longer than this.
RETRY_AFTER_SECONDS = 1
#: All policy versions are below 2**53, on this plane as on the other.
MAX_VERSION_DIGITS = 15
#: Producers that are named as awaited.
MAX_NAMED = 100
_STATUS = {Outcome.REFUSED: 422, Outcome.FULL: 429}


class HttpPlane:
    """Handlers over one router."""

    def __init__(self, router: Router, guard: HttpGuard) -> None:
        self._router, self._guard = router, guard

    def application(self) -> web.Application:
        """The routes. Bodies are limited to the size of a frame."""
        app = web.Application(
            client_max_size=self._router.config.max_frame_bytes,
            middlewares=[self._guard.middleware],
        )
        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/livez", self.livez),
                web.get("/readyz", self.readyz),
                web.get("/statusz", self.statusz),
                web.get("/openapi.json", self.openapi),
                web.post("/v1/samples", self.push),
                web.post("/v1/groups/{group_id}/close", self.close_group),
                web.post("/v1/phases/{policy_version}/end", self.end_phase),
                web.post("/v1/stream/end", self.end_stream),
            ]
        )
        return app

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text format."""
        body = generate_latest(self._router.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def livez(self, _: web.Request) -> web.Response:
        """The process serves."""
        return web.Response(text="ok\n", headers=self._identity())

    async def readyz(self, _: web.Request) -> web.Response:
        """Samples are accepted. Ranks that are absent are named, and do not make it unready."""
        at, failure = self._router.core.statistics(), self._router.barrier.failure
        ready = at.run_state == "running" and failure is None
        lines = [f"{'ok' if ready else 'not ready'}: {failure or at.run_state}"]
        lines.append(
            f"the next step waits for: {self._router.core.waits_for(self._router.clock())}"
        )
        if at.absent_ranks:
            lines.append(f"absent DP ranks: {', '.join(map(str, at.absent_ranks))}")
        text, status = "\n".join(lines) + "\n", 200 if ready else 503
        return web.Response(text=text, status=status, headers=self._identity())

    def _identity(self) -> dict[str, str]:
        """Who answers, for those who would take another server for this one."""
        return {RUN_HEADER: self._router.core.run_id, VERSION_HEADER: __version__}

    async def statusz(self, _: web.Request) -> web.Response:
        """A snapshot for a person."""
        at = self._router.core.statistics()
        status = dataclasses.asdict(at)
        del status["lengths"]  # a histogram, for /metrics
        status |= {
            "version": __version__,
            "accepted": at.accepted,
            "balanced": at.balanced,
            "waits_for": self._router.core.waits_for(self._router.clock()),
            "config": self._router.config.model_dump(mode="json"),
        }
        return web.json_response(status, dumps=lambda value: json.dumps(value, indent=2) + "\n")

    async def openapi(self, _: web.Request) -> web.Response:
        """A description of this plane."""
        return web.json_response(_describe())

    async def push(self, request: web.Request) -> web.Response:
        """Accept samples: one JSON object, an array of them, or NDJSON."""
        with Body(self._router.receiving) as body:
            return await self._receive(request, body)

    async def _receive(self, request: web.Request, room: Body) -> web.Response:
        config = self._router.config
        try:
            async with asyncio.timeout(config.request_timeout):
                body = await room.read(request, config.max_frame_bytes)
        except ReceivingFull as error:
            return problem(503, error.code, str(error), Retry_After=str(RETRY_AFTER_SECONDS))
        except TimeoutError:
            timeout = config.request_timeout
            return problem(408, "timeout", f"the request did not arrive within {timeout:g} s")
        except ConnectionError:  # nobody is left to read this, and it is no fault of ours
            return problem(400, "invalid", "the connection ended before the body did")
        try:
            samples, named = await asyncio.to_thread(parse_body, body, self._reading())
        except ValidationError as error:
            return _invalid(error)
        except (DispatcherError, ValueError) as error:
            return problem(400, "invalid", str(error))
        return await self._push(samples, named, room)

    def _reading(self) -> Reading:
        config, known = self._router.config, self._router.core.schema
        schema = None if known is None else known[0]
        return Reading(config.group_size, schema, config.allow_non_finite)

    async def _push(self, samples: tuple[Sample, ...], named: bool, room: Body) -> web.Response:
        if (failure := self._router.barrier.failure) is not None:
            return problem(503, failure.code, str(failure))
        answer = self._router.push_now(samples, named=named)
        room.done()
        await self._router.barrier.settled()
        worst = max((_STATUS.get(outcome, 200) for outcome in answer.outcomes), default=200)
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if worst == 429 else {}
        body = {
            "outcomes": list(answer.outcomes),
            "errors": {str(index): text for index, text in answer.errors.items()},
        }
        return web.json_response(body, status=worst, headers=headers)

    async def close_group(self, request: web.Request) -> web.Response:
        """No further member will come, or none beyond `size`."""
        try:
            asked = CloseRequest.model_validate(dict(request.query))
        except ValidationError as error:
            return _invalid(error)
        batch = None if self._router.config.by_groups else self._router.config.batch
        if asked.size is not None and batch is not None and asked.size > batch:
            text = f"a step takes at most {batch} samples, and the group has {asked.size}"
            return problem(422, "group-too-large", text)
        group_id, now = request.match_info["group_id"], self._router.clock()
        core = self._router.core
        return await self._tell(
            lambda: core.close_group(group_id, now, size=asked.size, keep=asked.keep)
        )

    async def end_phase(self, request: web.Request) -> web.Response:
        """No sample older than this policy version comes over HTTP any more; or from anybody."""
        version = request.match_info["policy_version"]
        if not version.isdecimal() or len(version) > MAX_VERSION_DIGITS:
            text = f"policy version {version[:40]!r} is no number of {MAX_VERSION_DIGITS} digits"
            return problem(400, "invalid", text)
        return await self._end(request, int(version))

    async def end_stream(self, request: web.Request) -> web.Response:
        """No sample comes over HTTP any more; with `force` from anybody."""
        return await self._end(request, None)

    async def _end(self, request: web.Request, version: int | None) -> web.Response:
        try:
            force = EndRequest.model_validate(dict(request.query)).force
        except ValidationError as error:
            return _invalid(error)
        core, now = self._router.core, self._router.clock()
        if version is None:
            end = partial(core.end_stream, now, force=force)
        else:
            end = partial(core.end_phase, version, now, force=force)
        return await self._tell(end, partial(core.end_waits, version))

    async def _tell(
        self,
        say: Callable[[], Decision],
        waits: Callable[[], list[str]] = list,
    ) -> web.Response:
        """Answer once what was said is durable; waits: producers whose word is still awaited."""
        if (failure := self._router.barrier.failure) is not None:
            return problem(503, failure.code, str(failure))
        self._router.perform(say())
        await self._router.barrier.settled()
        return web.json_response({"waits_for": waits()[:MAX_NAMED]})


class CloseRequest(BaseModel):
    """What `POST /v1/groups/ID/close` can be told, in the query."""

    model_config = ConfigDict(extra="forbid")
    size: Annotated[int, Field(ge=1)] | None = None
    keep: bool | None = None


class EndRequest(BaseModel):
    """What the ends of a phase and of the stream can be told, in the query."""

    model_config = ConfigDict(extra="forbid")
    force: bool = False


def _invalid(error: ValidationError) -> web.Response:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return problem(400, "invalid", f"{place}: {first['msg']}" if place else first["msg"])


def _describe() -> dict[str, object]:
    """OpenAPI 3.1, from the same model that checks requests."""
    schema = PushRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    text = {"description": "Plain text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    answer = {"description": "Outcome of each sample", "content": {"application/json": {}}}
    push = {
        "summary": "Push finished samples",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/PushRequest"}},
                "application/x-ndjson": {"schema": {"$ref": "#/components/schemas/PushRequest"}},
            },
        },
        "responses": {
            "200": answer,
            "400": {"description": "The body is not a sample"},
            "401": {"description": "The token is missing or wrong"},
            "408": {"description": "The request took longer than --request-timeout to arrive"},
            "413": {"description": "The body is larger than --max-frame-bytes"},
            "422": {"description": "A sample is refused; errors says why"},
            "429": {"description": "A cap is reached; push the samples marked full again"},
            "503": {"description": "Nothing was taken: see code; with Retry-After, push it again"},
        },
    }
    gets = {path: {"get": {"responses": {"200": text}}} for path in ("/metrics", "/livez")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout-dispatcher", "version": __version__},
        "paths": {"/v1/samples": {"post": push}, **gets},
        "components": {"schemas": {"PushRequest": schema, **definitions}},
    }
