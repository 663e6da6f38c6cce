"""Groups as GRPO uses them, at defaults: all is trained on, in whole steps, nothing is dropped.

Each test says itself how its scenario comes about, and makes sure that it did: that beginnings of
groups alone were more than a window, for one, which is where a dispatcher could wait for itself.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.groups.rollouts import Books, shares, together, work
from tests.e2e.groups.run import WINDOW, in_use

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(100)]


def assert_more_begun_than_the_window(books: Books, window: int = WINDOW) -> None:
    """Samples of unfinished groups alone would have filled the window."""
    assert books.most_begun > window, books.most_begun


def assert_four_by_four_by_eight(folder: Path, **options: Any) -> None:
    """Four workers answer four prompts of eight samples each at a time."""
    mine = shares(4, 32)
    with in_use(folder, **options) as run:
        run.books.to_begin = WINDOW
        run.produce(together(run.books, run.endpoint, mine))
        found = run.finish()
    found.assert_all_committed(run.books, mine)
    assert len(found.committed) == 1024
    assert_more_begun_than_the_window(run.books)


def test_four_workers_with_four_prompts_of_eight_each(tmp_path: Path) -> None:
    assert_four_by_four_by_eight(tmp_path, warm=False)


def test_the_same_with_a_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    module = "tests.e2e.groups.small_journal"
    assert_four_by_four_by_eight(tmp_path, module=module, journal_dir=journal)


def test_sixty_four_workers_with_one_prompt_of_eight_each(tmp_path: Path) -> None:
    mine = shares(64, 2)
    with in_use(tmp_path, warm=False) as run:
        run.books.to_begin = 2 * WINDOW
        run.produce(together(run.books, run.endpoint, mine, at_a_time=1, slowest_s=0.6))
        found = run.finish()
    found.assert_all_committed(run.books, mine)
    assert_more_begun_than_the_window(run.books, 2 * WINDOW)


class HttpProducer:
    """Pushes one sample a request, and again after as long as it is told when there is no room."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.told_to_wait = asyncio.Event()

    async def push(self, fields: Mapping[str, Any], **about: Any) -> str:
        """The outcome."""
        given = {name: value for name, value in about.items() if value is not None}
        body = {"fields": {name: ids.tolist() for name, ids in fields.items()}} | given
        while True:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 429:
                    assert answer.status == 200, await answer.text()
                    return str((await answer.json())["outcomes"][0])
                self.told_to_wait.set()
                seconds = float(answer.headers["Retry-After"])
            await asyncio.sleep(seconds)


def test_workers_that_push_over_http_and_come_again_when_told_to(tmp_path: Path) -> None:
    mine = shares(4, 12)

    async def push() -> None:
        async with aiohttp.ClientSession(f"http://{run.server.http}") as session:
            workers = [HttpProducer(session, "/v1/samples") for _ in mine]
            async with asyncio.TaskGroup() as group:
                for worker, share in zip(workers, mine, strict=True):
                    group.create_task(work(run.books, worker, share))
                for worker in workers:
                    await worker.told_to_wait.wait()
                await asyncio.to_thread(run.join)
            async with session.post("/v1/stream/end") as answer:
                assert answer.status == 200

    with in_use(tmp_path, warm=False, ranks=False) as run:
        run.produce(push())
        found = run.finish()
    found.assert_all_committed(run.books, mine)
    assert_more_begun_than_the_window(run.books)
    assert found.metrics["samples_received_total{outcome=full}"] >= len(mine)
