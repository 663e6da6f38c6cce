"""The end of a phase and of the stream is everybody's: no one's live group is dropped for another.

Two workers, each with a producer of its own. A controller may force what they have not all said.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.errors import SampleRefused
from tests.e2e.groups.found import Found
from tests.e2e.groups.rollouts import GROUP, Prompt, joined, prompts, roll_out, side_by_side
from tests.e2e.groups.run import BATCH, Run, in_use

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


async def push_all(run: Run, producer: Any, name: str, number: int, version: int | None) -> None:
    """Push whole groups, their members in random order."""
    mine = [Prompt(one.name, version=version) for one in prompts(name, number)]
    await side_by_side(*(roll_out(run.books, producer, prompt, 0.02) for prompt in mine))


def versions_in_order(found: Found) -> list[set[str]]:
    """The phases of each step's samples, by their names `v1...`, `v2...`."""
    return [{name.partition("-")[0] for name in names} for _, names in sorted(found.steps.items())]


def test_the_end_of_a_workers_phase_leaves_the_others_live_group_alone(tmp_path: Path) -> None:
    live = Prompt("v1-live", version=1)

    async def push() -> None:
        producer: Any
        async with joined(run.endpoint) as producer, joined(run.endpoint) as other:
            await push_all(run, producer, "v1-early", 3, 1)
            await run.books.push_some(other, live, range(3))
            await producer.end_phase(2)
            assert run.server.scrape()["open_groups"] == 1
            await run.books.push_some(other, live, range(3, GROUP))
            await other.end_phase(2)
            await push_all(run, producer, "v2-late", 5, 2)
            await producer.end_stream()
            await other.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    assert found.dropped == {}
    assert found.committed == run.books.accepted
    assert len(found.committed) == 9 * GROUP
    found.assert_accounted(run.books)
    assert versions_in_order(found) == [{"v1"}, {"v2"}, {"v2"}]


def test_the_end_of_a_phase_flushes_once_all_have_said_so(tmp_path: Path) -> None:
    """A phase of less than a batch waits for its other worker, and no longer."""

    async def push() -> None:
        async with joined(run.endpoint) as producer, joined(run.endpoint) as other:
            await push_all(run, producer, "v1-one", 1, 1)
            await push_all(run, other, "v1-other", 1, 1)
            await producer.end_phase(2)
            await asyncio.sleep(0.5)
            assert run.server.scrape()["open_steps"] == 0, "the other has not ended its phase"
            assert run.server.scrape()["steps_committed_total"] == 0
            await other.end_phase(2)
            await run.until(lambda _: len(run.trained) == 2 * GROUP, "the phase is trained on")
            await producer.end_stream()
            await other.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    assert found.dropped == {}
    found.assert_accounted(run.books)


def test_a_worker_that_has_left_holds_no_phase_up(tmp_path: Path) -> None:
    async def push() -> None:
        async with joined(run.endpoint) as other:
            async with joined(run.endpoint) as producer:
                await push_all(run, producer, "v1-gone", 1, 1)
            await push_all(run, other, "v1-here", 1, 1)
            await other.end_phase(2)
            await run.until(lambda _: len(run.trained) == 2 * GROUP, "the phase is trained on")
            await push_all(run, other, "v2", 4, 2)
            await other.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    assert found.dropped == {}
    assert found.committed == run.books.accepted
    found.assert_accounted(run.books)


def test_a_forced_end_of_a_phase_ends_it_for_everybody(tmp_path: Path) -> None:
    live = Prompt("v1-live", version=1)

    async def push() -> None:
        producer: Any
        async with joined(run.endpoint) as producer, joined(run.endpoint) as other:
            await push_all(run, producer, "v1-early", 3, 1)
            await run.books.push_some(other, live, range(3))
            await producer.end_phase(2, force=True)
            assert not await run.books.push(other, live, 3)
            await push_all(run, other, "v2-late", 4, 2)
            await producer.end_stream()
            await other.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    assert set(run.books.refused) == {live.samples[3]}
    assert "phase has ended" in run.books.refused[live.samples[3]]
    assert found.dropped == {"incomplete-group": 3}
    assert found.committed == run.books.accepted - set(live.samples)
    found.assert_accounted(run.books)
    assert versions_in_order(found) == [{"v1"}, {"v2"}]


def test_the_end_of_a_workers_stream_does_not_end_the_others(tmp_path: Path) -> None:
    live = Prompt("live")

    async def push() -> None:
        async with joined(run.endpoint) as producer, joined(run.endpoint) as other:
            await push_all(run, producer, "early", 2, None)
            await run.books.push_some(other, live, range(3))
            await producer.end_stream()
            await run.books.push_some(other, live, range(3, GROUP))
            await push_all(run, other, "late", 5, None)
            await other.end_stream()

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    found.assert_all_committed(run.books, [[live, *prompts("early", 2), *prompts("late", 5)]])
    assert len(found.committed) == 2 * BATCH


def test_a_forced_end_of_the_stream_ends_it_for_everybody(tmp_path: Path) -> None:
    live = Prompt("live")

    async def push() -> None:
        producer: Any
        async with joined(run.endpoint) as producer, joined(run.endpoint) as other:
            await push_all(run, producer, "early", 5, None)
            await run.books.push_some(other, live, range(3))
            await producer.end_stream(force=True)
            with pytest.raises(SampleRefused):
                await other.push({"input_ids": [1, 2]})

    with in_use(tmp_path) as run:
        run.produce(push())
        found = run.finish()
    assert found.dropped == {"incomplete-group": 3}
    assert found.committed == run.books.accepted - set(live.samples)
    assert len(found.committed) == 5 * GROUP
    found.assert_accounted(run.books)


def test_what_is_held_when_a_worker_ends_its_stream_is_trained_on(tmp_path: Path) -> None:
    """The other's pushes wait for room, since ranks come late."""

    async def push() -> None:
        async with joined(run.endpoint) as producer, joined(run.endpoint) as other:

            async def end() -> None:
                # An end is said behind the pushes that have begun; it would refuse later ones.
                await run.until(lambda _: len(run.books.begun) == 20 * GROUP, "all are pushed")
                await run.until(lambda now: now["pushes_held"] > 0, "pushes wait for room")
                ranks = asyncio.to_thread(run.join)
                await side_by_side(producer.end_stream(), other.end_stream(), ranks)

            await push_all(run, producer, "first", 6, None)  # as many as a window has
            both = push_all(run, producer, "a", 8, None), push_all(run, other, "b", 6, None)
            await side_by_side(*both, end())

    with in_use(tmp_path, ranks=False) as run:
        run.produce(push())
        found = run.finish()
    found.assert_all_committed(run.books, [prompts("first", 6), prompts("a", 8), prompts("b", 6)])


@pytest.mark.parametrize("fate", ["drop", "keep"])
def test_a_group_that_is_open_when_all_have_ended_has_its_configured_fate(
    tmp_path: Path, fate: str
) -> None:
    live = Prompt("live")

    async def push() -> None:
        async with joined(run.endpoint) as producer, joined(run.endpoint) as other:
            await push_all(run, producer, "whole", 3, None)
            await run.books.push_some(other, live, range(3))
            await producer.end_stream()
            await other.end_stream()

    keeping: dict[str, Any] = {"incomplete_groups": "keep"} if fate == "keep" else {}
    with in_use(tmp_path, **keeping) as run:
        run.produce(push())
        found = run.finish()
    begun = set(live.samples[:3])
    if fate == "keep":
        assert found.dropped == {}
        assert found.committed == run.books.accepted
    else:
        assert found.dropped == {"incomplete-group": 3}
        assert found.committed == run.books.accepted - begun
    assert begun <= run.books.accepted
    found.assert_accounted(run.books)
