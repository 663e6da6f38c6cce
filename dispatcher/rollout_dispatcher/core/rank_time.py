"""The ledger of time: where the DP ranks' time goes, each rank-second to exactly one cause.

It begins with the first step that a rank takes, and ends with the run. Between two events nothing
changes, so before each event the time since the last one is charged:

    a rank is                                 to
    not connected                             gone-rank
    connected, while a rank hangs             hung-rank, whatever it does itself
    in its training loop                      slow-rank and lengths while they are owed, then work
    blocked in `next()`, others are gone      gone-rank
        its step is planned                   dispatcher, or journal while that is slow
        another rank is a whole step behind   slow-rank
        a batch is ready                      dispatcher
        too few samples are ready             journal, stale or dispatcher as one of them has kept
                                              the samples from it, else no-samples

Ranks report how long they waited inside collectives once a step is over, so these seconds are
*owed* when they become known, and what ranks spend in their loops from then on pays them: a counter
never falls. Of what is owed, lengths is what the plan of these samples would have lost on ranks as
fast as it took them for; the rest is a rank that was slower.

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
    """What a second of a DP rank went to; the same words in every place."""

    WORK = "work"
    SLOW_RANK = "slow-rank"
    LENGTHS = "lengths"
    NO_SAMPLES = "no-samples"
    STALE = "stale"
    JOURNAL = "journal"
    DISPATCHER = "dispatcher"
    HUNG_RANK = "hung-rank"
    GONE_RANK = "gone-rank"


#: What each is, for people.
MEANS: Final = {
    TimeCause.WORK: "in the training loop: computing, transport, evaluation, checkpoints",
    TimeCause.SLOW_RANK: "waiting for a rank that takes longer than its work should",
    TimeCause.LENGTHS: "waiting for a rank that was given more work, as samples differ in length",
    TimeCause.NO_SAMPLES: "waiting for rollout: too few samples are ready",
    TimeCause.STALE: "waiting for samples, as those that came were dropped as stale",
    TimeCause.JOURNAL: "waiting for the journal's disk",
    TimeCause.DISPATCHER: "waiting for the dispatcher: --max-wait, planning, delivery, caps",
    TimeCause.HUNG_RANK: "waiting for a rank that hangs, its heartbeats going on",
    TimeCause.GONE_RANK: "waiting for a rank that is not connected",
}
#: All but work.
LOST: Final = tuple(cause for cause in TimeCause if cause is not TimeCause.WORK)
#: Ranks report what they waited for others inside collectives, for one of these two reasons.
_OF_STRAGGLERS = (TimeCause.SLOW_RANK, TimeCause.LENGTHS)


class RankTime:
    """Charges time to causes. seconds: of DP ranks, by cause, since the first step."""

    def __init__(self, parts: "Parts") -> None:
        self._ledger, self._phases, self._capacity = parts.ledger, parts.phases, parts.capacity
        self._lifecycle, self._stalls = parts.lifecycle, parts.stall_detector
        self._dropped = parts.totals.dropped
        generation = parts.ledger.generation
        self._connected = generation.filtered(lambda rank: rank.connected)
        self._waiting = generation.filtered(lambda rank: rank.connected and rank.hungry)
        #: Whether the journal keeps who waits for it waiting for long, as the shell sees it.
        self.journal_is_slow: Callable[[], bool] = lambda: False
        self.seconds = dict.fromkeys(TimeCause, 0.0)
        #: Time in which a cap held producers back, since the beginning.
        self.blocked = 0.0
        self._began = False
        self._charged_to: float | None = None
        #: Rank-seconds that ranks have waited for each other and that no loop has paid yet.
        self._owed = dict.fromkeys(_OF_STRAGGLERS, 0.0)
        #: Rank-seconds of waiting for a hung rank that the next report of waits has in it too.
        self._hung = 0.0
        #: Stale samples dropped by the time that the last step was planned.
        self._stale_before = 0

    def charge(self, now: float) -> None:
        """Charge the time until now to what ranks have done since the last call: before an event
        changes that.
        """
        since, self._charged_to = self._charged_to, now
        if since is None or now <= since or self._lifecycle.drained:
            return
        passed = now - since
        if self._capacity.blocking_cap is not None:
            self.blocked += passed
        if not self._began:
            return
        generation, seconds = self._ledger.generation, self.seconds
        there = len(self._connected.find())
        away = generation.dp_size - there
        if away:
            seconds[TimeCause.GONE_RANK] += passed * away
        if (stall := self._stalls.stall(now)) is not None and stall.hung:
            seconds[TimeCause.HUNG_RANK] += passed * there
            self._hung += passed * (there - len(stall.hung))
            return
        waiting = len(self._waiting.find())
        if waiting:
            seconds[self._waits_for(away)] += passed * waiting
        self._pay(passed * (there - waiting))

    def step_taken(self) -> None:
        """A rank has begun a step: from the first one on time is accounted for."""
        if not self._began:
            self._began = True
            self.step_planned()

    def step_planned(self) -> None:
        """A step was planned: what is dropped from now on is missing in the next one."""
        self._stale_before = self._dropped[DropReason.STALE]

    def measured(self, found: StepMeasured) -> None:
        """Every rank has reported a pass over a step."""
        waited = max(0.0, float(found.split.of_ranks[1].sum()) - self._hung)
        self._hung = 0.0
        lengths = waited * (min(1.0, found.lost_by_plan / found.lost) if found.lost > 0 else 1.0)
        self._owed[TimeCause.LENGTHS] += lengths
        self._owed[TimeCause.SLOW_RANK] += waited - lengths

    def _pay(self, spent: float) -> None:
        """Ranks spent so many rank-seconds in their loops."""
        owed = sum(self._owed.values())
        if owed > 0:
            share = min(1.0, spent / owed)
            for cause, seconds in self._owed.items():
                self.seconds[cause] += share * seconds
                self._owed[cause] = (1.0 - share) * seconds
            spent = max(0.0, spent - owed)
        self.seconds[TimeCause.WORK] += spent

    def _waits_for(self, away: int) -> TimeCause:
        """Why ranks that wait for a step have none."""
        ledger, capacity = self._ledger, self._capacity
        if away:
            return TimeCause.GONE_RANK
        if not ledger.hungry:  # their step is on its way
            return TimeCause.JOURNAL if self.journal_is_slow() else TimeCause.DISPATCHER
        if not ledger.has_room:
            return TimeCause.SLOW_RANK
        missing = self._phases.units_short()
        if missing <= 0:
            return TimeCause.DISPATCHER
        full = capacity.blocking_cap
        if self.journal_is_slow() or (full is not None and full.cap == JOURNAL_CAP):
            return TimeCause.JOURNAL
        if self._dropped[DropReason.STALE] - self._stale_before >= missing:
            return TimeCause.STALE
        return TimeCause.DISPATCHER if capacity.at_hard_cap else TimeCause.NO_SAMPLES
