"""Settings of the core.

`SteadyClock`: the core's time, in seconds that never go back, whatever the source does.

Invariant: two readings differ by the source's advance in between, without its steps back. So no
wait is negative, and a step back delays no deadline. A step forward counts as passed time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from rollout_dispatcher.core.measuring.cost_in_use import CostConfig
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.core.steps.generation import SizeCheck
from rollout_dispatcher.sample import Schema
from rollout_planner.types import Sync


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings that may change during a run; sizes as the batch is counted, max_wait in seconds.

    buffer: ready samples at which producers are blocked.
    """

    window: int
    buffer: int
    max_wait: float
    target_excess: float


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Settings of one run; times in seconds.

    by_groups: batch, window and the cap on samples count groups. keep_incomplete: a group that
    lacks members is trained on without them. drop_above: accepted samples of more tokens than this
    are dropped, with their groups.
    durable: decisions have facts, for a journal. retain: committed steps are kept until a saved
    checkpoint covers them; needs a journal, which has their payloads. reports_accepted: decisions
    list accepted samples, for the record. sync: where DP ranks wait for each other. check_size:
    raises for a `dp_size` that a new generation may not have; None: it has to stay.
    schema, cost: of all samples; schema None: that of the first accepted push.
    """

    dp_size: int
    limits: BufferLimits
    trigger: TriggerConfig
    target_excess: float = 0.01
    sync: Sync = Sync.MICRO_STEP
    groups_matter: bool = True
    by_groups: bool = False
    keep_incomplete: bool = False
    flush_partial: bool = True
    check_size: SizeCheck | None = None
    drop_above: int | None = None
    durable: bool = False
    retain: bool = False
    reports_accepted: bool = False
    group_timeout: float = 600.0
    producer_timeout: float = 60.0
    rank_timeout: float = 60.0
    max_staleness: int | None = None
    steps_per_version: int = 1
    staleness_policy: StalenessPolicy = StalenessPolicy.DROP
    max_open_steps: int = 4
    producer_credits: int = 8
    id_horizon: int = 1_000_000
    schema: Schema | None = None
    cost: CostConfig = field(default_factory=CostConfig)

    @property
    def tuning(self) -> Tuning:
        """The settings that may change."""
        trigger = self.trigger
        return Tuning(trigger.window, self.limits.samples, trigger.max_wait, self.target_excess)

    def tuned(self, tuning: Tuning) -> Self:
        """The same with other values of the settings that may change."""
        return replace(
            self,
            limits=replace(self.limits, samples=tuning.buffer),
            trigger=replace(self.trigger, window=tuning.window, max_wait=tuning.max_wait),
            target_excess=tuning.target_excess,
        )


class SteadyClock:
    """Returns seconds since the source's first reading when called. For one thread."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._last = self._now = source()

    def __call__(self) -> float:
        """The time now; at least what it was at the last call."""
        reading = self._source()
        if reading > self._last:
            self._now += reading - self._last
        self._last = reading
        return self._now
