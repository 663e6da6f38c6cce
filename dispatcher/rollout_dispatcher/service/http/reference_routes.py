"""`/v1/references/known`: which objects of a payload store are needed, for who frees the rest."""

import asyncio
from typing import Annotated, Final

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_dispatcher.protocol.messages import MAX_KEY_LETTERS, MAX_KEYS, StoreAddress
from rollout_dispatcher.service.http.bodies.objects import NoObject, read_object
from rollout_dispatcher.service.http.bodies.samples import first_of
from rollout_dispatcher.service.http.guard import problem
from rollout_dispatcher.service.router import Router

#: Keys are some 30 bytes each; those of other engines may be longer.
MAX_BODY_BYTES: Final = 2**20
#: Keys that are looked up before others get their turn on the event loop: made to take long, 5 ms.
KEYS_AT_ONCE: Final = 64


class KnownRequest(BaseModel):
    """Objects of a payload store."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    store: StoreAddress
    """its address, as --payload-stores has it"""
    keys: Annotated[list[str], Field(max_length=MAX_KEYS)]
    """of what is there"""


class KnownAnswer(BaseModel):
    """Which of them are needed."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    run_id: str
    """of the run that needs them"""
    needed: list[str]
    """keys of objects in which live samples lie, or that a producer may still push"""


class ReferenceRoutes:
    """Handlers over one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def known(self, request: web.Request) -> web.Response:
        """Answered once it is durable that the others are not needed: they may be freed then."""
        barrier, core = self._router.barrier, self._router.core
        try:
            body = await read_object(request, self._router, MAX_BODY_BYTES)
            asked = KnownRequest.model_validate(body)
        except NoObject as error:
            return error.answer
        except ValidationError as error:
            return problem(400, "invalid", first_of(error))
        if (failure := barrier.failure) is not None:
            return problem(503, failure.code, str(failure))
        stores = self._router.config.payload_stores
        if asked.store not in stores:
            known = ", ".join(stores) or "none"
            return problem(
                422, "unknown-store",
                f"{asked.store} is no payload store of this dispatcher; --payload-stores: {known}",
            )  # fmt: skip
        keys = [key for key in asked.keys if len(key) <= MAX_KEY_LETTERS]
        needed = list[str]()
        for first in range(0, len(keys), KEYS_AT_ONCE):
            needed += core.needed_objects(keys[first : first + KEYS_AT_ONCE])
            await asyncio.sleep(0)
        await barrier.settled()
        return web.json_response(KnownAnswer(run_id=core.run_id, needed=needed).model_dump())
