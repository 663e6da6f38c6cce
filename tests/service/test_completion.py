"""The end by itself: whom it waits for, and that it is no end while steps are open again."""

import asyncio
from typing import Any

import pytest

from rollout_dispatcher.protocol import messages as m
from tests.service.wires import SlowLog, Wire, make_router

WAITS_SECONDS = 0.1


class Run:
    """One rank, whose steps are retained; what is noted is durable at once, on request."""

    def __init__(self) -> None:
        self.log = SlowLog()
        kept: dict[str, Any] = {"sample_retention": "checkpoint", "drain_timeout": WAITS_SECONDS}
        self.router = make_router(self.log, **kept)

    async def settles(self) -> None:
        """Everything that was noted is durable, and what follows was done."""
        for _ in range(8):
            await self.log.durable()
            await asyncio.sleep(0.002)

    async def rank(self, generation: int | None = None) -> Wire:
        hello = m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=generation)
        wire = Wire(self.router, hello)
        await self.settles()
        return wire

    async def trained(self) -> Wire:
        """One step is committed, and the stream has ended."""
        producer = Wire(self.router, m.HelloProducer(client_id="p"))
        rank = await self.rank()
        producer.push_one()
        rank.say(m.Demand(taken=-1, hungry=True))
        await self.settles()
        producer.say(m.EndStream())
        producer.say(m.Bye())
        step = self.router.core.step(0)
        assert step is not None
        rank.say(m.Prepared(step=0, digest=step.digest))
        rank.say(m.Demand(taken=0, hungry=False))
        rank.say(m.Commit(step=0))
        await self.settles()
        producer.lose()
        assert self.router.core.drained
        return rank


async def ends(run: Run) -> bool:
    """Whether it ends by itself before long."""
    try:
        async with asyncio.timeout(3 * WAITS_SECONDS):
            await run.router.finished()
    except TimeoutError:
        return False
    return True


async def test_who_left_without_a_goodbye_is_waited_for_and_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    run = Run()
    (await run.trained()).lose()
    assert "waiting 0.1 s at most (--set drain-timeout) for DP ranks that left" in caplog.text
    assert "did not come back" not in caplog.text
    assert await ends(run)
    assert "a client left without a goodbye and did not come back" in caplog.text
    run.router.close()


async def test_who_goes_back_to_a_checkpoint_and_is_lost_then_leaves_no_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    run = Run()
    (await run.trained()).lose()  # it has some time to come back
    rank = await run.rank()
    position = m.CheckpointPosition(run_id=run.router.core.run_id, step=-1)
    rank.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=2, resume=position))
    await run.settles()
    assert not run.router.core.drained
    assert caplog.text.count("DP rank 0 of 1 joined generation 2") == 1, "and says hello twice"
    rank.lose()
    assert not await ends(run)
    run.router.close()
