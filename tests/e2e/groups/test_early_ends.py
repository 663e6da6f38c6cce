"""Groups that won't be whole: dropped or kept as configured, at once, and nothing else is harmed.

Other workers go on all the while, so a group that held them up would show.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.groups.found import dropped
from tests.e2e.groups.rollouts import (
    together,
    until,
)
from tests.e2e.groups.run import Run, in_use
from tests.e2e.groups.unfinished import unfinished

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(100)]

BEGUN, MEMBERS = 5, 3
SHORT: dict[str, Any] = {"producer_timeout": "1s", "group_timeout": "1s"}


def others(run: Run, over: asyncio.Event) -> Any:
    """Two workers that go on until it is over."""
    return together(run.books, run.endpoint, [until(over, "x"), until(over, "y")])


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "goodbye"])
def test_the_open_groups_of_a_worker_that_is_gone_are_dropped(tmp_path: Path, killed: bool) -> None:
    over, gone = asyncio.Event(), set[str]()

    async def trouble() -> None:
        gone.update(await asyncio.to_thread(worker.begun, BEGUN * MEMBERS))
        begun = run.server.scrape()
        assert begun["open_groups"] >= BEGUN
        await run.until(lambda now: committed(now) >= committed(begun) + 2, "others' steps go on")
        at = run.server.scrape()
        await asyncio.to_thread(worker.kill if killed else worker.leave)
        lost = {"incomplete-group": BEGUN * MEMBERS}
        await run.until(lambda now: dropped(now) == lost, "its groups are dropped")
        await run.until(lambda now: committed(now) >= committed(at) + 2, "others' steps go on")
        over.set()

    def committed(now: dict[str, float]) -> float:
        return now["steps_committed_total"]

    with (
        in_use(tmp_path, step_s=0.02, **SHORT) as run,
        unfinished(run.endpoint, "gone", BEGUN, MEMBERS) as worker,
    ):
        run.produce(trouble(), others(run, over))
        found = run.finish()
    assert len(gone) == BEGUN * MEMBERS
    assert found.dropped == {"incomplete-group": len(gone)}
    assert found.committed == run.books.accepted
    found.assert_accounted(run.books, unheard=gone)


def test_the_open_groups_of_a_killed_worker_are_trained_on_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    over, gone = asyncio.Event(), set[str]()

    async def trouble() -> None:
        gone.update(await asyncio.to_thread(worker.begun, BEGUN * MEMBERS))
        assert run.server.scrape()["open_groups"] >= BEGUN
        await asyncio.to_thread(worker.kill)
        await run.until(lambda _: gone <= run.trained, "what it began is trained on")
        over.set()

    with (
        in_use(tmp_path, step_s=0.02, incomplete_groups="keep", **SHORT) as run,
        unfinished(run.endpoint, "gone", BEGUN, MEMBERS) as worker,
    ):
        run.produce(trouble(), others(run, over))
        found = run.finish()
    assert found.dropped == {}
    assert found.committed == run.books.accepted | gone
    found.assert_accounted(run.books, unheard=gone)
