"""A plan is used: its samples leave the buffer, and a step is open. Or an open step has a new plan.

Invariant: whatever becomes of the process, a step that a rank may hear of is a fact.
"""

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.freshness import Freshness
from rollout_dispatcher.core.effects import Effect, PlanWanted, ReplanWanted
from rollout_dispatcher.core.facts import Note
from rollout_dispatcher.core.planning.requests import report_plan
from rollout_dispatcher.core.planning.selection_bias import SelectionBias
from rollout_dispatcher.core.planning.usual_loss import UsualLoss
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import planned
from rollout_dispatcher.core.totals import Totals
from rollout_planner.types import Plan


class Booking:
    """Makes steps of plans. batch: units of a whole step.

    note: None where nobody keeps facts; a plan's is as large as the window, and not built then.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        ledger: StepLedger,
        freshness: Freshness,
        totals: Totals,
        note: Note | None,
        *,
        bias: SelectionBias,
        usual: UsualLoss,
        batch: int,
    ) -> None:
        self._buffer, self._ledger, self._freshness = buffer, ledger, freshness
        self._totals, self._bias, self._usual = totals, bias, usual
        self._note, self._batch = note, batch

    def open(self, wanted: PlanWanted, plan: Plan, now: float) -> list[Effect]:
        """The next step."""
        chosen = [wanted.entries[at] for at in plan.chosen.tolist()]
        steps = self._ledger.steps
        version = self._freshness.training_version(steps.next)
        report = report_plan(steps.next_step, plan, wanted, chosen, version=version, now=now)
        self._take(wanted, plan, chosen)
        assert wanted.window.usual_loss_tokens is not None, "requests say it"
        usual_loss, _ = wanted.window.usual_loss_tokens
        effects = self._ledger.open(plan, wanted.entries, now, usual_loss)
        if self._note is not None:
            gone = set(chosen)
            left = (entry.ticket for entry in wanted.entries if entry not in gone)
            self._note(planned(steps.newest, *left))
        return [report, *effects]

    def _take(self, wanted: PlanWanted, plan: Plan, chosen: list[Entry]) -> None:
        """The chosen samples leave the buffer; the others were passed over."""
        window = wanted.window
        assert window.loss_tokens is not None
        self._usual.planned(window)
        self._totals.dispatched.add([entry.sample.tokens for entry in chosen])
        self._bias.dispatched(
            window.tokens[plan.chosen], window.loss_tokens[plan.chosen], float(plan.cost.sum())
        )
        units = self._buffer.units_of(chosen)
        self._buffer.take(chosen)
        for entry in wanted.entries:
            entry.skips += 1  # the chosen ones are gone, nobody reads theirs again
        self._totals.planned[wanted.trigger] += 1
        self._totals.small_steps += units < self._batch

    def replace(self, wanted: ReplanWanted, plan: Plan) -> list[Effect]:
        """An open step's new plan; it is not used if what it was to be filled up with has left."""
        if not all(map(self._buffer.holds, wanted.refill)):
            return []
        self._totals.dispatched.add([entry.sample.tokens for entry in wanted.refill])
        self._buffer.take(wanted.refill)
        effects = self._ledger.replan(wanted.step.number, plan, wanted.entries)
        if self._note is not None:
            self._note(planned(self._ledger.steps[wanted.step.number]))
        return effects
