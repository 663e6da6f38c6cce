"""Requests plans from the planner, and makes steps of its answers.

    no request --ranks have room, the trigger fires--> a plan of the next step --planned--+
    ^      |                                                                              |
    |      +------------a step is unplanned----------> a plan of that step ---replanned---+
    +-------------------------------------------------------------------------------------+

A step is *unplanned* while it has no plan for the present number of DP ranks, or has lost samples.
Invariants: one plan is requested at a time; an unplanned step is planned before the next one; a
plan for another than the present number of DP ranks is not used; a step is a fact before any rank
receives it. `trigger.py` decides when to request a plan.

`Planning` frees capacity too: it drops samples, spills payloads of open groups to the journal, from
which they are read back for their step, and as the last resort evicts the youngest open group.
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
    GroupEvicted,
    PayloadsToJournal,
    PlanRequested,
    ReplanRequested,
    StepPlanned,
)
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import MakeCapacity, TriggerInputs, Wait, decide
from rollout_dispatcher.core.steps.step import OpenStep, planned
from rollout_planner.types import BoolArray, FloatArray, Plan, Window

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: Share of `max_wait` between two evictions: the time in which freed capacity becomes visible.
RELIEF_SHOWS_AFTER = 1 / 8
#: Weight of a step's arrivals one step later: half after 34 steps.
KEPT = 0.98


class UsualLoss:
    """Mean and deviation of arrivals' loss tokens, over past windows."""

    def __init__(self) -> None:
        self._sums = np.zeros(3)

    def planned(self, window: Window) -> None:
        """Add the arrivals of a window from which a step was planned."""
        self._sums = KEPT * (self._sums + _sums(window))

    def with_(self, window: Window) -> tuple[float, float]:
        """Mean and standard deviation, with this window's arrivals.

        Without any arrival, as after a restart, those of all samples in the window.
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
    """The columns of these samples, oldest first. must_go: samples at their deadline."""
    count = len(entries)
    return Window(
        tokens=np.fromiter((e.sample.tokens for e in entries), np.int64, count),
        skips=np.fromiter((e.skips for e in entries), np.int64, count),
        group=np.fromiter((e.group for e in entries), np.int64, count),
        must_go=must_go,
        loss_tokens=np.fromiter((e.sample.loss_tokens for e in entries), np.int64, count),
    )


def _staleness(entries: list[Entry], version: int) -> Iterator[int]:
    """Staleness of each versioned sample; 0 if its version is newer than the reported one."""
    known = (entry.version for entry in entries)
    return (max(0, version - written) for written in known if written is not None)


class Planning:
    """Plans steps of buffered samples, while ranks have room."""

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self._buffer, self._phases, self._freshness = parts.buffer, parts.phases, parts.freshness
        self._admission, self._capacity = parts.admission, parts.capacity
        self._dropping, self._ledger, self._lifecycle = (
            parts.dropping, parts.ledger, parts.lifecycle,
        )  # fmt: skip
        self._totals, self._bias, self._cost = parts.totals, parts.selection_bias, parts.cost
        self._usual, self._append = UsualLoss(), parts.append_fact
        self._durable = config.durable
        # Whether any setting drops samples.
        self._drops = config.drop_above is not None or self._freshness.drops
        if self._freshness.drops:
            self._buffer.watch_versions()
        #: Since when a rank waits for the next step.
        self.hungry_since: float | None = None
        #: When to decide again without another event.
        self.wake_at: float | None = None
        self._requested: PlanRequested | ReplanRequested | None = None
        self.configure(config)
        self._seen_changes = (0, 0)

    def configure(self, config: DispatchConfig) -> None:
        """Use these settings from the next plan on; a requested one is not changed."""
        self.trigger, self._target = config.trigger, config.target_excess
        #: Units that were ready at the last trial that missed the target.
        self._tried: int | None = None
        self.mark_dirty()

    @property
    def busy(self) -> bool:
        """Whether a plan is requested."""
        return self._requested is not None

    # -- requests ---------------------------------------------------------------------------

    def consider(self, now: float) -> list[Effect]:
        """Open waiting steps that ranks have room for, then request a plan if they have room for
        more.
        """
        ledger, self.wake_at = self._ledger, None
        if not ledger.hungry:
            self.hungry_since = None
        elif self.hungry_since is None:
            self.hungry_since = now
        if ledger.over:
            return []
        effects: list[Effect] = []
        while ledger.steps.waiting and ledger.has_room:
            effects += ledger.open_waiting()
        if self._requested is not None:
            return effects
        if (unplanned := ledger.unplanned) is not None:
            refill, generation = self._refill(unplanned), ledger.generation
            entries = [*sorted(unplanned.entries(), key=lambda entry: entry.ticket), *refill]
            self._requested = ReplanRequested(
                unplanned, tuple(entries), window_of(entries, np.ones(len(entries), np.bool_)),
                generation.dp_size, tuple(refill), self._cost.fitted_cost,
                self._cost.slowness(generation.number),
            )  # fmt: skip
            return [*effects, self._requested]
        return effects + self._request(now) if ledger.has_room else effects

    def _request(self, now: float) -> list[Effect]:
        """Every rank has room: drop unwanted samples, or else decide by the trigger.

        After a drop, blocked pushes are retried first.
        """
        if self._drops and self._drop_unwanted():
            return []
        ready = self._phases.count(self.trigger.window)
        if not ready and self._capacity.blocking_cap is None:
            return []
        decided = decide(self.trigger, self._situation(ready, now))
        if isinstance(decided, MakeCapacity):
            return self._evict_youngest_group(now)
        if isinstance(decided, Wait):
            self.wake_at = None if decided.seconds is None else now + decided.seconds
            return []
        entries = self._phases.window(self.trigger.window)
        batch, generation = self.trigger.batch, self._ledger.generation
        window = window_of(
            entries, self._freshness.must_go(entries, self._ledger.steps.next, batch)
        )
        self._requested = PlanRequested(
            tuple(entries), replace(window, usual_loss_tokens=self._usual.with_(window)),
            min(batch, self._buffer.units_of(entries)), generation.dp_size, decided.trigger,
            decided.trial, self._cost.fitted_cost, self._cost.slowness(generation.number),
        )  # fmt: skip
        return [self._requested]

    def _situation(self, ready: int, now: float) -> TriggerInputs:
        capacity, hungry = self._capacity, self.hungry_since
        spilling, full = capacity.spilling_since, capacity.blocking_cap
        waits = len(self._admission.blocked) > 0
        spill_frees = spilling is not None and full is not None and full.cap == MEMORY_CAP
        return TriggerInputs(
            ready=ready,
            at_cap=full is not None,
            growing=self._buffer.groups.samples > 0,
            flush=self._phases.flushing or self._lifecycle.should_flush(ready),
            hungry_for=None if hungry is None else now - hungry,
            tried=self._tried,
            stuck=capacity.is_stuck(now, waits=waits) and (ready > 0 or not spill_frees),
            quiet_for=now - capacity.last_moved,
            spilling_for=math.inf if spilling is None else now - spilling,
        )

    def _drop_unwanted(self) -> int:
        """Drop samples that are too long or too stale for the next step; returns how many."""
        oldest, ages = self._freshness.oldest(self._ledger.steps.next), self._buffer.drop_index
        dropped = self._dropping.ready(DropReason.OVERSIZE, ages.too_long())
        if oldest is not None:
            dropped += self._dropping.ready(DropReason.STALE, ages.older_than(oldest))
        return dropped

    def _refill(self, step: OpenStep) -> list[Entry]:
        """The oldest samples, groups whole, that may replace a step's lost ones. Others are not
        passed over.
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
        """A filter of samples for an open step: not too stale for it, and of no later phase."""
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

    def planned(self, wanted: PlanRequested, plan: Plan, now: float) -> list[Effect]:
        """Open the next step with this plan, and remove its samples from the buffer.

        The plan is not used if it is for another number of ranks, or a trial that missed.
        """
        self._on_answer(wanted)
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
            step=steps.next_number,
            plan=plan,
            trigger=wanted.trigger,
            waits=now - np.fromiter((entry.arrived for entry in chosen), np.float64, len(chosen)),
            skips=window.skips[at],
            staleness=() if version is None else tuple(_staleness(chosen, version)),
            tokens=window.tokens[at],
            nbytes=sum([entry.sample.payload.nbytes for entry in chosen]),
            entries=chosen,
        )
        self._remove_chosen(wanted, plan, chosen)
        assert window.usual_loss_tokens is not None, "requests say it"
        usual_loss, _ = window.usual_loss_tokens
        effects = self._ledger.open(plan, wanted.entries, now, usual_loss)
        if self._durable:  # the fact is as large as the window
            gone = set(chosen)
            left = (entry.ticket for entry in wanted.entries if entry not in gone)
            self._append(planned(steps.last_planned, *left))
        return [report, *effects]

    def _remove_chosen(self, wanted: PlanRequested, plan: Plan, chosen: list[Entry]) -> None:
        """Remove the chosen samples from the buffer; count a skip for the others."""
        window = wanted.window
        assert window.loss_tokens is not None
        self._usual.planned(window)
        self._totals.dispatched.add([entry.sample.tokens for entry in chosen])
        self._bias.dispatched(
            window.tokens[plan.chosen], window.loss_tokens[plan.chosen], float(plan.cost.sum())
        )
        units = self._buffer.units_of(chosen)
        self._buffer.remove(chosen)
        for entry in wanted.entries:
            entry.skips += 1  # those of the chosen ones are not read again
        self._totals.planned[wanted.trigger] += 1
        self._totals.small_steps += units < self.trigger.batch

    def replanned(self, wanted: ReplanRequested, plan: Plan) -> list[Effect]:
        """Give the unplanned step this plan, and remove its refill from the buffer.

        The plan is not used if the step or the number of ranks has changed since, or if a sample of
        the refill has left the buffer.
        """
        self._on_answer(wanted)
        ledger = self._ledger
        if wanted.step is not ledger.unplanned or wanted.dp_size != ledger.generation.dp_size:
            return []
        if not all(map(self._buffer.holds, wanted.refill)):
            return []
        self._totals.dispatched.add([entry.sample.tokens for entry in wanted.refill])
        self._buffer.remove(wanted.refill)
        effects = ledger.replan(wanted.step.number, plan, wanted.entries)
        if self._durable:
            self._append(planned(ledger.steps[wanted.step.number]))
        return effects

    def _on_answer(self, wanted: PlanRequested | ReplanRequested) -> None:
        assert wanted is self._requested
        self._requested = None

    # -- capacity -----------------------------------------------------------------------------

    def mark_dirty(self) -> None:
        """Make the retry of blocked pushes due, although nothing has left the buffer or the
        queue.
        """
        self._seen_changes = (-1, -1)

    @property
    def retry_is_due(self) -> bool:
        """Whether something has left the buffer or the queue since the last retry."""
        return self._seen_changes != (self._buffer.removals, self._admission.blocked.changes)

    def retry(self, now: float) -> list[Effect]:
        """Retry blocked pushes."""
        self._seen_changes = (self._buffer.removals, self._admission.blocked.changes)
        return self._admission.retry(now)

    def spill_open_groups(self, now: float) -> list[Effect]:
        """Spill the payloads of open groups to the journal, if there is one, while they fill the
        memory.

        They are read back for their step.
        """
        capacity = self._capacity
        if (
            not self._durable
            or capacity.spilling_since is not None
            or capacity.blocking_cap is None
        ):
            return []
        if capacity.blocking_cap.cap != MEMORY_CAP or capacity.units_short() <= 0:
            return []
        entries = tuple(self._buffer.groups.in_memory())
        if not entries:
            return []
        capacity.spilling_since = now
        return [PayloadsToJournal(entries)]

    def _evict_youngest_group(self, now: float) -> list[Effect]:
        """Evict the youngest open group, as open groups fill a hard cap.

        There is one with samples, or no push would be blocked.
        """
        cap = self._capacity.blocking_cap
        # Freed capacity becomes visible after this; do not wait the full max_wait again.
        self._capacity.last_moved = now - self.trigger.max_wait * (1 - RELIEF_SHOWS_AFTER)
        assert cap is not None
        in_stores = cap.cap == STORES_CAP
        youngest = self._buffer.groups.youngest(in_stores=in_stores)
        evicted = len(youngest.entries)
        remedy = "--set referenced-bytes" if in_stores else "--buffer-bytes or use a journal"
        why = f"there was no room for all open groups; raise {remedy}"
        self._dropping.abandon(youngest, why, DropReason.NO_ROOM)
        self.mark_dirty()
        return [GroupEvicted(youngest.group_id, evicted, cap)]


def _unit(entry: Entry) -> tuple[int, int]:
    """Key of samples that stay together: of a group, whose members follow each other, or of one
    sample.
    """
    return entry.group, entry.ticket if entry.group < 0 else -1
