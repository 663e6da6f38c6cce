"""`/v1/config`: the settings in force and where each comes from; and other values for some."""

from typing import Any, Final

from aiohttp import web
from pydantic import BaseModel

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.http.bodies.objects import NoObject, read_object
from rollout_dispatcher.service.http.guard import indented, problem
from rollout_dispatcher.service.reloading.settings import RELOADABLE
from rollout_dispatcher.service.router import Router

#: A few numbers.
MAX_BODY_BYTES: Final = 64 * 1024


class Setting(BaseModel):
    """An option. value: in base units. source: flag, variable, file and line, who has posted it, or
    default. reloadable: whether it may change while the dispatcher serves.
    """

    value: Any
    source: str
    reloadable: bool


class ConfigAnswer(BaseModel):
    """The settings in force, by name; generation: changes of them since the start."""

    generation: int
    options: dict[str, Setting]


class ConfigRoutes:
    """Handlers over one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def show(self, _: web.Request) -> web.Response:
        """Every option."""
        return self._answer()

    async def change(self, request: web.Request) -> web.Response:
        """Other values for those that the body names, all of them or none."""
        if (failure := self._router.stopping or self._router.barrier.failure) is not None:
            return problem(503, failure.code, str(failure))
        try:
            body = await read_object(request, self._router, MAX_BODY_BYTES)
        except NoObject as error:
            return error.answer
        try:
            who = request.remote or "a Unix socket"
            self._router.reloads.post(body, f"POST /v1/config from {who}")
        except ConfigError as error:
            return problem(422, error.code, "; ".join(error.problems))
        await self._router.barrier.settled()
        return self._answer()

    def _answer(self) -> web.Response:
        reloads = self._router.reloads
        values = self._router.config.model_dump(mode="json")
        options = {
            name: Setting(
                value=value, source=reloads.settings.source(name), reloadable=name in RELOADABLE
            )
            for name, value in values.items()
        }
        answer = ConfigAnswer(generation=reloads.generation, options=options)
        return indented(answer.model_dump(mode="json"))
