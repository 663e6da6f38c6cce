"""What to plan: the window that the next step may choose from, and what may not be in it."""

from collections.abc import Callable, Iterator
from itertools import groupby

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.freshness import Freshness, NextStep
from rollout_dispatcher.core.buffer.phases import Phases
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import PlanWanted, ReplanWanted
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.measuring.cost_in_use import CostInUse
from rollout_dispatcher.core.planning.requests import request_plan, request_replan
from rollout_dispatcher.core.planning.trigger import Go
from rollout_dispatcher.core.planning.usual_loss import UsualLoss
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import OpenStep


class Selection:
    """Looks at the buffer for the next step."""

    def __init__(
        self,
        config: DispatchConfig,
        buffer: SampleBuffer,
        phases: Phases,
        freshness: Freshness,
        ledger: StepLedger,
        *,
        usual: UsualLoss,
        cost: CostInUse,
    ) -> None:
        self._usual, self._cost = usual, cost
        self._batch, self._window = config.trigger.batch, config.trigger.window
        self._buffer, self._phases, self._freshness = buffer, phases, freshness
        self._ledger = ledger
        #: Whether these settings ever have samples dropped.
        self.drops = config.drop_above is not None or freshness.drops
        if freshness.drops:
            buffer.watch_versions()

    def configure(self, config: DispatchConfig) -> None:
        """From the next request on, choose from such a window."""
        self._window = config.trigger.window

    @property
    def ready(self) -> int:
        """Units that a plan could choose from; of those that are flushed at most a window."""
        return self._phases.count(self._window)

    def request(self, go: Go) -> PlanWanted:
        """Ask for a plan of the next step."""
        entries = self._phases.window(self._window)
        due = self._freshness.must_go(entries, self._ledger.steps.next, self._batch)
        take = min(self._batch, self._buffer.units_of(entries))
        generation, cost = self._ledger.generation, self._cost
        return request_plan(
            entries, due, take, generation.dp_size, go, usual=self._usual,
            cost=cost.fitted_cost, slowness=cost.slowness(generation.number),
        )  # fmt: skip

    def request_again(self, step: OpenStep) -> ReplanWanted:
        """Ask for another plan of an open step."""
        generation, cost = self._ledger.generation, self._cost
        return request_replan(
            step, generation.dp_size, self._refill(step),
            cost=cost.fitted_cost, slowness=cost.slowness(generation.number),
        )  # fmt: skip

    def _refill(self, step: OpenStep) -> list[Entry]:
        """The oldest samples, groups whole, that may take the place of those that a step has lost.

        None for a step that has lost none. They do not count as chosen before others: nobody who is
        younger is passed over.
        """
        missing = self._batch - self._buffer.units_of(list(step.entries()))
        found: list[Entry] = []
        if step.digest or missing <= 0:
            return found
        eligible = filter(self._may_join(step), self._phases.window(self._window))
        for _, members in groupby(eligible, _unit):
            unit = list(members)
            if (units := self._buffer.units_of(unit)) <= missing:
                found += unit
                missing -= units
        return found

    def _may_join(self, step: OpenStep) -> Callable[[Entry], bool]:
        """Which samples an open step may have: not too stale for it, and of no later phase."""
        committed = self._ledger.steps.committed
        oldest = self._freshness.oldest(NextStep(step.number, committed))
        known = [entry.version for entry in step.entries() if entry.version is not None]
        newest = max(known, default=-1) if self._phases.in_use else None

        def may_join(entry: Entry) -> bool:
            version = entry.version
            if version is None:
                return newest is None
            return (oldest is None or version >= oldest) and (newest is None or version <= newest)

        return may_join

    def units_of(self, wanted: PlanWanted) -> int:
        """How many units a plan was to choose from."""
        return self._buffer.units_of(wanted.entries)

    def unwanted(self) -> Iterator[tuple[DropReason, list[Entry]]]:
        """What the next step may not have, with whole groups, and why; one after the other."""
        oldest = self._freshness.oldest(self._ledger.steps.next)
        yield DropReason.OVERSIZE, self._buffer.ages.too_long()
        if oldest is not None:
            yield DropReason.STALE, self._buffer.ages.older_than(oldest)


def _unit(entry: Entry) -> tuple[int, int]:
    """What goes together: members of a group, which follow each other, or one sample."""
    return entry.group, entry.ticket if entry.group < 0 else -1
