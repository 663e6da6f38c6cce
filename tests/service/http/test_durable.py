"""What ends something over HTTP is answered once it is durable, and refused while nothing is."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession

from rollout_dispatcher.core.facts import Dropped, PhaseEnded, StreamEnded
from rollout_dispatcher.errors import JournalFull
from tests.service.wires import SlowLog, http_client, make_router

MEMBER = {"fields": {"input_ids": [1, 2, 3]}, "group_id": "g", "group_size": 2}
#: What is ended, and the fact that has to be durable first.
ENDS = [
    ("/v1/groups/g/close", Dropped),
    ("/v1/phases/5/end", PhaseEnded),
    ("/v1/stream/end", StreamEnded),
]


class Plane:
    """The HTTP plane of a router whose journal is durable when the test says so."""

    def __init__(self) -> None:
        self.log = SlowLog()
        self.router = make_router(self.log, dp_size=4, global_batch_size=4)
        self.client: ClientSession

    async def post(self, path: str, body: object = None) -> tuple[int, dict[str, object]]:
        async with self.client.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def push_member(self) -> None:
        """The first of two of a group; durable."""
        pushed = asyncio.ensure_future(self.post("/v1/samples", MEMBER))
        await self.noted(0)
        await self.log.durable()
        assert (await pushed)[0] == 200

    async def noted(self, before: int) -> None:
        """Until there are more facts than before."""
        while len(self.log.batches) == before:
            self.log.appended.clear()
            await self.log.appended.wait()


@pytest.fixture
async def http() -> AsyncIterator[Plane]:
    plane = Plane()
    async with http_client(plane.router) as plane.client:
        await plane.push_member()
        yield plane
    plane.router.close()


@pytest.mark.parametrize(("path", "fact"), ENDS)
async def test_an_end_is_answered_once_it_is_durable(path: str, fact: type, http: Plane) -> None:
    before = len(http.log.batches)
    ended = asyncio.ensure_future(http.post(path))
    await http.noted(before)
    assert any(isinstance(one, fact) for facts, _ in http.log.batches for one in facts)
    assert (await http.client.get("/livez")).status == 200  # it answers what needs no journal
    assert not ended.done()
    await http.log.durable()
    assert (await ended)[0] == 200


@pytest.mark.parametrize("path", [path for path, _ in ENDS])
async def test_nothing_is_ended_while_the_journal_fails(path: str, http: Plane) -> None:
    before = len(http.log.batches)
    http.log.failure = JournalFull("no room at all")
    status, body = await http.post(path)
    assert (status, body["message"]) == (503, "no room at all")
    assert len(http.log.batches) == before
    assert http.router.core.statistics().buffered == 1
