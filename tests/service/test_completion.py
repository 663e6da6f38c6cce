"""The end by itself: whom it waits for, and that it is no end while steps are open again."""

import asyncio
from pathlib import Path

import pytest

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.router import Router
from tests.service.durability.test_barrier import SlowLog
from tests.service.durability.test_behind_the_barrier import Wire, push_one

WAITS_SECONDS = 0.1


class Run:
    """One rank, whose steps are retained; what is noted is durable at once, on request."""

    def __init__(self) -> None:
        self.log = SlowLog()
        config = ServeConfig(
            dp_size=1, global_batch_size=1, micro_batch_size=1, journal_dir=Path("unused"),
            sample_retention="checkpoint", drain_timeout=WAITS_SECONDS,
        )  # fmt: skip
        clock = asyncio.get_running_loop().time
        core = DispatcherCore(core_config(config))
        self.router = Router(config, core, Metrics(config, core, clock), clock, self.log)

    async def settles(self) -> None:
        """Everything that was noted is durable, and what follows was done."""
        for _ in range(8):
            await self.log.durable(len(self.log.batches))
            await asyncio.sleep(0.002)

    async def rank(self, generation: int | None = None) -> Wire:
        wire = Wire(self.router)
        wire.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=generation))
        await self.settles()
        return wire

    async def trained(self) -> Wire:
        """One step is committed, and the stream has ended."""
        producer, rank = Wire(self.router), await self.rank()
        producer.say(m.HelloProducer(client_id="p"))
        push_one(producer)
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
        lose(producer)
        assert self.router.core.drained
        return rank


def lose(wire: Wire) -> None:
    wire.peer.connection_lost(None)


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
    lose(await run.trained())
    assert "waiting 0.1 s at most (--set drain-timeout) for DP ranks that left" in caplog.text
    assert "did not come back" not in caplog.text
    assert await ends(run)
    assert "a client left without a goodbye and did not come back" in caplog.text
    run.router.close()


async def test_who_goes_back_to_a_checkpoint_and_is_lost_then_leaves_no_end() -> None:
    run = Run()
    lose(await run.trained())  # it has some time to come back
    rank = await run.rank()
    position = m.CheckpointPosition(run_id=run.router.core.run_id, step=-1)
    rank.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=2, resume=position))
    await run.settles()
    assert not run.router.core.drained
    lose(rank)
    assert not await ends(run)
    run.router.close()
