"""Runs the planner: for a small window on the event loop, for a large one in its own thread.

A large window would delay connections; for a small one a thread would only compete with the event
loop for the interpreter.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from rollout_dispatcher.core.effects import PlanRequested, ReplanRequested
from rollout_planner.planner import plan
from rollout_planner.types import Grouping, Oversize, Plan, PlanConfig, Window

#: Windows of up to so many samples are planned on the event loop, in a millisecond or two: less
#: than a slice of deliveries.
PLANNED_HERE_SAMPLES = 1024
#: The same where samples may be split over ranks, which takes some ten times as long.
SPLIT_HERE_SAMPLES = 128


class Planner:
    """Plans for any number of DP ranks. observe: called with the seconds that a plan took.

    clock: used on the event loop's thread only.
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
        """Use this config from the next plan on."""
        self._config = config

    def plans_here(self, wanted: PlanRequested | ReplanRequested) -> bool:
        """Return whether to plan on the event loop."""
        most = PLANNED_HERE_SAMPLES if self._config.max_split == 1 else SPLIT_HERE_SAMPLES
        return len(wanted.window) <= most

    def plan(self, wanted: PlanRequested | ReplanRequested) -> Plan:
        """Plan now. Raises what the planner raises, which is a bug."""
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
        """Call `then` with the plan, or `fail` with the error of it or of the planner."""
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
        """Cancel pending plans, and release the thread."""
        for planning in self._planning:
            planning.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _for_open_step(config: PlanConfig, window: Window) -> PlanConfig:
    """Relax limits for a step that an earlier process planned with larger micro-batches.

    A sample above the token budget goes alone; groups larger than a micro-batch stay on one rank.
    """
    config, m = replace(config, oversize=Oversize.ALONE), config.micro_batch_size
    if config.grouping is Grouping.MICRO_BATCH and m is not None:
        largest = np.unique(window.group[window.group >= 0], return_counts=True)[1].max(initial=0)
        if largest > m:
            return replace(config, grouping=Grouping.RANK)
    return config
