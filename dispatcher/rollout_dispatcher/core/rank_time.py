"""Charges the DP ranks' time, each rank-second to exactly one cause.

Counting begins with the first step that a rank takes, and ends with the run. No state changes
between two events, so before each event the time since the last one is charged:

    state of a rank                           cause
    not connected                             gone-rank
    connected, while a rank hangs             hung-rank
    in its training loop                      slow-rank and lengths while they are owed, then work
    blocked in `next()`, others are gone      gone-rank
        its step is planned                   dispatcher, or journal while that is slow
        another rank is a whole step behind   slow-rank
        a batch is ready                      dispatcher if it plans, or a cap blocks the pushes of
                                              a fuller window, else no-samples
        too few samples are ready             journal, stale or dispatcher if one of them withholds
                                              samples, else no-samples

Ranks report waits inside collectives after the step. Counters never fall, so these seconds are
*owed* from then on, and later seconds in training loops are charged to them first. Of what is owed,
`lengths` would remain if all ranks were as fast as the median one; the rest is `slow-rank`, also
where plans already know of the slow rank.

Invariant: over any time, the causes add up to it times the DP ranks of the process group.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from rollout_dispatcher.core.admission.eligibility import JOURNAL_CAP
from rollout_dispatcher.core.effects import StepMeasured
from rollout_dispatcher.core.facts import DropReason

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts


class TimeCause(StrEnum):
    """Cause of a DP rank's second; the same words in metrics, logs and records."""

    WORK = "work"
    SLOW_RANK = "slow-rank"
    LENGTHS = "lengths"
    NO_SAMPLES = "no-samples"
    STALE = "stale"
    JOURNAL = "journal"
    DISPATCHER = "dispatcher"
    HUNG_RANK = "hung-rank"
    GONE_RANK = "gone-rank"


#: Meaning of each cause, for people.
MEANS: Final = {
    TimeCause.WORK: "in the training loop: computing, transport, evaluation, checkpoints",
    TimeCause.SLOW_RANK: "waiting for a rank that is slower than the others at the same work",
    TimeCause.LENGTHS: "waiting for a rank that was given more work, as samples differ in length",
    TimeCause.NO_SAMPLES: "waiting for rollout: for a batch, or up to --max-wait for a window",
    TimeCause.STALE: "waiting for samples, as those that came were dropped as stale",
    TimeCause.JOURNAL: "waiting for the journal's disk",
    TimeCause.DISPATCHER: "waiting for the dispatcher: planning, delivery, caps",
    TimeCause.HUNG_RANK: "waiting for a rank that hangs, its heartbeats going on",
    TimeCause.GONE_RANK: "waiting for a rank that is not connected",
}
#: Every cause but work.
LOST: Final = tuple(cause for cause in TimeCause if cause is not TimeCause.WORK)
#: Causes of waits inside collectives, which ranks report after the step.
_OF_STRAGGLERS = (TimeCause.SLOW_RANK, TimeCause.LENGTHS)


class RankTime:
    """Charges time to causes. seconds: of DP ranks, by cause, since the first step."""

    def __init__(self, parts: "Parts") -> None:
        self._ledger, self._phases, self._capacity = parts.ledger, parts.phases, parts.capacity
        self._parts = parts
        self._lifecycle, self._stalls = parts.lifecycle, parts.stall_detector
        self._dropped = parts.totals.dropped
        generation = parts.ledger.generation
        self._connected = generation.filtered(lambda rank: rank.connected)
        self._waiting = generation.filtered(lambda rank: rank.connected and rank.hungry)
        #: Whether the journal is slow; set by the shell.
        self.journal_is_slow: Callable[[], bool] = lambda: False
        self.seconds = dict.fromkeys(TimeCause, 0.0)
        #: Seconds in which a cap blocked producers.
        self.blocked = 0.0
        self._began = False
        self._charged_to: float | None = None
        #: Reported rank-seconds of waits inside collectives that are not charged yet.
        self._owed = dict.fromkeys(_OF_STRAGGLERS, 0.0)
        #: Rank-seconds charged to a hung rank; the next report of waits contains them too.
        self._hung = 0.0
        #: Stale samples dropped before the last step was planned.
        self._stale_before = 0

    def charge(self, now: float) -> None:
        """Charge the time since the last call; to be called before an event changes any state."""
        since, self._charged_to = self._charged_to, now
        if since is None or now <= since or self._lifecycle.drained:
            return
        passed = now - since
        if self._capacity.blocking_cap is not None:
            self.blocked += passed
        if not self._began:
            return
        generation, seconds = self._ledger.generation, self.seconds
        connected = len(self._connected.find())
        absent = generation.dp_size - connected
        if absent:
            seconds[TimeCause.GONE_RANK] += passed * absent
        if (stall := self._stalls.stall(now)) is not None and stall.hung:
            seconds[TimeCause.HUNG_RANK] += passed * connected
            self._hung += passed * (connected - len(stall.hung))
            return
        waiting = len(self._waiting.find())
        if waiting:
            seconds[self._waits_for(absent)] += passed * waiting
        self._charge_loops(passed * (connected - waiting))

    def step_taken(self) -> None:
        """A rank has begun a step: charging starts with the first one."""
        if not self._began:
            self._began = True
            self.step_planned()

    def step_planned(self) -> None:
        """A step was planned: samples dropped from now on are missing in the next one."""
        self._stale_before = self._dropped[DropReason.STALE]

    @property
    def stale_dropped(self) -> int:
        """Stale samples dropped since the last step was planned; 0 before a rank takes one."""
        return self._dropped[DropReason.STALE] - self._stale_before if self._began else 0

    def measured(self, found: StepMeasured) -> None:
        """Every rank has reported a pass over a step: its waits are owed."""
        waited, lengths = found.waits
        waited = max(0.0, waited - self._hung)
        self._hung = 0.0
        lengths = min(waited, lengths)
        self._owed[TimeCause.LENGTHS] += lengths
        self._owed[TimeCause.SLOW_RANK] += waited - lengths

    def _charge_loops(self, spent: float) -> None:
        """Charge rank-seconds in training loops, first to what is owed."""
        owed = sum(self._owed.values())
        if owed > 0:
            share = min(1.0, spent / owed)
            for cause, seconds in self._owed.items():
                self.seconds[cause] += share * seconds
                self._owed[cause] = (1.0 - share) * seconds
            spent = max(0.0, spent - owed)
        self.seconds[TimeCause.WORK] += spent

    def _waits_for(self, absent: int) -> TimeCause:
        """Cause of the time of ranks that wait for a step."""
        ledger, capacity = self._ledger, self._capacity
        if absent:
            return TimeCause.GONE_RANK
        if not ledger.hungry:  # their step is on its way
            return TimeCause.JOURNAL if self.journal_is_slow() else TimeCause.DISPATCHER
        if not ledger.has_room:
            return TimeCause.SLOW_RANK
        missing = self._phases.units_short()
        if missing <= 0:
            busy = self._parts.planning.busy or capacity.at_hard_cap
            return TimeCause.DISPATCHER if busy else TimeCause.NO_SAMPLES
        full = capacity.blocking_cap
        if self.journal_is_slow() or (full is not None and full.cap == JOURNAL_CAP):
            return TimeCause.JOURNAL
        if self.stale_dropped >= missing:
            return TimeCause.STALE
        return TimeCause.DISPATCHER if capacity.at_hard_cap else TimeCause.NO_SAMPLES
