"""Fencing takes effect when it is decided, not when the new generation's number is durable.

Two ranks hold a step of generation 1 and have not yet said so; the first rank of generation 2 says
hello while the journal's disk is busy. From then on whatever the old ones say is said to nobody.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.router import Router
from tests.service.durability.test_barrier import SlowLog
from tests.service.durability.test_behind_the_barrier import Wire, hub_with, push_one


class Scene:
    """A router of two ranks whose journal is durable when the test says so."""

    def __init__(self, log: SlowLog, router: Router) -> None:
        self.log, self.router = log, router
        self.producer = Wire(router)
        self.producer.say(m.HelloProducer(client_id="p"))
        self._pushed = 0

    async def durable(self) -> None:
        """Everything that was noted is on the disk, and what follows from it was said."""
        while True:
            noted = len(self.log.batches)
            await self.log.durable(noted)
            await asyncio.sleep(0.01)  # a plan waits a turn, a delivery two
            if len(self.log.batches) == noted:
                return

    def hello(self, dp_rank: int, generation: int | None, client_id: str, **more: object) -> Wire:
        """A rank says hello on a new connection."""
        wire = Wire(self.router)
        facts = {"client_id": client_id, "dp_rank": dp_rank, "dp_size": 2, "generation": generation}
        wire.say(m.HelloRank.model_validate(facts | more))
        return wire

    async def joined(self, dp_rank: int, generation: int | None, client_id: str) -> Wire:
        """A rank that is welcome, and asks for a step."""
        wire = self.hello(dp_rank, generation, client_id)
        await self.durable()
        wire.say(m.Demand(taken=-1, hungry=True))
        return wire

    def push_a_step(self) -> None:
        for _ in range(2):
            push_one(self.producer, self._pushed)
            self._pushed += 1

    @property
    def digest(self) -> str:
        """Of step 0."""
        step = self.router.core.step(0)
        assert step is not None
        return step.digest


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    log = SlowLog()
    router = hub_with(log, dp_size=2)
    yield Scene(log, router)
    router.close()


async def old_group(scene: Scene) -> tuple[Wire, Wire]:
    """Two ranks of generation 1 that hold step 0."""
    first = await scene.joined(0, None, "old-0")
    second = await scene.joined(1, 1, "old-1")
    scene.push_a_step()
    await scene.durable()
    for rank in (first, second):
        assert rank.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    return first, second


def errors(wire: Wire) -> list[str]:
    """Codes of the errors among what it heard since the last look."""
    return [message.code for message in wire.messages() if isinstance(message, m.Error)]


async def test_a_step_is_not_released_for_a_prepared_of_the_old_rank_0(scene: Scene) -> None:
    old_0, old_1 = await old_group(scene)
    new_0 = scene.hello(0, None, "new-0", hungry=True)
    old_0.say(m.Prepared(step=0, digest=scene.digest))
    new_1 = await scene.joined(1, 2, "new-1")
    new_1.say(m.Prepared(step=0, digest=scene.digest))
    await scene.durable()
    assert new_0.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    assert new_1.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    new_0.say(m.Prepared(step=0, digest=scene.digest))
    await scene.durable()
    assert (new_0.heard(), new_1.heard()) == (["Release"], ["Release"])
    assert (errors(old_0), errors(old_1)) == (["fenced"], ["fenced"])


async def test_an_old_rank_s_other_plan_does_not_fail_the_new_generation(scene: Scene) -> None:
    old_0, _ = await old_group(scene)
    new_0 = scene.hello(0, None, "new-0", hungry=True)
    old_0.say(m.Prepared(step=0, digest="another"))
    await scene.durable()
    assert "failed" not in scene.router.core.waits_for(0.0)
    assert new_0.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]


async def test_an_old_group_commits_nothing_that_the_new_one_has_not_got(scene: Scene) -> None:
    old_0, old_1 = await old_group(scene)
    new_0 = await scene.joined(0, None, "new-0")
    new_1 = await scene.joined(1, 2, "new-1")
    last_0 = scene.hello(0, None, "last-0")
    for rank in (new_0, new_1, old_0, old_1):
        rank.say(m.Prepared(step=0, digest=scene.digest))
        rank.say(m.Demand(taken=0, hungry=True))
        rank.say(m.Commit(step=0))
    last_1 = scene.hello(1, 3, "last-1")  # it cannot know the number, but it may guess
    for rank in (new_0, new_1, old_0, old_1):
        rank.say(m.Commit(step=0))
    await scene.durable()
    assert scene.router.core.statistics().steps_committed == 0
    assert [rank.committed for rank in scene.router.core.statistics().ranks.values()] == [-1, -1]
    assert last_0.heard() == last_1.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]


WORDS: dict[str, Callable[[Scene], m.Message]] = {
    "demand": lambda _: m.Demand(taken=-1, hungry=True),
    "prepared": lambda scene: m.Prepared(step=0, digest=scene.digest),
    "commit": lambda _: m.Commit(step=0),
    "version": lambda _: m.PolicyVersion(first_step=0, policy_version=9),
    "saved": lambda _: m.CheckpointSaved(step=0),
    "ping": lambda _: m.Ping(),
    "bye": lambda _: m.Bye(),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("speaker", [0, 1])
async def test_nothing_that_an_old_connection_says_counts_and_it_ends_fenced(
    speaker: int, word: str, scene: Scene
) -> None:
    old = await old_group(scene)
    scene.hello(0, None, "new-0")
    before = scene.router.core.statistics()
    old[speaker].say(WORDS[word](scene))
    assert scene.router.core.statistics() == before
    assert errors(old[speaker]) == []  # that the generation has begun is not durable yet
    await scene.durable()
    assert [errors(rank) for rank in old] == [["fenced"], ["fenced"]]


@pytest.mark.parametrize("word", WORDS)
async def test_the_same_client_s_old_connection_is_fenced_too(word: str, scene: Scene) -> None:
    old_0, old_1 = await old_group(scene)
    again = scene.hello(0, None, "old-0")
    before = scene.router.core.statistics()
    old_0.say(WORDS[word](scene))
    assert scene.router.core.statistics() == before
    await scene.durable()
    assert (errors(old_0), errors(old_1)) == (["fenced"], ["fenced"])
    again.say(m.Demand(taken=-1, hungry=True))
    await scene.durable()
    assert again.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]


async def test_who_asks_again_on_its_own_connection_is_not_fenced_by_itself(scene: Scene) -> None:
    old_0, old_1 = await old_group(scene)
    old_0.say(m.HelloRank(client_id="old-0", dp_rank=0, dp_size=2, hungry=True))
    await scene.durable()
    assert old_0.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    assert errors(old_1) == ["fenced"]
    assert scene.router.core.statistics().generation == 2


async def test_a_new_rank_of_an_old_one_s_name_is_not_taken_for_it(scene: Scene) -> None:
    old_0, old_1 = await old_group(scene)
    scene.hello(0, None, "new-0")
    new_1 = scene.hello(1, 2, "old-1")
    old_1.say(m.Prepared(step=0, digest=scene.digest))
    await scene.durable()
    assert scene.router.core.statistics().ranks[1].prepared == -1
    assert new_1.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    assert (errors(old_0), errors(old_1)) == (["fenced"], ["fenced"])


async def test_an_old_rank_s_hunger_is_not_its_successor_s(scene: Scene) -> None:
    old_0, _ = await old_group(scene)
    scene.hello(0, None, "new-0")
    for hungry in (True, False):
        old_0.say(m.Demand(taken=-1, hungry=hungry))
    assert waits(scene) == 0


async def test_a_new_rank_s_hunger_does_not_end_with_the_old_connection(scene: Scene) -> None:
    old_0, _ = await old_group(scene)
    new_0 = scene.hello(0, None, "new-0", hungry=True)
    old_0.peer.connection_lost(None)
    await scene.durable()
    new_0.say(m.Demand(taken=-1, hungry=False))
    assert waits(scene) == 1
    assert scene.router.core.statistics().ranks_connected == 1


def waits(scene: Scene) -> float:
    """Times that a rank waited for a step, as the metrics have it."""
    found = scene.router.metrics.registry.get_sample_value(
        "dispatcher_rank_wait_duration_seconds_count"
    )
    assert found is not None
    return found


async def test_a_release_decided_for_the_old_group_is_told_to_nobody(scene: Scene) -> None:
    old_0, old_1 = await old_group(scene)
    scene.push_a_step()  # a fact that is not durable: what follows waits behind it
    for rank in (old_0, old_1):
        rank.say(m.Prepared(step=0, digest=scene.digest))
    new_0 = scene.hello(0, None, "new-0", hungry=True)
    await scene.durable()
    for rank in (old_0, old_1):
        assert rank.heard() == ["Error"]
    assert new_0.heard()[:3] == ["WelcomeRank", "StepHeader", "MicroBatch"]


async def test_a_generation_that_failed_is_heard_no_more(scene: Scene) -> None:
    old_0, old_1 = await old_group(scene)
    scene.push_a_step()  # a fact that is not durable: what follows waits behind it
    old_0.say(m.Prepared(step=0, digest="another"))
    before = scene.router.core.statistics()
    for rank in (old_0, old_1):
        rank.say(m.Prepared(step=0, digest=scene.digest))
        rank.say(m.Commit(step=0))
    assert scene.router.core.statistics() == before
    await scene.durable()
    for rank in (old_0, old_1):
        (error,) = rank.messages()
        assert isinstance(error, m.Error)
        assert "another plan" in error.message


async def test_two_new_groups_at_once_leave_the_last_one(scene: Scene) -> None:
    old = await old_group(scene)
    second = scene.hello(0, None, "second")
    third = scene.hello(0, None, "third")
    await scene.durable()
    assert [errors(rank) for rank in (*old, second)] == [["fenced"]] * 3
    assert third.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    assert scene.router.core.statistics().generation == 3
