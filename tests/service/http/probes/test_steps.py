"""What `/debug/steps` says of many steps and ranks holds nobody up for long."""

import asyncio
import json

import numpy as np

from rollout_dispatcher.core.measuring.times import Pass
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.http.probes import describe_steps
from rollout_dispatcher.service.step_trace import SeenStep

STEPS, RANKS, MICRO_BATCHES = 20, 16, 4


def seen(number: int) -> SeenStep:
    cost = np.ones((RANKS, MICRO_BATCHES))
    step = SeenStep(number, 1, "window-full", 64, 64, 640, 0.0, cost, 0.0, 4.0)
    step.measured["update"] = Pass()
    for rank in range(RANKS):
        step.measured["update"].report(rank, [1.0] * MICRO_BATCHES, [0.0] * MICRO_BATCHES)
    return step


async def test_others_have_their_turn_after_each_step() -> None:
    recent = [seen(number) for number in range(STEPS)]
    config = ServeConfig(dp_size=RANKS, global_batch_size=64, micro_batch_size=1)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    found = json.loads(await describe_steps(recent, config, 1000.0))
    counting.cancel()
    assert turns >= STEPS
    assert [step["step"] for step in found["steps"]] == [*range(STEPS)]
    assert found["remembered"] == 64
    assert found["steps"][0]["planned_at"] == 1000.0


async def test_of_no_step_it_is_json_too() -> None:
    config = ServeConfig(dp_size=1, global_batch_size=1, micro_batch_size=1)
    assert json.loads(await describe_steps([], config, 0.0))["steps"] == []
