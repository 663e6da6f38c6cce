"""Groups that won't be whole: dropped or kept as configured, at once, and nothing else is harmed.

Other workers go on all the while, so a group that held them up would show.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_workers import RolloutSample
from tests.e2e.groups.found import dropped
from tests.e2e.groups.rollouts import (
    Prompt,
    joined,
    named,
    prompts,
    shares,
    side_by_side,
    together,
    tokens_of,
    until,
    work,
)
from tests.e2e.groups.run import WINDOW, Run, in_use
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


def test_a_group_short_of_its_members_stays_while_its_worker_lives(tmp_path: Path) -> None:
    mine, slow = shares(4, 8), Prompt("slow")

    async def pausing() -> None:
        async with joined(run.endpoint) as producer:
            await run.books.push_some(producer, slow, range(3))
            await asyncio.sleep(2.0)  # four times the timeout, in which it has nothing to say
            assert run.server.scrape()["open_groups"] >= 1
            await run.books.push_some(producer, slow, range(3, 8))
            await producer.end_stream()

    with in_use(tmp_path, group_timeout="500ms") as run:
        run.produce(pausing(), together(run.books, run.endpoint, mine, slowest_s=1.2))
        found = run.finish()
    assert found.dropped == {}
    assert found.committed == run.books.accepted
    assert len(found.committed) == 4 * 8 * 8 + 8
    found.assert_accounted(run.books)


@pytest.mark.parametrize("fate", ["drop", "keep"])
def test_a_refused_member_closes_its_group_at_once(tmp_path: Path, fate: str) -> None:
    """Or makes it smaller by one, where groups are trained on without what they lack."""
    over, lame, whole = asyncio.Event(), Prompt("lame"), Prompt("whole")
    too_long = {"input_ids": np.arange(2000)}

    async def trouble() -> None:
        async with joined(run.endpoint) as producer:
            await run.books.push_some(producer, lame, range(3))
            with pytest.raises(SampleRefused, match="2000 tokens"):
                await producer.push(too_long, **named(lame, lame.samples[3]))
            if fate == "drop":
                await run.until(closed, "the group is closed while its worker lives")
            for member in range(4, 8):  # these were under way
                await run.books.push(producer, lame, member)
            if fate == "keep":
                await run.until(closed, "the group is trained on without the member")
            samples = [
                RolloutSample({"input_ids": tokens_of(name)}, name) for name in whole.samples
            ]
            samples[5] = RolloutSample(too_long, whole.samples[5])
            with pytest.raises(SampleRefused, match="2000 tokens"):
                await producer.push_group(samples, whole.name)
            over.set()

    def closed(now: dict[str, float]) -> bool:
        if fate == "keep":
            return {*lame.samples} - {lame.samples[3]} <= run.trained
        return dropped(now).get("incomplete-group", 0) >= 3

    keeping: dict[str, Any] = {"incomplete_groups": "keep"} if fate == "keep" else {}
    with in_use(tmp_path, step_s=0.02, **keeping) as run:
        run.produce(trouble(), others(run, over))
        found = run.finish()
    found.assert_accounted(run.books, unheard=whole.samples)
    doomed = {*lame.samples, *whole.samples}
    assert run.books.accepted - doomed <= found.committed
    if fate == "keep":
        assert found.dropped == {}
        assert {*lame.samples} - {lame.samples[3]} <= found.committed
    else:
        assert not doomed & found.committed
        assert found.dropped.keys() == {"incomplete-group"}
    assert run.books.refused.keys() <= set(lame.samples), "nobody else is refused"


def test_a_closed_group_is_dropped_or_kept_as_its_worker_says(tmp_path: Path) -> None:
    kept, given_up = Prompt("kept"), Prompt("given-up")

    async def push() -> None:
        producer: Any
        async with joined(run.endpoint) as producer:
            await run.books.push_some(producer, kept, range(3))
            await run.books.push_some(producer, given_up, range(5))
            await producer.close_group(kept.name, keep=True)
            await producer.close_group(given_up.name)
            await work(run.books, producer, prompts("w", 8))
            await producer.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    assert found.dropped == {"incomplete-group": 5}
    assert found.committed == run.books.accepted - set(given_up.samples)
    assert set(kept.samples[:3]) <= found.committed
    found.assert_accounted(run.books)


def test_agents_say_how_many_samples_a_group_has_when_it_is_done(tmp_path: Path) -> None:
    sizes = [5 + at % 7 for at in range(24)]
    mine = [Prompt(f"agent.{at}", size) for at, size in enumerate(sizes)]

    async def agent(producer: Any, prompt: Prompt) -> None:
        for member in range(prompt.size):
            await asyncio.sleep(0.01)
            await run.books.push(producer, prompt, member, group_size="at-close")
        await producer.close_group(prompt.name, size=prompt.size)

    async def push() -> None:
        async with joined(run.endpoint) as producer:
            await side_by_side(*(agent(producer, prompt) for prompt in mine))
            await producer.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    assert run.books.most_begun > 48
    assert found.dropped == {}
    assert found.committed == {name for prompt in mine for name in prompt.samples}
    found.assert_accounted(run.books)


class Both:
    """Two producers who share each group: one pushes its even members, one the odd ones.

    No group gets its last member until more samples are begun than a window holds.
    """

    def __init__(self, *producers: Any) -> None:
        self._producers = producers
        self._begun, self._many = 0, asyncio.Event()

    async def push(self, fields: Any, *, sample_id: str, **about: Any) -> object:
        """As a producer's."""
        member = int(sample_id.rpartition("/")[2])
        if member == about["group_size"] - 1:
            await self._many.wait()
        outcome = await self._producers[member % 2].push(fields, sample_id=sample_id, **about)
        self._begun += 1
        if self._begun > WINDOW:
            self._many.set()
        return outcome


def test_two_workers_contribute_to_each_group(tmp_path: Path) -> None:
    mine = shares(4, 8)

    async def push() -> None:
        async with joined(run.endpoint) as even, joined(run.endpoint) as odd:
            both = Both(even, odd)
            await side_by_side(*(work(run.books, both, share) for share in mine))
            await even.end_stream()
            await odd.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    found.assert_all_committed(run.books, mine)
    assert run.books.most_begun > WINDOW
