"""A small JSON object as the body of a request, read at once."""

import asyncio
import json

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollout_dispatcher.errors import BodyTooLarge, ReceivingFull, UnknownEncoding
from rollout_dispatcher.service.http.bodies.body import Body
from rollout_dispatcher.service.http.guard import problem
from rollout_dispatcher.service.router import Router


class NoObject(Exception):
    """The body is none; answer: what the request is answered with."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__(answer.text)
        self.answer = answer


async def read_object(request: web.Request, router: Router, limit: int) -> dict[str, object]:
    """The body, of `limit` bytes at the most. Raises NoObject."""
    try:
        return await _read(request, router, limit)
    except TimeoutError:
        answer = problem(408, "timeout", "the request did not arrive in time")
    except BodyTooLarge as error:
        answer = problem(413, error.code, str(error))
    except UnknownEncoding as error:
        answer = problem(415, error.code, str(error))
    except ReceivingFull as error:
        answer = problem(503, error.code, str(error), Retry_After="1")
    except (ValueError, RecursionError, ConnectionError, web.RequestPayloadError,
            HttpProcessingError) as error:  # fmt: skip
        answer = problem(400, "invalid", f"the body is no JSON object: {error}"[:300])
    raise NoObject(answer)


async def _read(request: web.Request, router: Router, limit: int) -> dict[str, object]:
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise UnknownEncoding(encoding, "identity")
    with Body(router.receiving) as room:
        async with asyncio.timeout(router.config.request_timeout):
            chunks = await room.read(request, limit)
        body = json.loads(b"".join(chunks))
    if not isinstance(body, dict):
        raise ValueError("it is something else")
    return body
