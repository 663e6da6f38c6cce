"""Steps come into being: which plan is asked of the planner, and what becomes of its answer.

    nothing asked --wanted, and the trigger says go--> a plan of the next step --planned--+
    ^      |                                                                              |
    |      +------------a step is unplanned----------> a plan of that step ---replanned---+
    +-------------------------------------------------------------------------------------+

A step is *unplanned* while it has no plan for as many DP ranks as there are, or has lost samples.
Invariants: one plan is asked for at a time; an unplanned step comes before the next one; a plan for
another number of DP ranks than there are by now is not used. When to ask is for `Timing`, what for
`Selection`; what makes capacity on the way is `Relief`, and what is made of an answer `Booking`.
"""

from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import Effect, PlanWanted, ReplanWanted
from rollout_dispatcher.core.planning.booking import Booking
from rollout_dispatcher.core.planning.relief import Relief
from rollout_dispatcher.core.planning.selection import Selection
from rollout_dispatcher.core.planning.timing import Timing
from rollout_dispatcher.core.planning.trigger import MakeCapacity, Wait
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_planner.types import Plan


class Planning:
    """Turns buffered samples into steps, when ranks want them. target: excess of a good trial."""

    def __init__(
        self,
        ledger: StepLedger,
        timing: Timing,
        selection: Selection,
        relief: Relief,
        booking: Booking,
        *,
        target: float,
    ) -> None:
        self._ledger, self._timing, self._selection = ledger, timing, selection
        self._relief, self._booking, self._target = relief, booking, target
        self._asked: PlanWanted | ReplanWanted | None = None

    def configure(self, config: DispatchConfig) -> None:
        """The next plan is asked for, and judged, so; one that is asked for goes on."""
        self._target = config.target_excess
        self._timing.configure(config.trigger)
        self._selection.configure(config)
        self._relief.configure(config)

    @property
    def busy(self) -> bool:
        """Whether the planner's answer is awaited."""
        return self._asked is not None

    # -- asking -----------------------------------------------------------------------------

    def consider(self, now: float) -> list[Effect]:
        """Open the steps that wait, then ask for a plan if a step is wanted and none is asked."""
        ledger, self._timing.wake_at = self._ledger, None
        self._timing.note_hunger(now, hungry=ledger.hungry)
        if ledger.over:
            return []
        effects: list[Effect] = []
        while ledger.steps.waiting and ledger.wanted:
            effects += ledger.open_waiting()
        if self._asked is not None:
            return effects
        if (unplanned := ledger.unplanned) is not None:
            self._asked = self._selection.request_again(unplanned)
            return [*effects, self._asked]
        return effects + self._ask(now) if ledger.wanted else effects

    def _ask(self, now: float) -> list[Effect]:
        """A step is wanted: ask the trigger, once nothing is ready that the step may not have.

        Where something has left, others may come in before anything else is decided.
        """
        selection = self._selection
        if selection.drops and self._relief.drop_unwanted():
            return []
        decided = self._timing.decide(selection.ready, now)
        if isinstance(decided, MakeCapacity):
            return self._relief.give_up_youngest(now)
        if isinstance(decided, Wait):
            return []
        self._asked = selection.request(decided)
        return [self._asked]

    # -- the planner's answers --------------------------------------------------------------

    def planned(self, wanted: PlanWanted, plan: Plan, now: float) -> list[Effect]:
        """The next step, unless the plan is for other ranks or was a trial that missed.

        Returns nothing then, and otherwise what follows; samples have left the buffer.
        """
        self._answered(wanted)
        if self._ledger.over or wanted.dp_size != self._ledger.generation.dp_size:
            return []
        if wanted.trial and plan.excess > self._target:
            self._timing.tried = self._selection.units_of(wanted)
            return []
        self._timing.planned()
        return self._booking.open(wanted, plan, now)

    def replanned(self, wanted: ReplanWanted, plan: Plan) -> list[Effect]:
        """The unplanned step's new plan, unless it or the number of ranks has changed once more."""
        self._answered(wanted)
        dp_size = self._ledger.generation.dp_size
        if wanted.step is not self._ledger.unplanned or wanted.dp_size != dp_size:
            return []
        return self._booking.replace(wanted, plan)

    def _answered(self, wanted: PlanWanted | ReplanWanted) -> None:
        assert wanted is self._asked
        self._asked = None
