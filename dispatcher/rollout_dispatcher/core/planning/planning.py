"""Steps come into being: which plan is asked of the planner, and what becomes of its answer.

    nothing asked --wanted, and the trigger says go--> a plan of the next step --planned--+
    ^      |                                                                              |
    |      +------------a step is unplanned----------> a plan of that step ---replanned---+
    +-------------------------------------------------------------------------------------+

A step is *unplanned* while it has no plan for as many DP ranks as there are, or has lost samples.
Invariants: one plan is asked for at a time; an unplanned step comes before the next one; a plan for
another number of DP ranks than there are by now is not used; whatever becomes of the process, a
step that a rank may hear of is a fact. When to ask is the trigger's affair, which is told what it
has to know of the run.

Capacity is made on the way: samples leave the buffer in steps, or are dropped; payloads of groups
that lack members go to the journal, if there is one, and come back for their step; and if nothing
else can go on, the youngest beginning of a group is given up.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from rollout_dispatcher.core.buffer.entry import MEMORY_CAP, STORES_CAP, Entry
from rollout_dispatcher.core.buffer.phases import NextStep
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import (
    Effect,
    GroupGivenUp,
    PayloadsToJournal,
    PlanWanted,
    ReplanWanted,
    StepPlanned,
)
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import MakeCapacity, Situation, Wait, decide
from rollout_dispatcher.core.steps.step import OpenStep, planned
from rollout_planner.types import BoolArray, FloatArray, Plan, Window

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: Capacity that was made shows after this share of `max_wait`: before, no more is made.
RELIEF_SHOWS_AFTER = 1 / 8
#: What a step's arrivals count for a step later: half after 34.
KEPT = 0.98


class UsualLoss:
    """Follows plans."""

    def __init__(self) -> None:
        self._sums = np.zeros(3)

    def planned(self, window: Window) -> None:
        """A step was planned from this window."""
        self._sums = KEPT * (self._sums + _sums(window))

    def with_(self, window: Window) -> tuple[float, float]:
        """Mean and standard deviation, of this window's arrivals too.

        Of all that the window has where no arrival is known, as after a restart.
        """
        sums = self._sums + _sums(window)
        if not sums[0]:
            sums = _sums(replace(window, skips=np.zeros_like(window.skips)))
        count, total, squares = sums.tolist()
        mean = total / count
        return mean, max(squares / count - mean * mean, 0.0) ** 0.5


def _sums(window: Window) -> FloatArray:
    """Count, sum and sum of squares of arrivals."""
    tokens = window.loss_tokens
    assert tokens is not None
    new = tokens[window.skips == 0].astype(np.float64)
    return np.array([len(new), new.sum(), new @ new])


def window_of(entries: list[Entry], must_go: BoolArray) -> Window:
    """The columns of these samples, oldest first, of which some have to go."""
    count = len(entries)
    return Window(
        tokens=np.fromiter((e.sample.tokens for e in entries), np.int64, count),
        skips=np.fromiter((e.skips for e in entries), np.int64, count),
        group=np.fromiter((e.group for e in entries), np.int64, count),
        must_go=must_go,
        loss_tokens=np.fromiter((e.sample.loss_tokens for e in entries), np.int64, count),
    )


def _staleness(entries: list[Entry], version: int) -> Iterator[int]:
    """0 too for what newer weights wrote than DP rank 0 has reported: a sum that falls is none."""
    known = (entry.version for entry in entries)
    return (max(0, version - written) for written in known if written is not None)


class Planning:
    """Turns buffered samples into steps, when ranks want them."""

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self._buffer, self._phases, self._freshness = parts.buffer, parts.phases, parts.freshness
        self._admission, self._capacity = parts.admission, parts.capacity
        self._dropping, self._ledger, self._lifecycle = (
            parts.dropping, parts.ledger, parts.lifecycle,
        )  # fmt: skip
        self._totals, self._bias, self._cost = parts.totals, parts.selection_bias, parts.cost
        self._usual, self._note = UsualLoss(), parts.note
        self._durable = config.durable
        # Whether these settings ever have samples dropped.
        self._drops = config.drop_above is not None or self._freshness.drops
        if self._freshness.drops:
            self._buffer.watch_versions()
        #: Since when a rank waits for the next step.
        self.hungry_since: float | None = None
        #: When to decide next, though nothing else happens.
        self.wake_at: float | None = None
        self._asked: PlanWanted | ReplanWanted | None = None
        self.configure(config)
        self._departures = (0, 0)

    def configure(self, config: DispatchConfig) -> None:
        """The next plan is asked for, and judged, so; one that is asked for goes on."""
        self.trigger, self._target = config.trigger, config.target_excess
        #: Units that were ready at the last trial that missed its target, which may be another now.
        self._tried: int | None = None
        self.mark_dirty()

    @property
    def busy(self) -> bool:
        """Whether the planner's answer is awaited."""
        return self._asked is not None

    # -- asking -----------------------------------------------------------------------------

    def consider(self, now: float) -> list[Effect]:
        """Open the steps that wait, then ask for a plan if a step is wanted and none is asked."""
        ledger, self.wake_at = self._ledger, None
        if not ledger.hungry:
            self.hungry_since = None
        elif self.hungry_since is None:
            self.hungry_since = now
        if ledger.over:
            return []
        effects: list[Effect] = []
        while ledger.steps.waiting and ledger.wanted:
            effects += ledger.open_waiting()
        if self._asked is not None:
            return effects
        if (unplanned := ledger.unplanned) is not None:
            refill, generation = self._refill(unplanned), ledger.generation
            entries = [*sorted(unplanned.entries(), key=lambda entry: entry.ticket), *refill]
            self._asked = ReplanWanted(
                unplanned, tuple(entries), window_of(entries, np.ones(len(entries), np.bool_)),
                generation.dp_size, tuple(refill), self._cost.fitted_cost,
                self._cost.slowness(generation.number),
            )  # fmt: skip
            return [*effects, self._asked]
        return effects + self._ask(now) if ledger.wanted else effects

    def _ask(self, now: float) -> list[Effect]:
        """A step is wanted: ask the trigger, once nothing is ready that the step may not have.

        Where something has left, others may come in before anything else is decided.
        """
        if self._drops and self._drop_unwanted():
            return []
        decided = decide(
            self.trigger, self._situation(self._phases.count(self.trigger.window), now)
        )
        if isinstance(decided, MakeCapacity):
            return self._give_up_youngest(now)
        if isinstance(decided, Wait):
            self.wake_at = None if decided.seconds is None else now + decided.seconds
            return []
        entries = self._phases.window(self.trigger.window)
        batch, generation = self.trigger.batch, self._ledger.generation
        window = window_of(
            entries, self._freshness.must_go(entries, self._ledger.steps.next, batch)
        )
        self._asked = PlanWanted(
            tuple(entries), replace(window, usual_loss_tokens=self._usual.with_(window)),
            min(batch, self._buffer.units_of(entries)), generation.dp_size, decided.trigger,
            decided.trial, self._cost.fitted_cost, self._cost.slowness(generation.number),
        )  # fmt: skip
        return [self._asked]

    def _situation(self, ready: int, now: float) -> Situation:
        capacity, hungry, helped = self._capacity, self.hungry_since, self._capacity.helped_since
        full, waits = capacity.pressed is not None, len(self._admission.held) > 0
        # Payloads leave memory for a journal that takes them.
        is_helped = (
            helped is not None
            and capacity.pressed is not None
            and (capacity.pressed.cap == MEMORY_CAP)
        )
        return Situation(
            ready=ready,
            full=full,
            growing=self._buffer.groups.samples > 0,
            flush=self._phases.flushing or self._lifecycle.flushes(ready),
            hungry_for=None if hungry is None else now - hungry,
            tried=self._tried,
            stuck=capacity.is_stuck(now, waits=waits) and (ready > 0 or not is_helped),
            quiet_for=now - capacity.last_moved,
            helped_for=math.inf if helped is None else now - helped,
        )

    def _drop_unwanted(self) -> int:
        """Drop what the next step may not have; returns how many samples that were."""
        oldest, ages = self._freshness.oldest(self._ledger.steps.next), self._buffer.ages
        dropped = self._dropping.ready(DropReason.OVERSIZE, ages.too_long())
        if oldest is not None:
            dropped += self._dropping.ready(DropReason.STALE, ages.older_than(oldest))
        return dropped

    def _refill(self, step: OpenStep) -> list[Entry]:
        """The oldest samples, groups whole, that may take the place of those that a step has lost.

        None for a step that has lost none. They do not count as chosen before others: nobody who is
        younger is passed over.
        """
        missing = self.trigger.batch - self._buffer.units_of(list(step.entries()))
        found: list[Entry] = []
        if step.digest or missing <= 0:
            return found
        eligible = filter(self._may_join(step), self._phases.window(self.trigger.window))
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

    # -- the planner's answers --------------------------------------------------------------

    def planned(self, wanted: PlanWanted, plan: Plan, now: float) -> list[Effect]:
        """The next step, unless the plan is for other ranks or was a trial that missed.

        Returns nothing then, and otherwise what follows; samples have left the buffer.
        """
        self._answered(wanted)
        if self._ledger.over or wanted.dp_size != self._ledger.generation.dp_size:
            return []
        if wanted.trial and plan.excess > self._target:
            self._tried = self._buffer.units_of(wanted.entries)
            return []
        self._tried = self.hungry_since = None
        chosen, steps = [wanted.entries[at] for at in plan.chosen.tolist()], self._ledger.steps
        version = self._freshness.training_version(steps.next)
        at, window = plan.chosen, wanted.window
        report = StepPlanned(
            step=steps.next_step,
            plan=plan,
            trigger=wanted.trigger,
            waits=now - np.fromiter((entry.arrived for entry in chosen), np.float64, len(chosen)),
            skips=window.skips[at],
            staleness=() if version is None else tuple(_staleness(chosen, version)),
            tokens=window.tokens[at],
            nbytes=sum([entry.sample.payload.nbytes for entry in chosen]),
            entries=chosen,
        )
        self._take(wanted, plan, chosen)
        assert window.usual_loss_tokens is not None, "requests say it"
        usual_loss, _ = window.usual_loss_tokens
        effects = self._ledger.open(plan, wanted.entries, now, usual_loss)
        if self._durable:  # the fact is as large as the window
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
        self._totals.small_steps += units < self.trigger.batch

    def replanned(self, wanted: ReplanWanted, plan: Plan) -> list[Effect]:
        """The unplanned step's new plan, unless it or the number of ranks has changed once more.

        It is not used either if what it was to be filled up with has left.
        """
        self._answered(wanted)
        ledger = self._ledger
        if wanted.step is not ledger.unplanned or wanted.dp_size != ledger.generation.dp_size:
            return []
        if not all(map(self._buffer.holds, wanted.refill)):
            return []
        self._totals.dispatched.add([entry.sample.tokens for entry in wanted.refill])
        self._buffer.take(wanted.refill)
        effects = ledger.replan(wanted.step.number, plan, wanted.entries)
        if self._durable:
            self._note(planned(ledger.steps[wanted.step.number]))
        return effects

    def _answered(self, wanted: PlanWanted | ReplanWanted) -> None:
        assert wanted is self._asked
        self._asked = None

    # -- capacity -----------------------------------------------------------------------------

    def mark_dirty(self) -> None:
        """Who was held back may come in now, though nobody has left the buffer or the line."""
        self._departures = (-1, -1)

    @property
    def retry_is_due(self) -> bool:
        """Whether something has left the buffer since, or the line: who was held may come in."""
        return self._departures != (self._buffer.departures, self._admission.held.changes)

    def retry(self, now: float) -> list[Effect]:
        """Let in who was held back; what that makes leave lets others in, the next time."""
        self._departures = (self._buffer.departures, self._admission.held.changes)
        return self._admission.retry(now)

    def spill_open_groups(self, now: float) -> list[Effect]:
        """Beginnings of groups fill the memory: the journal takes their payloads, if there is one.

        They come back for their step.
        """
        capacity = self._capacity
        if not self._durable or capacity.helped_since is not None or capacity.pressed is None:
            return []
        if capacity.pressed.cap != MEMORY_CAP or capacity.shortfall() <= 0:
            return []
        entries = tuple(self._buffer.groups.in_memory())
        if not entries:
            return []
        capacity.helped_since = now
        return [PayloadsToJournal(entries)]

    def _give_up_youngest(self, now: float) -> list[Effect]:
        """Beginnings of groups fill a hard cap: the youngest is given up, and its producers told.

        There is one with samples, or nobody would be held back.
        """
        cap = self._capacity.pressed
        # Freed capacity becomes visible after this; the full wait is not waited again.
        self._capacity.last_moved = now - self.trigger.max_wait * (1 - RELIEF_SHOWS_AFTER)
        assert cap is not None
        in_stores = cap.cap == STORES_CAP
        youngest = self._buffer.groups.youngest(in_stores=in_stores)
        given_up = len(youngest.entries)
        remedy = "--set referenced-bytes" if in_stores else "--buffer-bytes or use a journal"
        why = f"there was no room for all open groups; raise {remedy}"
        self._dropping.give_up(youngest, why, DropReason.NO_ROOM)
        self.mark_dirty()
        return [GroupGivenUp(youngest.group_id, given_up, cap)]


def _unit(entry: Entry) -> tuple[int, int]:
    """What goes together: members of a group, which follow each other, or one sample."""
    return entry.group, entry.ticket if entry.group < 0 else -1
