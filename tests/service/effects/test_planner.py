"""Where plans are made, and on whose clock."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.effects import PlanRequested, ReplanRequested
from rollout_dispatcher.core.planning.planning import UsualLoss, window_of
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.service.planner import PLANNED_HERE_SAMPLES, Planner
from rollout_planner.cost import Quadratic
from rollout_planner.types import Grouping, Plan, PlanConfig
from tests.support.samples import make_sample


def wanted(samples: int) -> PlanRequested:
    """A plan of all of so many samples, for two DP ranks."""
    entries = [Entry(make_sample(f"s{at}", 1 + at % 7), at, 0.0) for at in range(samples)]
    window = window_of(entries, np.zeros(samples, np.bool_))
    window = replace(window, usual_loss_tokens=UsualLoss().with_(window))
    return PlanRequested(tuple(entries), window, samples, 2, Trigger.WINDOW_FULL, trial=False)


@pytest.mark.parametrize("samples", [16, PLANNED_HERE_SAMPLES + 1])
async def test_the_clock_is_asked_in_the_thread_of_the_event_loop_alone(samples: int) -> None:
    asked: list[int] = []

    def clock() -> float:
        asked.append(threading.get_ident())
        return time.monotonic()

    config = PlanConfig(2, samples, micro_batch_size=1, cost=Quadratic())
    duration = Histogram("plan", "Seconds.", registry=CollectorRegistry())
    planner = Planner(config, duration.observe, clock)
    order = wanted(samples)
    found: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
    if planner.plans_here(order):
        found.set_result(planner.plan(order))
    else:
        planner.plan_in_thread(order, found.set_result, found.set_exception)
    async with asyncio.timeout(20):
        plan = await found
    assert sorted(plan.chosen.tolist()) == list(range(samples))
    assert asked == [threading.get_ident()] * 2
    planner.close()


def test_an_open_step_keeps_its_samples_whatever_its_ranks_may_have() -> None:
    """A smaller step is for samples that can wait for the next; an open step's cannot."""
    config = PlanConfig(2, 16, micro_batch_size=1, cost=Quadratic(), rank_tokens=8)
    duration = Histogram("plan", "Seconds.", registry=CollectorRegistry())
    planner = Planner(config, duration.observe, time.monotonic)
    order = wanted(16)
    assert len(planner.plan(order).chosen) < 16
    rest = tuple((entry,) for entry in order.entries)
    step = OpenStep(0, (rest[:8], rest[8:]), "digest", 0.0)
    again = ReplanRequested(step, order.entries, order.window, 1)
    assert sorted(planner.plan(again).chosen.tolist()) == list(range(16))
    planner.close()


@pytest.mark.parametrize("limit", [{"micro_batch_size": 4}, {"micro_batch_tokens": 8}])
def test_an_open_step_of_groups_too_large_for_a_micro_batch_of_now_is_planned_again(
    limit: dict[str, Any],
) -> None:
    """An earlier process planned it: with larger ones, or under another `--groups`."""
    config = PlanConfig(2, 16, cost=Quadratic(), grouping=Grouping.MICRO_BATCH, **limit)
    planner = Planner(config, Histogram("plan", "Seconds.", registry=None).observe, time.monotonic)
    order = wanted(16)
    window = replace(order.window, group=np.arange(16) // 8)
    rest = tuple((entry,) for entry in order.entries)
    step = OpenStep(0, (rest[:8], rest[8:]), "digest", 0.0)
    found = planner.plan(ReplanRequested(step, order.entries, window, 1))
    (alone,) = found.micro_batches
    assert sorted(np.concatenate(alone).tolist()) == list(range(16))
    assert max(map(len, alone)) == (config.micro_batch_size or 8)
    planner.close()
