"""Fencing takes effect when it is decided, not when the new generation's number is durable.

Two ranks hold a step of generation 1 and have not yet said so; the first rank of generation 2 says
hello while the journal's disk is busy. From then on whatever the old ones say is said to nobody.
"""

from collections.abc import Callable

import pytest

from rollout_dispatcher.protocol import messages as m
from tests.service.wires import TwoRanks


async def test_a_step_is_not_released_for_a_prepared_of_the_old_rank_0(scene: TwoRanks) -> None:
    old_0, old_1 = await scene.old_group()
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
    assert (old_0.errors(), old_1.errors()) == (["fenced"], ["fenced"])


async def test_an_old_group_commits_nothing_that_the_new_one_has_not_got(scene: TwoRanks) -> None:
    old_0, old_1 = await scene.old_group()
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


WORDS: dict[str, Callable[[TwoRanks], m.Message]] = {
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
    speaker: int, word: str, scene: TwoRanks
) -> None:
    old = await scene.old_group()
    scene.hello(0, None, "new-0")
    before = scene.router.core.statistics()
    old[speaker].say(WORDS[word](scene))
    assert scene.router.core.statistics() == before
    assert old[speaker].errors() == []  # that the generation has begun is not durable yet
    await scene.durable()
    assert [rank.errors() for rank in old] == [["fenced"], ["fenced"]]


@pytest.mark.parametrize("word", WORDS)
async def test_the_same_client_s_old_connection_is_fenced_too(word: str, scene: TwoRanks) -> None:
    old_0, old_1 = await scene.old_group()
    again = scene.hello(0, None, "old-0")
    before = scene.router.core.statistics()
    old_0.say(WORDS[word](scene))
    assert scene.router.core.statistics() == before
    await scene.durable()
    assert (old_0.errors(), old_1.errors()) == (["fenced"], ["fenced"])
    again.say(m.Demand(taken=-1, hungry=True))
    await scene.durable()
    assert again.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]


async def test_who_asks_again_on_its_own_connection_is_not_fenced_by_itself(
    scene: TwoRanks,
) -> None:
    old_0, old_1 = await scene.old_group()
    old_0.say(m.HelloRank(client_id="old-0", dp_rank=0, dp_size=2, hungry=True))
    await scene.durable()
    assert old_0.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    assert old_1.errors() == ["fenced"]
    assert scene.router.core.statistics().generation == 2


async def test_a_generation_that_failed_is_heard_no_more(scene: TwoRanks) -> None:
    old_0, old_1 = await scene.old_group()
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


async def test_two_new_groups_at_once_leave_the_last_one(scene: TwoRanks) -> None:
    old = await scene.old_group()
    second = scene.hello(0, None, "second")
    third = scene.hello(0, None, "third")
    await scene.durable()
    assert [rank.errors() for rank in (*old, second)] == [["fenced"]] * 3
    assert third.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
    assert scene.router.core.statistics().generation == 3
