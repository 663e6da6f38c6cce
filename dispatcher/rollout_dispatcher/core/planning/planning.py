"""Steps come into being: which plan is asked of the planner, and what becomes of its answer.

    nothing asked --wanted, and the trigger says go--> a plan of the next step --planned--+
    ^      |                                                                              |
    |      +------------a step is outgrown-----------> a plan of that step ---replanned---+
    +-------------------------------------------------------------------------------------+

Invariants: one plan is asked for at a time; an outgrown step comes before the next one; a plan for
another number of DP ranks than there are by now is not used.
"""

import math

from rollout_dispatcher.core.buffer.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.freshness import Freshness, NextStep
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import (
    DropReason,
    Effect,
    GroupGivenUp,
    PlanWanted,
    ReplanWanted,
)
from rollout_dispatcher.core.facts import Note, Planned
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.planning.requests import report_plan, request_plan, request_replan
from rollout_dispatcher.core.planning.trigger import Go, MakeRoom, Situation, Wait, decide
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.plan import Plan

#: Room that was made shows after this share of `max_wait`: before, no more is made.
ROOM_SHOWS_AFTER = 1 / 8


class Planning:
    """Turns buffered samples into steps, when ranks want them."""

    def __init__(
        self,
        config: DispatchConfig,
        buffer: SampleBuffer,
        ledger: StepLedger,
        *,
        admission: Admission,
        freshness: Freshness,
        dropping: Dropping,
        lifecycle: Lifecycle,
        totals: Totals,
        note: Note,
    ) -> None:
        self._config, self._buffer, self._ledger = config, buffer, ledger
        self._admission, self._freshness = admission, freshness
        self._dropping, self._lifecycle = dropping, lifecycle
        self._totals, self._note = totals, note
        self._asked: PlanWanted | ReplanWanted | None = None
        #: Since when a rank waits for the next step.
        self.hungry_since: float | None = None
        self._tried: int | None = None
        #: Since when payloads are on their way from memory to the journal; None if none is.
        self.helped_since: float | None = None
        #: When to consider it next, though nothing else happens.
        self.wake_at: float | None = None

    @property
    def busy(self) -> bool:
        """Whether the planner's answer is awaited."""
        return self._asked is not None

    # -- asking -----------------------------------------------------------------------------

    def consider(self, now: float) -> list[Effect]:
        """Open the steps that wait, then ask for a plan if a step is wanted and none is asked."""
        self.wake_at = None
        self._note_hunger(now)
        effects: list[Effect] = []
        while self._ledger.steps.waiting and self._ledger.wanted:
            effects += self._ledger.open_waiting()
        if self._asked is not None:
            return effects
        if (outgrown := self._ledger.outgrown) is not None:
            self._asked = request_replan(outgrown, self._ledger.generation.dp_size)
            return [*effects, self._asked]
        return effects + self._ask(now) if self._ledger.wanted else effects

    def _note_hunger(self, now: float) -> None:
        if not self._ledger.hungry:
            self.hungry_since = None
        elif self.hungry_since is None:
            self.hungry_since = now

    def _ask(self, now: float) -> list[Effect]:
        """A step is wanted: ask the trigger, with nothing in the window that it may not have."""
        effects = self._drop_unwanted(now)
        while isinstance(decision := self._decide(now), MakeRoom):
            effects += self._make_room(now)
            effects += self._drop_unwanted(now)
        if isinstance(decision, Wait):
            self.wake_at = None if decision.seconds is None else now + decision.seconds
            return effects
        self._asked = self._request(decision)
        return [*effects, self._asked]

    def _decide(self, now: float) -> Go | Wait | MakeRoom:
        config = self._config.trigger
        ready = self._freshness.count(self._buffer, config.window)
        return decide(config, self._situation(ready, now))

    def _request(self, go: Go) -> PlanWanted:
        batch = self._config.trigger.batch
        entries = self._freshness.window(self._buffer, self._config.trigger.window)
        due = self._freshness.must_go(entries, self._next_step, batch)
        take = min(batch, self._buffer.units_of(entries))
        return request_plan(entries, due, take, self._ledger.generation.dp_size, go)

    @property
    def _next_step(self) -> NextStep:
        steps = self._ledger.steps
        return NextStep(steps.next_step, steps.committed)

    def _drop_unwanted(self, now: float) -> list[Effect]:
        """Drop what the next step may not have, and what comes in for it."""
        effects: list[Effect] = []
        while self._drop():
            effects += self._admission.retry(now)
        return effects

    def _drop(self) -> int:
        """Drop what the next step may not have; returns how many samples that were."""
        dropped, above = 0, self._config.drop_above
        if above is not None:
            dropped += self._dropping.ready(
                DropReason.OVERSIZE, lambda entry: entry.sample.tokens > above
            )
        is_stale = self._freshness.stale(self._next_step)
        if is_stale is not None:
            dropped += self._dropping.ready(DropReason.STALE, is_stale)
        return dropped

    def _make_room(self, now: float) -> list[Effect]:
        """Beginnings of groups fill the memory: the youngest is given up, and its producers told.

        There is one with samples, or nobody would be held back.
        """
        cap = self._admission.pressed
        # What a journal can take then shows after a while, but not after all of the wait again.
        self._admission.last_moved = now - self._config.trigger.max_wait * (1 - ROOM_SHOWS_AFTER)
        youngest = [group for group in self._buffer.groups if group.entries][-1]
        given_up = len(youngest.entries)
        why = "there was no room for all open groups; raise --buffer-bytes or use a journal"
        self._dropping.forbid(youngest, why, DropReason.NO_ROOM, now)
        effects = self._admission.retry(now)
        assert cap is not None
        return [GroupGivenUp(youngest.group_id, given_up, cap), *effects]

    def _situation(self, ready: int, now: float) -> Situation:
        admission, hungry_since = self._admission, self.hungry_since
        return Situation(
            ready=ready,
            full=admission.pressed is not None,
            growing=self._buffer.groups.samples > 0,
            flush=self._freshness.flushing or self._lifecycle.flushes(ready),
            hungry_for=None if hungry_since is None else now - hungry_since,
            tried=self._tried,
            stuck=admission.is_stuck(now) and (ready > 0 or not self._is_helped),
            quiet_for=now - admission.last_moved,
            helped_for=math.inf if self.helped_since is None else now - self.helped_since,
        )

    @property
    def _is_helped(self) -> bool:
        """Whether room is on its way: payloads leave memory for a journal that takes them."""
        pressed = self._admission.pressed
        return self.helped_since is not None and pressed is not None and pressed.cap == "bytes"

    # -- the planner's answers --------------------------------------------------------------

    def planned(self, wanted: PlanWanted, plan: Plan, now: float) -> list[Effect]:
        """The next step, unless the plan is for other ranks or was a trial that missed.

        Returns nothing then, and otherwise what follows; samples have left the buffer.
        """
        self._answered(wanted)
        if wanted.dp_size != self._ledger.generation.dp_size:
            return []
        if wanted.trial and plan.excess > self._config.target_excess:
            self._tried = self._buffer.units_of(wanted.entries)
            return []
        chosen = [wanted.entries[at] for at in plan.chosen.tolist()]
        version = self._freshness.training_version(self._next_step)
        number = self._ledger.steps.next_step
        report = report_plan(number, plan, wanted, chosen, version=version, now=now)
        self._take(wanted, chosen)
        effects = self._ledger.open(plan, wanted.entries, now)
        if self._config.durable:  # the fact is as large as the window: not built for nobody
            gone = set(chosen)
            left = (entry.ticket for entry in wanted.entries if entry not in gone)
            self._note_plan(self._ledger.steps.uncommitted()[-1], *left)
        return [report, *effects]

    def _take(self, wanted: PlanWanted, chosen: list[Entry]) -> None:
        """The chosen samples leave the buffer; the others were passed over."""
        self._totals.dispatched.add([entry.sample.tokens for entry in chosen])
        units = self._buffer.units_of(chosen)
        self._buffer.take(chosen)
        for entry in wanted.entries:
            entry.skips += 1  # the chosen ones are gone, nobody reads theirs again
        self._tried = self.hungry_since = None
        self._totals.planned[wanted.trigger] += 1
        self._totals.small_steps += units < self._config.trigger.batch

    def replanned(self, wanted: ReplanWanted, plan: Plan) -> list[Effect]:
        """The outgrown step's new plan, unless the number of ranks has changed once more."""
        self._answered(wanted)
        dp_size = self._ledger.generation.dp_size
        if wanted.step is not self._ledger.outgrown or wanted.dp_size != dp_size:
            return []
        effects = self._ledger.replan(wanted.step.number, plan, wanted.entries)
        self._note_plan(self._ledger.steps[wanted.step.number])
        return effects

    def _answered(self, wanted: PlanWanted | ReplanWanted) -> None:
        assert wanted is self._asked
        self._asked = None

    def _note_plan(self, step: OpenStep, *passed_over: int) -> None:
        """A step's plan is a fact; passed_over: tickets that it has left in the buffer."""
        tickets = step.tickets()
        self._note(Planned(step.number, step.digest, step.planned_at, tickets, passed_over))
