"""The routes of the HTTP plane: metrics, health, status, and pushes from any language."""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import Field

from rollout_dispatcher import __version__
from rollout_dispatcher.core.effects import Advised, Decision
from rollout_dispatcher.errors import DispatcherError, IllegalTransition, RunChanged
from rollout_dispatcher.protocol.messages import MAX_NAME
from rollout_dispatcher.service.config.values import RUN_HEADER
from rollout_dispatcher.service.http.bodies import leave_unasked
from rollout_dispatcher.service.http.guard import HttpGuard, Refused, indented, problem
from rollout_dispatcher.service.http.probes import Probes
from rollout_dispatcher.service.http.pushes import Pushes, Query, valid
from rollout_dispatcher.service.router import Router

#: Producers that `waits_for` names.
MAX_NAMED = 100
#: All policy versions are below 2**53, on this plane as on the other.
VERSION = re.compile(r"^[0-9]{1,15}$")


class CloseQuery(Query):
    """Of `POST /v1/groups/ID/close`."""

    size: Annotated[int, Field(ge=1)] | None = None
    """how many members the group has in all; unset: those that have come"""
    keep: bool | None = None
    """train on a group that lacks members; unset: --set incomplete-groups"""


class EndQuery(Query):
    """Of the ends of a phase and of the stream."""

    force: bool = False
    """it ends for all producers, whether they have ended it or not"""


class HttpPlane:
    """Handlers over one router."""

    def __init__(self, router: Router, guard: HttpGuard) -> None:
        self._router, self._guard = router, guard
        self._pushes = Pushes(router)
        self._probes = Probes(router, guard.may_control)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard.middleware, self._of_run])
        app.add_routes(
            [
                web.get("/", self._probes.page),
                web.get("/metrics", self._probes.metrics),
                web.get("/livez", self._probes.livez),
                web.get("/readyz", self._probes.readyz),
                web.get("/statusz", self._probes.statusz),
                web.get("/openapi.json", self.openapi),
                web.get("/v1/clients", self.clients),
                web.post("/v1/samples", self._pushes.push, expect_handler=leave_unasked),
                web.post("/v1/groups/{group_id}/close", self.close_group),
                web.post("/v1/phases/{policy_version}/end", self.end_phase),
                web.post("/v1/stream/end", self.end_stream),
            ]
        )
        return app

    @property
    def _of_run(self) -> Middleware:
        """Puts the run's id into each answer, and refuses requests for another run."""

        @web.middleware
        async def of_run(request: web.Request, handler: Handler) -> web.StreamResponse:
            run_id = self._router.core.run_id
            others = set(request.headers.getall(RUN_HEADER, ())) - {run_id}
            if others:
                error = RunChanged(others.pop()[:MAX_NAME], run_id)
                answer: web.StreamResponse = problem(409, error.code, str(error))
            else:
                try:
                    answer = await handler(request)
                except Refused as refused:
                    answer = refused.answer
            answer.headers[RUN_HEADER] = run_id
            return answer

        return of_run

    async def openapi(self, _: web.Request) -> web.Response:
        """Answer a description of this plane."""
        return web.json_response(describe())

    async def clients(self, _: web.Request) -> web.Response:
        """Answer the clients of both planes, and those that left without a goodbye."""
        return indented({"clients": self._router.clients()})

    async def close_group(self, request: web.Request) -> web.Response:
        """Close a group: it gets no more members, or none beyond `size`."""
        asked, core = valid(CloseQuery, dict(request.query)), self._router.core
        if asked.size is not None and (why := core.config.limits.too_large(asked.size)):
            return problem(422, "group-too-large", f"{why}, and the group has {asked.size}")
        group_id, now = request.match_info["group_id"], self._router.clock()
        return await self._control(
            lambda: core.close_group(group_id, now, size=asked.size, keep=asked.keep)
        )

    async def end_phase(self, request: web.Request) -> web.Response:
        """End a phase for HTTP clients; with `force` for all producers."""
        version = request.match_info["policy_version"]
        if not VERSION.fullmatch(version):
            return problem(400, "invalid", f"{version[:40]!r} is no policy version of 15 digits")
        return await self._end(request, int(version))

    async def end_stream(self, request: web.Request) -> web.Response:
        """End the stream for HTTP clients; with `force` for all producers."""
        return await self._end(request, None)

    async def _end(self, request: web.Request, version: int | None) -> web.Response:
        force = valid(EndQuery, dict(request.query)).force
        if force and not self._guard.may_control(request):
            return self._guard.forbidden("end for all producers (force)")
        core, now = self._router.core, self._router.clock()
        if version is None:
            end = partial(core.end_stream, now, force=force)
        else:
            end = partial(core.end_phase, version, now, force=force)
        return await self._control(end, partial(core.end_waits, version))

    async def _control(
        self, event: Callable[[], Decision], waits: Callable[[], list[str]] = list
    ) -> web.Response:
        """Perform a core's decision, and answer once it is durable.

        waits: returns the producers that have not ended it yet.
        """
        if (failure := self._router.barrier.failure) is not None:
            raise Refused(503, failure.code, str(failure))
        try:
            decision = self._router.ask(event)
        except IllegalTransition:
            raise  # a bug of ours
        except DispatcherError as error:
            return problem(422, error.code, str(error))
        for effect in decision.effects:
            if isinstance(effect, Advised) and effect.producer == "":
                return problem(422, "unknown-group", effect.text)
        await self._router.barrier.settled()
        return web.json_response({"waits_for": waits()[:MAX_NAMED]})


@cache
def describe() -> dict[str, Any]:
    """Return the OpenAPI description of the routes, which `python -m tests.test_openapi` writes."""
    described: dict[str, Any] = json.loads(Path(__file__).with_name("openapi.json").read_text())
    described["info"]["version"] = __version__
    return described
