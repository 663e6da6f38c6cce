"""What a step took may come with the commit of it or behind it: the dispatcher learns the same."""

from collections.abc import Callable, Iterator

import pytest

from rollout_dispatcher.protocol import messages as m
from tests.service.wires import TwoRanks

#: Of each DP rank in its one micro-batch, and how much of that it was inside collectives.
BUSY_S, INSIDE_S = 1.5, (0.5, 0.1)
Told = Callable[[int], Iterator[m.Message]]


def with_it(dp_rank: int) -> Iterator[m.Message]:
    times = m.PassTimes(busy_s=[BUSY_S], collective_s=[INSIDE_S[dp_rank]])
    passes = [times, m.PassTimes(cost_key="critic", busy_s=[2.0], collective_s=[0.0])]
    yield m.Commit(step=0, times=passes)


def behind_it(dp_rank: int) -> Iterator[m.Message]:
    yield m.Commit(step=0)
    yield m.StepTimes(step=0, busy_s=[BUSY_S], collective_s=[INSIDE_S[dp_rank]])
    yield m.StepTimes(step=0, cost_key="critic", busy_s=[2.0], collective_s=[0.0])


@pytest.mark.parametrize("told", [with_it, behind_it])
async def test_times_are_brought_together_however_they_are_told(
    scene: TwoRanks, told: Told
) -> None:
    ranks = await scene.old_group()
    for rank in ranks:
        rank.say(m.Prepared(step=0, digest=scene.digest))
        rank.say(m.Demand(taken=0, hungry=True))
    for dp_rank, rank in enumerate(ranks):
        for message in told(dp_rank):
            rank.say(message)
    await scene.durable()
    assert scene.router.core.statistics().steps_committed == 1
    measured = scene.router.core.measured
    assert measured.steps == 2  # passes
    assert measured.last is not None
    assert (measured.last.step, measured.last.cost_key) == (0, "update")
    assert measured.totals["update"].tolist() == [
        pytest.approx([1.0, 1.4]), pytest.approx([0.4, 0.0]),
    ]  # fmt: skip
    assert measured.transport == pytest.approx({"update": 0.1, "critic": 0.0})


async def test_times_of_a_rank_that_is_fenced_say_nothing(scene: TwoRanks) -> None:
    old = await scene.old_group()
    scene.hello(0, None, "new-0")
    for dp_rank, rank in enumerate(old):
        for message in with_it(dp_rank):
            rank.say(message)
    await scene.durable()
    measured = scene.router.core.measured
    assert (scene.router.core.statistics().steps_committed, measured.steps) == (0, 0)
    assert not any(measured.unmeasured.values())
