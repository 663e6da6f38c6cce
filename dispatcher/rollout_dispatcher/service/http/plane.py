"""The HTTP plane: metrics, health, status, and pushes from producers in any language.

aiohttp parses, limits and serves; here is only what the answers mean.
"""

from collections.abc import Callable
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel, ValidationError

from rollout_dispatcher.core.decision import Decision
from rollout_dispatcher.core.effects import Advised
from rollout_dispatcher.errors import DispatcherError, IllegalTransition, RunChanged
from rollout_dispatcher.protocol.messages import MAX_NAME
from rollout_dispatcher.service.config.types import RUN_HEADER
from rollout_dispatcher.service.http.bodies.body import leave_unasked
from rollout_dispatcher.service.http.bodies.samples import first_of
from rollout_dispatcher.service.http.config_routes import ConfigRoutes
from rollout_dispatcher.service.http.guard import HttpGuard, problem
from rollout_dispatcher.service.http.openapi import describe
from rollout_dispatcher.service.http.probes.probes import Probes
from rollout_dispatcher.service.http.pushes import Pushes
from rollout_dispatcher.service.http.reference_routes import ReferenceRoutes
from rollout_dispatcher.service.http.requests import (
    CloseQuery,
    ControlAnswer,
    EndQuery,
    PhasePath,
)
from rollout_dispatcher.service.router import Router

#: Producers that are named as awaited.
MAX_NAMED = 100


class HttpPlane:
    """Handlers over one router."""

    def __init__(self, router: Router, guard: HttpGuard) -> None:
        self._router, self._guard = router, guard
        self._pushes = Pushes(router, guard.places)
        self._config = ConfigRoutes(router)
        self._references = ReferenceRoutes(router)
        self._probes = Probes(router, guard.may_control)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard.middleware, self._of_run])
        app.on_cleanup.append(self._close)
        app.add_routes(
            [
                web.get("/metrics", self._probes.metrics),
                web.get("/livez", self._probes.livez),
                web.get("/readyz", self._probes.readyz),
                web.get("/statusz", self._probes.statusz),
                web.get("/debug/steps", self._probes.steps),
                web.get("/openapi.json", self.openapi),
                web.get("/v1/config", self._config.show),
                web.post("/v1/config", self._config.change, expect_handler=leave_unasked),
                web.post(
                    "/v1/references/known", self._references.known, expect_handler=leave_unasked
                ),
                web.post("/v1/samples", self._pushes.push, expect_handler=leave_unasked),
                web.post("/v1/groups/{group_id}/close", self.close_group),
                web.post("/v1/phases/{policy_version}/end", self.end_phase),
                web.post("/v1/stream/end", self.end_stream),
            ]
        )
        return app

    @property
    def _of_run(self) -> Middleware:
        """Each answer names the run; a request that names another one is refused, and not heard."""

        @web.middleware
        async def of_run(request: web.Request, handler: Handler) -> web.StreamResponse:
            run_id = self._router.core.run_id
            others = set(request.headers.getall(RUN_HEADER, ())) - {run_id}
            if others:
                error = RunChanged(others.pop()[:MAX_NAME], run_id)
                answer: web.StreamResponse = problem(409, error.code, str(error))
            else:
                answer = await handler(request)
            answer.headers[RUN_HEADER] = run_id
            return answer

        return of_run

    async def _close(self, _: web.Application) -> None:
        self._probes.close()

    async def openapi(self, _: web.Request) -> web.Response:
        """A description of this plane."""
        return web.json_response(describe())

    async def close_group(self, request: web.Request) -> web.Response:
        """No further member will come, or none beyond `size`."""
        try:
            asked = CloseQuery.model_validate(dict(request.query))
        except ValidationError as error:
            return _invalid(error, CloseQuery)
        if asked.size is not None and (
            why := self._router.core.config.limits.too_large(asked.size)
        ):
            return problem(422, "group-too-large", f"{why}, and the group has {asked.size}")
        group_id, now = request.match_info["group_id"], self._router.clock()
        core = self._router.core
        return await self._tell(
            lambda: core.close_group(group_id, now, size=asked.size, keep=asked.keep)
        )

    async def end_phase(self, request: web.Request) -> web.Response:
        """No sample older than this policy version comes over HTTP any more; or from anybody."""
        try:
            asked = PhasePath.model_validate(dict(request.match_info))
        except ValidationError:
            version = request.match_info["policy_version"]
            return problem(400, "invalid", f"{version[:40]!r} is no policy version of 15 digits")
        return await self._end(request, int(asked.policy_version))

    async def end_stream(self, request: web.Request) -> web.Response:
        """No sample comes over HTTP any more; with `force` from anybody."""
        return await self._end(request, None)

    async def _end(self, request: web.Request, version: int | None) -> web.Response:
        try:
            force = EndQuery.model_validate(dict(request.query)).force
        except ValidationError as error:
            return _invalid(error, EndQuery)
        if force and not self._guard.may_control(request):
            return self._guard.forbidden("end for all producers (force)")
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
            decision = self._router.ask(say)
        except IllegalTransition:
            raise  # a bug of ours
        except DispatcherError as error:
            return problem(422, error.code, str(error))
        for effect in decision.effects:
            if isinstance(effect, Advised) and effect.producer == "":
                return problem(422, "unknown-group", effect.text)
        await self._router.barrier.settled()
        return web.json_response(ControlAnswer(waits_for=waits()[:MAX_NAMED]).model_dump())


def _invalid(error: ValidationError, asked: type[BaseModel]) -> web.Response:
    return problem(400, "invalid", first_of(error, asked.model_fields))
