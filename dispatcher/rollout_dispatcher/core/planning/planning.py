"""Steps come into being: which plan is asked of the planner, and what becomes of its answer.

    nothing asked --wanted, and the trigger says go--> a plan of the next step --planned--+
    ^      |                                                                              |
    |      +------------a step is unplanned----------> a plan of that step ---replanned---+
    +-------------------------------------------------------------------------------------+

A step is *unplanned* while it has no plan for as many DP ranks as there are, or has lost samples.
Invariants: one plan is asked for at a time; an unplanned step comes before the next one; a plan for
another number of DP ranks than there are by now is not used. When to ask is for `Timing`, what for
`Selection`; what makes capacity on the way is `Relief`, and what is made of an answer `Booking`.

How many loss tokens a sample has, as samples arrive: what steps are to be like.

A window knows it worse, as the longest samples are held back in it. Counted are those that no plan
has passed over yet, once each; older steps count less and less.

Between the core and the planner: entries to columns, and a plan to what metrics want of it.

What to plan: the window that the next step may choose from, and what may not be in it.

Relief: what makes capacity, and lets in who was held back for want of it.

Samples leave the buffer in steps, or are dropped; payloads of groups that lack members go to the
journal, if there is one, and come back for their step; and if nothing else can go on, the youngest
beginning of a group is given up.

A plan is used: its samples leave the buffer, and a step is open. Or an open step has a new plan.

Invariant: whatever becomes of the process, a step that a rank may hear of is a fact.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.entry import MEMORY_CAP, Entry
from rollout_dispatcher.core.buffer.phases import Freshness, NextStep, Phases
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import (
    Effect,
    GroupGivenUp,
    PayloadsToJournal,
    PlanWanted,
    ReplanWanted,
    StepPlanned,
)
from rollout_dispatcher.core.facts import DropReason, Note
from rollout_dispatcher.core.measuring.cost_in_use import CostInUse
from rollout_dispatcher.core.planning.timing import Timing
from rollout_dispatcher.core.planning.trigger import Go, MakeCapacity, Wait
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import OpenStep, planned
from rollout_dispatcher.core.totals import SelectionBias, Totals
from rollout_planner.cost import Quadratic
from rollout_planner.types import BoolArray, FloatArray, Plan, Window

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


def request_plan(
    entries: list[Entry],
    must_go: BoolArray,
    take: int,
    dp_size: int,
    go: Go,
    *,
    usual: UsualLoss,
    cost: Quadratic | None,
    slowness: tuple[float, ...] | None,
) -> PlanWanted:
    """Ask for a plan of `take` of these entries, or groups of them, oldest first."""
    window = _window(entries, must_go)
    window = replace(window, usual_loss_tokens=usual.with_(window))
    return PlanWanted(tuple(entries), window, take, dp_size, go.trigger, go.trial, cost, slowness)


def request_replan(
    step: OpenStep,
    dp_size: int,
    refill: list[Entry],
    *,
    cost: Quadratic | None,
    slowness: tuple[float, ...] | None,
) -> ReplanWanted:
    """Ask for another plan of exactly the samples of an open step, and those that fill it up."""
    entries = [*sorted(step.entries(), key=lambda entry: entry.ticket), *refill]
    window = _window(entries, np.ones(len(entries), np.bool_))
    return ReplanWanted(step, tuple(entries), window, dp_size, tuple(refill), cost, slowness)


def _window(entries: list[Entry], must_go: BoolArray) -> Window:
    count = len(entries)
    return Window(
        tokens=np.fromiter((e.sample.tokens for e in entries), np.int64, count),
        skips=np.fromiter((e.skips for e in entries), np.int64, count),
        group=np.fromiter((e.group for e in entries), np.int64, count),
        must_go=must_go,
        loss_tokens=np.fromiter((e.sample.loss_tokens for e in entries), np.int64, count),
    )


def report_plan(
    step: int,
    plan: Plan,
    wanted: PlanWanted,
    chosen: list[Entry],
    *,
    version: int | None,
    now: float,
) -> StepPlanned:
    """What a plan did to its samples.

    chosen: in the order of `plan.chosen`. version: the policy version that the step trains with.
    """
    at = plan.chosen
    return StepPlanned(
        step=step,
        plan=plan,
        trigger=wanted.trigger,
        waits=now - np.fromiter((entry.arrived for entry in chosen), np.float64, len(chosen)),
        skips=wanted.window.skips[at],
        staleness=() if version is None else tuple(_staleness(chosen, version)),
        tokens=wanted.window.tokens[at],
        nbytes=sum([entry.sample.payload.nbytes for entry in chosen]),
        entries=chosen,
    )


def _staleness(entries: list[Entry], version: int) -> Iterator[int]:
    """0 too for what newer weights wrote than DP rank 0 has reported: a sum that falls is none."""
    known = (entry.version for entry in entries)
    return (max(0, version - written) for written in known if written is not None)


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


#: Capacity that was made shows after this share of `max_wait`: before, no more is made.
RELIEF_SHOWS_AFTER = 1 / 8


class Relief:
    """Makes capacity."""

    def __init__(
        self,
        config: DispatchConfig,
        buffer: SampleBuffer,
        admission: Admission,
        dropping: Dropping,
        selection: Selection,
    ) -> None:
        self._durable, self._max_wait = config.durable, config.trigger.max_wait
        self._buffer, self._held = buffer, admission.held
        self._admission, self._capacity = admission, admission.capacity
        self._dropping, self._selection = dropping, selection
        self._departures = (0, 0)

    def configure(self, config: DispatchConfig) -> None:
        """From now on wait so long; who was held back may come in."""
        self._max_wait = config.trigger.max_wait
        self.look_again()

    # -- who was held back --------------------------------------------------------------------

    def look_again(self) -> None:
        """Who was held back may come in now, though nobody has left the buffer or the line."""
        self._departures = (-1, -1)

    @property
    def is_due(self) -> bool:
        """Whether something has left the buffer since, or the line: who was held may come in."""
        return self._departures != (self._buffer.departures, self._held.changes)

    def let_in(self, now: float) -> list[Effect]:
        """Let in who was held back; what that makes leave lets others in, the next time."""
        self._departures = (self._buffer.departures, self._held.changes)
        return self._admission.retry(now)

    # -- what goes ------------------------------------------------------------------------------

    def help(self, now: float) -> list[Effect]:
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

    def drop_unwanted(self) -> int:
        """Drop what the next step may not have; returns how many samples that were."""
        return sum(self._dropping.ready(*unwanted) for unwanted in self._selection.unwanted())

    def give_up_youngest(self, now: float) -> list[Effect]:
        """Beginnings of groups fill a hard cap: the youngest is given up, and its producers told.

        There is one with samples, or nobody would be held back.
        """
        cap = self._capacity.pressed
        # What a journal can take then shows after a while, but not after all of the wait again.
        self._capacity.last_moved = now - self._max_wait * (1 - RELIEF_SHOWS_AFTER)
        in_stores = self._capacity.at_stores_cap
        youngest = self._buffer.groups.youngest(in_stores=in_stores)
        given_up = len(youngest.entries)
        remedy = "--referenced-bytes" if in_stores else "--buffer-bytes or use a journal"
        why = f"there was no room for all open groups; raise {remedy}"
        self._dropping.give_up(youngest, why, DropReason.NO_ROOM)
        self.look_again()
        assert cap is not None
        return [GroupGivenUp(youngest.group_id, given_up, cap)]


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
