"""Runs the planner: a small window here, a large one in a thread of its own.

A large window would keep connections waiting; for a small one the thread would only compete with
the event loop for the interpreter.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from rollout_dispatcher.core.effects import PlanRequested, ReplanRequested
from rollout_planner.planner import plan
from rollout_planner.types import Grouping, Oversize, Plan, PlanConfig, Window

#: A window of up to so many samples is planned on the event loop: that takes a millisecond or two,
#: less than a slice of deliveries.
PLANNED_HERE_SAMPLES = 1024
#: The same where samples may be split over ranks, which takes some ten times as long.
SPLIT_HERE_SAMPLES = 128


class Planner:
    """Plans for any number of DP ranks; `observe` is told how long each plan has taken.

    clock: for the event loop's thread alone, so the thread that plans never asks it.
    """

    def __init__(
        self,
        config: PlanConfig,
        observe: Callable[[float], object],
        clock: Callable[[], float],
    ) -> None:
        self._config, self._observe, self._clock = config, observe, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._planning: set[asyncio.Future[Plan]] = set()

    def configure(self, config: PlanConfig) -> None:
        """Plan so from the next one on; one that is under way stays as it was asked for."""
        self._config = config

    def plans_here(self, wanted: PlanRequested | ReplanRequested) -> bool:
        """Whether the event loop has time for this plan."""
        most = PLANNED_HERE_SAMPLES if self._config.max_split == 1 else SPLIT_HERE_SAMPLES
        return len(wanted.window) <= most

    def plan(self, wanted: PlanRequested | ReplanRequested) -> Plan:
        """Plan now; raises what the planner raises, which is a bug of ours."""
        began = self._clock()
        found = self._plan(wanted, self._config)
        self._observe(self._clock() - began)
        return found

    @staticmethod
    def _plan(wanted: PlanRequested | ReplanRequested, config: PlanConfig) -> Plan:
        if config.dp_size != wanted.dp_size:
            config = replace(config, dp_size=wanted.dp_size)
        if wanted.cost is not None:
            config = replace(config, cost=wanted.cost)
        if wanted.slowness is not None:
            config = replace(config, slowness=wanted.slowness)
        whole = isinstance(wanted, ReplanRequested)
        if whole:
            config = _for_open_step(config, wanted.window)
        return plan(wanted.window, config, wanted.take, whole=whole)

    def plan_in_thread(
        self,
        wanted: PlanRequested | ReplanRequested,
        then: Callable[[Plan], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Call `then` with the plan, or `fail` with what it or the planner has raised."""
        began = self._clock()

        def done(planning: asyncio.Future[Plan]) -> None:
            self._planning.discard(planning)
            if planning.cancelled():
                return
            try:
                found = planning.result()
                self._observe(self._clock() - began)
                then(found)
            except Exception as error:
                fail(error)

        loop = asyncio.get_running_loop()
        planning = loop.run_in_executor(self._thread, self._plan, wanted, self._config)
        self._planning.add(planning)
        planning.add_done_callback(done)

    def close(self) -> None:
        """Let go of the thread, and of plans that nobody waits for."""
        for planning in self._planning:
            planning.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _for_open_step(config: PlanConfig, window: Window) -> PlanConfig:
    """As an earlier process may have planned it, whose micro-batches were larger.

    What exceeds the token budget goes alone, and groups of more samples than a micro-batch has stay
    on one rank instead.
    """
    config, m = replace(config, oversize=Oversize.ALONE), config.micro_batch_size
    if config.grouping is Grouping.MICRO_BATCH and m is not None:
        largest = np.unique(window.group[window.group >= 0], return_counts=True)[1].max(initial=0)
        if largest > m:
            return replace(config, grouping=Grouping.RANK)
    return config
