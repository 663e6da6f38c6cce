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

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import CostFitted, DropReason, Fact, SpeedsMeasured
from rollout_dispatcher.core.measuring.times import Split
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import BufferFull, DispatcherError
from rollout_dispatcher.sample import Outcome, SamplesByField, Schema
from rollout_planner.cost import Quadratic
from rollout_planner.types import (
    FloatArray,
    IntArray,
    Plan,
    Sync,
    Window,
    straggler_excess,
)


class Effect:
    """What the shell does; one class each."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WelcomeProducer(Effect):
    """A producer's hello is answered: it may have so many pushes unanswered."""

    producer: str
    credits: int


@dataclass(frozen=True, slots=True)
class AcceptedUnknown(Effect):
    """For the log: a producer was told that its sample `accepted` is in, and the journal lacks it.

    newest: the last one that the journal knows, -1 for none.
    """

    producer: str
    accepted: int
    newest: int


@dataclass(frozen=True, slots=True)
class PushAnswered(Effect):
    """Every sample of a push is decided; errors: message by index for the refused ones.

    reasons: for these in one word, that of `SampleRefused`.
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
    """A push waits for room; the answer follows when it is decided."""

    producer: str
    first_seq: int
    full: BufferFull


@dataclass(frozen=True, slots=True)
class ResendRequested(Effect):
    """A push was held without its payload, for want of memory, and can come in now: ask for it."""

    producer: str
    first_seq: int


@dataclass(frozen=True, slots=True)
class SamplesAccepted(Effect):
    """For the record: these came in together, with tickets that follow each other.

    plain: their samples field by field, where that is known anyway; they have no groups then.
    """

    entries: Sequence[Entry]
    plain: SamplesByField | None = None


@dataclass(frozen=True, slots=True)
class SamplesDropped(Effect):
    """Accepted samples will never be trained on: tell who pushed them, as far as they are there."""

    dropped: Mapping[DropReason, Sequence[Entry]]


@dataclass(frozen=True, slots=True)
class PolicyReported(Effect):
    """The trainer has another policy version than before: producers keep pace with it."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class PayloadsToJournal(Effect):
    """Call `DispatcherCore.payloads_durable` with these entries once all that was noted is
    durable.
    """

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class FreeRequested(Effect):
    """Have a worker release these objects of a store, and say `Freed` with this number."""

    worker: str
    number: int
    store: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepRequested(Effect):
    """Have a worker list what a store has of an incarnation, and say `Swept` with this number."""

    worker: str
    number: int
    store: str
    prefix: str


@dataclass(frozen=True, slots=True)
class GroupEvicted(Effect):
    """For the log: an open group was evicted at a cap. num_samples: that it had."""

    group_id: str
    num_samples: int
    cap: BufferFull


@dataclass(frozen=True, slots=True)
class IdsRepeated(Effect):
    """For the log: ids of a producer's samples were accepted before, of so many in a row.

    sample_id: the latest of them. conflicts: it is the first of this producer's with other content.
    """

    producer: str
    sample_id: str
    in_a_row: int
    conflicts: bool


@dataclass(frozen=True, slots=True)
class SchemaDecided(Effect):
    """Every sample of the run has this schema from now on: tell the producers.

    set_by: who has decided, in words.
    """

    schema: Schema
    set_by: str


@dataclass(frozen=True, slots=True)
class PlanRequested(Effect):
    """Run the planner on `window` for `take` samples and call `DispatcherCore.planned` with its
    answer.

    entries: the samples behind the window's columns, in the same order. dp_size: DP ranks.
    trial: the plan is used only if its straggler excess is within the target. cost: of samples;
    None: as configured. slowness: of the ranks; None: they are equally fast.
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

    step: open, and without a plan for so many. entries: its samples and then `refill`, which is
    still buffered and takes the place of samples that the step has lost; each oldest first. cost,
    slowness: as above.
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
        """All of them."""
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class WelcomeRank(Effect):
    """A DP rank's hello is answered: the connection that said it speaks for the rank from now on.

    committed: the last step that this rank has applied, -1 for none.
    """

    client_id: str
    dp_rank: int
    run_id: str
    generation: int
    committed: int


@dataclass(frozen=True, slots=True)
class RefuseRank(Effect):
    """A DP rank's hello has failed its generation: the connection that said it is over."""

    client_id: str
    error: DispatcherError


@dataclass(frozen=True, slots=True)
class Deliver(Effect):
    """Send a step's header to a DP rank, then its micro-batches from `first_micro_batch` on.

    attempt: void once there is another.
    """

    dp_rank: int
    step: int
    first_micro_batch: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Release(Effect):
    """Tell these DP ranks that they may train this step."""

    dp_ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class WithdrawStep(Effect):
    """Tell these DP ranks that a step that they may hold is none any more."""

    dp_ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class LimitSteps(Effect):
    """Tell these DP ranks to begin no step after `last`; None: as many as they like."""

    dp_ranks: tuple[int, ...]
    last: int | None


@dataclass(frozen=True, slots=True)
class SamplesUnresolved(Effect):
    """For the log: a DP rank cannot get samples of a step, so they are dropped, groups whole.

    why: what their payload store, or the journal, has said.
    """

    dp_rank: int
    step: int
    samples: int
    first: str
    why: str
    reason: DropReason = DropReason.UNRESOLVED


@dataclass(frozen=True, slots=True)
class EndRanks(Effect):
    """Tell these DP ranks that no further step will come."""

    dp_ranks: tuple[int, ...]
    reason: EndReason


@dataclass(frozen=True, slots=True)
class EndProducers(Effect):
    """Every producer's connection is over: tell them why."""

    error: DispatcherError


@dataclass(frozen=True, slots=True)
class FailRanks(Effect):
    """End these connections of DP ranks, by client id, with this error."""

    client_ids: tuple[str, ...]
    error: DispatcherError


@dataclass(frozen=True, slots=True, eq=False)
class StepPlanned(Effect):
    """For metrics and the record; columns, and the entries, are in the order of `plan.chosen`.

    waits: float64[n], seconds each sample was buffered; skips: int64[n], how often it was passed
    over; tokens: int64[n]. staleness: of the samples of which it is known.
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
    """For metrics: a step goes out again: a reconnect, a new generation, a rewind or a loss."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepCommitted(Effect):
    """For metrics: every DP rank has applied this step; seconds since it was planned."""

    step: int
    num_samples: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class StepMeasured(Effect):
    """For the log: what a pass over a step took, as every DP rank has reported it.

    leads: whether the pass is the one that the step is judged by. planned: float64[R, M], what the
    plan had estimated, in its own unit; None of a step that an earlier process planned. expected:
    the same by the cost that was fitted meanwhile, if any was.
    """

    step: int
    cost_key: str
    leads: bool
    sync: Sync
    split: Split
    planned: FloatArray | None
    expected: FloatArray | None = None

    @property
    def excess(self) -> float:
        """Straggler excess, of what was computed.

        A plan adds what it takes to fill and drain a pipeline; clocks have run meanwhile.
        """
        if self.sync is Sync.STEP:  # only their sums count, which are known
            return self.imbalance
        return straggler_excess(self.split.compute, self.sync)

    @property
    def imbalance(self) -> float:
        """Max over mean of the ranks' time, minus one.

        As `plan.imbalance` says; of every step, and arrays take longer for a few ranks.
        """
        computed: list[float] = self.split.of_ranks[0].tolist()
        total = sum(computed)
        return max(0.0, max(computed) * len(computed) / total - 1) if total > 0 else 0.0

    @property
    def lost(self) -> float:
        """Share of the ranks' time that was lost to waiting for slower ones, 0 to 1."""
        return 1 - 1 / (1 + self.excess)

    @property
    def lost_by_plan(self) -> float:
        """Share of it that is lost on ranks as fast as the plan took them for; all if not known."""
        expected = self.planned if self.expected is None else self.expected
        if expected is None:
            return self.lost
        return 1 - 1 / (1 + straggler_excess(expected, self.sync))


@dataclass(frozen=True, slots=True)
class CostChanged(Effect):
    """For the log: plans are made with another cost from now on.

    loss: share of the ranks' time that the one before has lost, by the new one.
    """

    fitted: CostFitted
    loss: float


@dataclass(frozen=True, slots=True)
class SpeedsChanged(Effect):
    """For the log: plans give DP ranks work in proportion to other speeds from now on."""

    measured: SpeedsMeasured


@dataclass(frozen=True, slots=True)
class Rewound(Effect):
    """For the log: a generation goes on after a checkpoint's step, and not after the last one.

    steps, samples: committed before, and given again. missing: steps trained after the checkpoint
    that cannot be delivered again.
    """

    after: int
    steps: int
    samples: int
    missing: int


@dataclass(frozen=True, slots=True)
class StepsEvicted(Effect):
    """For the log: retained steps, the last of them `through`, had to go for want of room.

    steps: that have gone so far, told as often as they double. limit: bytes of payload that there
    may be of retained steps.
    """

    steps: int
    through: int
    limit: int


@dataclass(frozen=True, slots=True)
class Advised(Effect):
    """A client should know this of itself: for the log, and for its own.

    producer: which, empty over HTTP; None for the trainer, DP rank 0.
    """

    text: str
    producer: str | None = None


@dataclass(frozen=True, slots=True)
class Drained(Effect):
    """Everything that could be committed is; the service may stop."""

    reason: str


#: What there is to keep where there are no facts.
NO_TOTALS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """Make `facts` durable, with `totals`; behind them perform `effects`, in this order.

    totals: the run's counters with these facts, as JSON can hold them; empty without facts, as in
    every decision of a core whose facts nobody keeps.
    """

    effects: Sequence[Effect]
    facts: Sequence[Fact]
    totals: Mapping[str, object]


#: Nothing follows, as most of the time.
NOTHING = Decision((), (), NO_TOTALS)
