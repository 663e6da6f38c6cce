"""What a strategy is: which samples it may take, and who trains on what."""

from typing import Protocol, runtime_checkable

from rollout_planner.split.parts import Batch, Parts
from rollout_planner.types import PlanConfig
from rollout_planner.work import Work


@runtime_checkable
class PlanningStrategy(Protocol):
    """One way to balance.

    looks_ahead: whether it may take any samples of the window; otherwise it takes the oldest, and
        a window larger than a dispatch batch would be waiting for nothing.
    """

    @property
    def looks_ahead(self) -> bool:
        """See above."""

    def split(self, batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
        """The micro-batches of every rank, the same number for each, within the config's caps.

        work: what it may spend on comparing several ways.
        """
