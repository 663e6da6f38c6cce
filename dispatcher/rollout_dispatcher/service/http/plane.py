"""The HTTP plane: metrics, health, status, and pushes from producers in any language.

aiohttp parses, limits and serves; here is only what the answers mean.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_dispatcher import __version__
from rollout_dispatcher.core.decision import Decision
from rollout_dispatcher.errors import DispatcherError, IllegalTransition
from rollout_dispatcher.service.config.types import RUN_HEADER, VERSION_HEADER
from rollout_dispatcher.service.http.bodies.body import leave_unasked
from rollout_dispatcher.service.http.bodies.samples import first_of
from rollout_dispatcher.service.http.guard import HttpGuard, problem
from rollout_dispatcher.service.http.openapi import describe
from rollout_dispatcher.service.http.pushes import Pushes
from rollout_dispatcher.service.http.steps import describe_steps
from rollout_dispatcher.service.router import Router

#: All policy versions are below 2**53, on this plane as on the other.
MAX_VERSION_DIGITS = 15
#: Producers that are named as awaited.
MAX_NAMED = 100


class HttpPlane:
    """Handlers over one router."""

    def __init__(self, router: Router, guard: HttpGuard) -> None:
        self._router, self._guard = router, guard
        self._pushes = Pushes(router, guard.places)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard.middleware])
        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/livez", self.livez),
                web.get("/readyz", self.readyz),
                web.get("/statusz", self.statusz),
                web.get("/debug/steps", self.steps),
                web.get("/openapi.json", self.openapi),
                web.post("/v1/samples", self._pushes.push, expect_handler=leave_unasked),
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
        if not ready:
            return problem(503, "not-ready", "\n".join(lines), **self._identity())
        return web.Response(text="\n".join(lines) + "\n", headers=self._identity())

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
        return web.json_response(status, dumps=_indented)

    async def steps(self, _: web.Request) -> web.Response:
        """The last steps, as they went."""
        router = self._router
        offset = time.time() - router.clock()
        found = describe_steps(router.chronicle.recent, router.config, offset)
        return web.json_response(found, dumps=_indented)

    async def openapi(self, _: web.Request) -> web.Response:
        """A description of this plane."""
        return web.json_response(describe())

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
        try:
            self._router.ask(say)
        except IllegalTransition:
            raise  # a bug of ours
        except DispatcherError as error:
            return problem(422, error.code, str(error))
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


def _indented(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _invalid(error: ValidationError) -> web.Response:
    return problem(400, "invalid", first_of(error))
