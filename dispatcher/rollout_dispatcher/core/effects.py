"""Effects: what the core asks the shell to do, and what it reports for metrics and the log.

Each call on `DispatcherCore` returns a `Decision`: the effects of one event, in the order in which
the shell has to perform them, and the facts that they rest on. Each effect is for one receiver: a
producer (`WelcomeProducer`, `PushAnswered`, `PushBlocked`, `ResendRequested`), all producers
(`SchemaDecided`, `PolicyReported`), producers of dropped samples (`SamplesDropped`), the planner
(`PlanRequested`, `ReplanRequested`), the journal (`PayloadsToJournal`), workers that open payload
stores (`FreeRequested`, `SweepRequested`), DP ranks (`WelcomeRank` to `FailRanks`). The others are
reports. Invariant: a fact is in one decision, the first one after it was appended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import CostFitted, DropReason, Fact, SpeedsMeasured
from rollout_dispatcher.core.measuring.speeds import lower_median, pace
from rollout_dispatcher.core.measuring.times import Split
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import BufferFull, DispatcherError
from rollout_dispatcher.sample import Outcome, Schema
from rollout_planner.cost import Quadratic
from rollout_planner.types import (
    FloatArray,
    IntArray,
    Plan,
    Sync,
    Window,
    straggler_excess,
    straggler_waits,
)


class Effect:
    """One thing that the shell has to do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WelcomeProducer(Effect):
    """Answer a producer's hello. credits: pushes that it may have unanswered."""

    producer: str
    credits: int


@dataclass(frozen=True, slots=True)
class AcceptedUnknown(Effect):
    """For the log: a sample that was acknowledged to a producer is not in the journal.

    accepted: its sequence number. newest: the last one in the journal, -1 for none.
    """

    producer: str
    accepted: int
    newest: int


@dataclass(frozen=True, slots=True)
class PushAnswered(Effect):
    """Answer a push. errors: message of each refused sample, by index; reasons: its code.

    oldest: the oldest policy version among its samples, None if none has one.
    """

    producer: str
    first_seq: int
    outcomes: tuple[Outcome, ...]
    errors: dict[int, str] = field(default_factory=dict)
    oldest: int | None = None
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushBlocked(Effect):
    """A push is blocked at a cap; `PushAnswered` follows."""

    producer: str
    first_seq: int
    full: BufferFull


@dataclass(frozen=True, slots=True)
class ResendRequested(Effect):
    """Ask a producer to resend a blocked push whose payload was discarded for want of memory."""

    producer: str
    first_seq: int


@dataclass(frozen=True, slots=True)
class SamplesAccepted(Effect):
    """For the record: samples were accepted together, with consecutive tickets."""

    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class SamplesDropped(Effect):
    """Report dropped samples to their producers, as far as these are connected."""

    dropped: Mapping[DropReason, Sequence[Entry]]


@dataclass(frozen=True, slots=True)
class PolicyReported(Effect):
    """Report the trainer's new policy version to all producers."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class PayloadsToJournal(Effect):
    """Call `DispatcherCore.payloads_durable` with these entries once all earlier facts are
    durable.
    """

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class FreeRequested(Effect):
    """Ask a worker to delete objects of a store; it answers `Freed` with this number."""

    worker: str
    number: int
    store: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepRequested(Effect):
    """Ask a worker for the objects of an incarnation; it answers `Swept` with this number."""

    worker: str
    number: int
    store: str
    prefix: str


@dataclass(frozen=True, slots=True)
class GroupEvicted(Effect):
    """For the log: an open group of `num_samples` samples was evicted at a cap."""

    group_id: str
    num_samples: int
    cap: BufferFull


@dataclass(frozen=True, slots=True)
class IdsRepeated(Effect):
    """For the log: a producer pushed ids again that were accepted before, `in_a_row` so far.

    sample_id: the latest of them. conflicts: it is the producer's first one with other content.
    """

    producer: str
    sample_id: str
    in_a_row: int
    conflicts: bool


@dataclass(frozen=True, slots=True)
class SchemaDecided(Effect):
    """Send the run's schema to all producers. set_by: who decided on it, for people."""

    schema: Schema
    set_by: str


@dataclass(frozen=True, slots=True)
class PlanRequested(Effect):
    """Run the planner on `window` for `take` samples, and call `DispatcherCore.planned`.

    entries: the samples of the window's columns, in the same order. trial: the plan is used only if
    its straggler excess is within the target. cost: of samples; None: as configured. slowness: of
    the ranks; None: they are equally fast.
    """

    entries: tuple[Entry, ...]
    window: Window
    take: int
    dp_size: int
    trigger: Trigger
    trial: bool
    cost: Quadratic | None = None
    slowness: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReplanRequested(Effect):
    """Run the planner on all of `window` for `dp_size` ranks, then call `DispatcherCore.replanned`.

    step: an open step without a plan for so many. entries: its samples and then `refill`, buffered
    samples that replace lost ones; each oldest first. cost, slowness: as in `PlanRequested`.
    """

    step: OpenStep
    entries: tuple[Entry, ...]
    window: Window
    dp_size: int
    refill: tuple[Entry, ...] = ()
    cost: Quadratic | None = None
    slowness: tuple[float, ...] | None = None

    @property
    def take(self) -> int:
        """Number of samples to plan: all."""
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class WelcomeRank(Effect):
    """Answer a DP rank's hello; its connection is the rank's from now on.

    committed: the last step that this rank has applied, -1 for none.
    """

    client_id: str
    dp_rank: int
    run_id: str
    generation: int
    committed: int


@dataclass(frozen=True, slots=True)
class RefuseRank(Effect):
    """End the connection of a DP rank whose hello has failed its generation."""

    client_id: str
    error: DispatcherError


@dataclass(frozen=True, slots=True)
class Deliver(Effect):
    """Send a step's header to a DP rank, then its micro-batches from `first_micro_batch` on.

    A later attempt at the step voids this one.
    """

    dp_rank: int
    step: int
    first_micro_batch: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Release(Effect):
    """Send these DP ranks the permission to train this step."""

    dp_ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class WithdrawStep(Effect):
    """Withdraw a step that these DP ranks may hold."""

    dp_ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class LimitSteps(Effect):
    """Limit these DP ranks to steps up to `last`; None: no limit any more."""

    dp_ranks: tuple[int, ...]
    last: int | None


@dataclass(frozen=True, slots=True)
class SamplesUnresolved(Effect):
    """For the log: samples that a DP rank cannot get were dropped, groups whole.

    first: id of the oldest. why: the error of their payload store, or of the journal.
    """

    dp_rank: int
    step: int
    samples: int
    first: str
    why: str
    reason: DropReason = DropReason.UNRESOLVED


@dataclass(frozen=True, slots=True)
class EndRanks(Effect):
    """Send these DP ranks the end of the stream."""

    dp_ranks: tuple[int, ...]
    reason: EndReason


@dataclass(frozen=True, slots=True)
class EndProducers(Effect):
    """End every producer's connection with this error."""

    error: DispatcherError


@dataclass(frozen=True, slots=True)
class FailRanks(Effect):
    """End these connections of DP ranks, by client id, with this error."""

    client_ids: tuple[str, ...]
    error: DispatcherError


@dataclass(frozen=True, slots=True, eq=False)
class StepPlanned(Effect):
    """For metrics and the record; columns, and the entries, are in the order of `plan.chosen`.

    waits: float64[n], seconds each sample was buffered; skips: int64[n], dispatches that passed it
    over; tokens: int64[n]. staleness: of the samples that have a policy version.
    """

    step: int
    plan: Plan
    trigger: Trigger
    waits: FloatArray
    skips: IntArray
    staleness: tuple[int, ...]
    tokens: IntArray
    nbytes: int
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Redelivered(Effect):
    """For metrics: a step is delivered again. reason: reconnect, new generation, rewind or loss."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepCommitted(Effect):
    """For metrics: every DP rank has applied this step. seconds: since it was planned."""

    step: int
    num_samples: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class StepMeasured(Effect):
    """For the log: times of a pass over a step, as reported by every DP rank.

    leads: whether the step is judged by this pass. estimated: float64[R, M], time of the same work
    on equally fast ranks, in any unit; None for a step that an earlier process planned.
    """

    step: int
    cost_key: str
    leads: bool
    sync: Sync
    split: Split
    estimated: FloatArray | None

    @property
    def excess(self) -> float:
        """Straggler excess of the measured compute times.

        Measured times have the fill and drain of a pipeline in them, which a plan adds.
        """
        if self.sync is Sync.STEP:  # only the sums count, which are known
            return self.imbalance
        return straggler_excess(self.split.compute, self.sync)

    @property
    def imbalance(self) -> float:
        """Max over mean of the ranks' compute times, minus one.

        Without arrays, unlike `plan.imbalance`: they are slower for a few ranks.
        """
        computed: list[float] = self.split.of_ranks[0].tolist()
        total = sum(computed)
        return max(0.0, max(computed) * len(computed) / total - 1) if total > 0 else 0.0

    @property
    def lost(self) -> float:
        """Straggler overhead: share of the ranks' time spent waiting for slower ones, 0 to 1."""
        return 1 - 1 / (1 + self.excess)

    @property
    def waits(self) -> tuple[float, float]:
        """Rank-seconds of waits: all, and those that remain on equally fast ranks.

        The latter are the estimated waits at the median rank's speed, of each rank at most what it
        has waited. A slow rank is sent less work and would wait for the others, which nobody did.
        If the estimates are not known, all remain.
        """
        computed, waited = self.split.of_ranks
        total = float(waited.sum())
        if self.estimated is None:
            return total, total
        at_median = self.estimated * lower_median(pace(computed, self.estimated))
        even = straggler_waits(at_median, self.sync)
        return total, float(np.fmin(waited, even).sum())


@dataclass(frozen=True, slots=True)
class CostChanged(Effect):
    """For the log: later plans use another cost.

    loss: share of the ranks' time that the former cost has lost, by the new one.
    """

    fitted: CostFitted
    loss: float


@dataclass(frozen=True, slots=True)
class SpeedsChanged(Effect):
    """For the log: later plans use other speeds of the DP ranks."""

    measured: SpeedsMeasured


@dataclass(frozen=True, slots=True)
class Rewound(Effect):
    """For the log: a generation resumes after the step of its checkpoint.

    steps, samples: committed before, and delivered again. missing: steps that were trained after
    the checkpoint and cannot be delivered again.
    """

    after: int
    steps: int
    samples: int
    missing: int


@dataclass(frozen=True, slots=True)
class StepsEvicted(Effect):
    """For the log: retained steps up to `through` were evicted.

    steps: evicted so far; reported each time the number doubles. limit: payload bytes of retained
    steps.
    """

    steps: int
    through: int
    limit: int


@dataclass(frozen=True, slots=True)
class Advised(Effect):
    """Advice for a client, for our log and for its own.

    producer: its name, empty over HTTP; None for the trainer (DP rank 0).
    """

    text: str
    producer: str | None = None


@dataclass(frozen=True, slots=True)
class Drained(Effect):
    """Every step is committed, or the ranks have finished: the service may stop."""

    reason: str


#: Totals of a decision without facts.
NO_TOTALS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """Make `facts` durable, with `totals`, then perform `effects` in order.

    totals: the run's counters after these facts, as JSON values; empty without facts, as in every
    decision of a core without a journal.
    """

    effects: Sequence[Effect]
    facts: Sequence[Fact]
    totals: Mapping[str, object]


#: The decision of most events.
NOTHING = Decision((), (), NO_TOTALS)
