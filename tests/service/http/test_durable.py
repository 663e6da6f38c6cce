"""What ends something over HTTP is answered once it is durable, and refused while nothing is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from rollout_dispatcher.core.facts import Dropped, PhaseEnded, StreamEnded
from rollout_dispatcher.errors import JournalFull
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.service.planes import http_plane
from rollout_dispatcher.service.router import Router
from tests.service.durability.test_barrier import SlowLog
from tests.service.durability.test_behind_the_barrier import hub_with

MEMBER = {"fields": {"input_ids": [1, 2, 3]}, "group_id": "g", "group_size": 2}
#: What is ended, and the fact that has to be durable first.
ENDS = [
    ("/v1/groups/g/close", Dropped),
    ("/v1/phases/5/end", PhaseEnded),
    ("/v1/stream/end", StreamEnded),
]


class Plane:
    """The HTTP plane of a router whose journal is durable when the test says so."""

    def __init__(self, log: SlowLog, router: Router, session: aiohttp.ClientSession) -> None:
        self.log, self.router, self._session = log, router, session

    async def post(self, path: str, body: object = None) -> tuple[int, dict[str, object]]:
        async with self._session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def is_alive(self) -> bool:
        """It answers what needs no journal."""
        async with self._session.get("/livez") as answer:
            return answer.status == 200

    async def push_member(self) -> None:
        """The first of two of a group; durable."""
        pushed = asyncio.ensure_future(self.post("/v1/samples", MEMBER))
        await self.noted(0)
        await self.log.durable(len(self.log.batches))
        status, _ = await pushed
        assert status == 200

    async def noted(self, before: int) -> None:
        """Until there are more facts than before."""
        while len(self.log.batches) == before:
            self.log.appended.clear()
            await self.log.appended.wait()


@asynccontextmanager
async def plane(folder: Path) -> AsyncIterator[Plane]:
    log = SlowLog()
    router = hub_with(log, dp_size=4)
    path = str(folder / "http")
    config = router.config.model_copy(update={"http": Endpoint(path=path)})
    async with http_plane(config, router):
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession("http://dispatcher", connector=connector) as session:
            yield Plane(log, router, session)
    router.close()


@pytest.mark.parametrize(("path", "fact"), ENDS)
async def test_an_end_is_answered_once_it_is_durable(tmp_path: Path, path: str, fact: type) -> None:
    async with plane(tmp_path) as http:
        await http.push_member()
        before = len(http.log.batches)
        ended = asyncio.ensure_future(http.post(path))
        await http.noted(before)
        assert any(isinstance(one, fact) for facts, _ in http.log.batches for one in facts)
        assert await http.is_alive()
        assert not ended.done()
        await http.log.durable(len(http.log.batches))
        status, _ = await ended
        assert status == 200


@pytest.mark.parametrize(("path", "fact"), ENDS)
async def test_nothing_is_ended_while_the_journal_fails(
    tmp_path: Path, path: str, fact: type
) -> None:
    async with plane(tmp_path) as http:
        await http.push_member()
        before = len(http.log.batches)
        http.log.failure = JournalFull("no room at all")
        status, body = await http.post(path)
        assert (status, body["message"]) == (503, "no room at all")
        assert len(http.log.batches) == before
        assert http.router.core.statistics().buffered == 1
