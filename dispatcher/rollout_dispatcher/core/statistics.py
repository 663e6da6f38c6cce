"""A frozen snapshot of the core, all of it values: what metrics, /statusz and the log look at."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.parts import Parts
from rollout_dispatcher.core.planning.lengths import LengthCounts
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.ranks.rank_state import RankState
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.sample import Outcome


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """What a DP rank of the current generation has said last; -1 for no step yet."""

    client_id: str
    connected: bool
    prepared: int
    taken: int
    committed: int
    handed_out: int
    collectives: int
    hungry: bool
    last_seen: float

    @classmethod
    def of(cls, rank: RankState) -> Self:
        """The state of a rank, as values."""
        return cls(
            rank.client_id, rank.connected, rank.prepared, rank.taken, rank.committed,
            rank.handed_out, rank.collectives, rank.hungry, rank.last_seen,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """A step that is planned and not committed. dp_size: DP ranks that it was planned for."""

    number: int
    state: StepState
    dp_size: int
    num_samples: int
    planned_at: float

    @classmethod
    def of(cls, step: OpenStep) -> Self:
        """The state of a step, as values."""
        return cls(step.number, step.state, step.dp_size, step.num_samples, step.planned_at)


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Accepted samples by length. octaves: pairs of (2**k, samples of fewer tokens than that)."""

    octaves: tuple[tuple[int, int], ...]
    samples: int
    tokens: int

    @classmethod
    def of(cls, counts: LengthCounts) -> Self:
        """What was counted so far."""
        return cls(tuple(counts.octaves()), counts.samples, counts.tokens)


@dataclass(frozen=True, slots=True)
class ObjectStatistics:
    """Objects of payload stores.

    needed, needed_bytes: samples in them live, or may still come in. unneeded: to be released.
    sweeps: incarnations of producers of which there may be more. workers: who can be asked.
    freed, failures: released so far, and answers that some could not be.
    """

    needed: int
    needed_bytes: int
    unneeded: int
    sweeps: int
    workers: int
    freed: int
    failures: int

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """What there is of them."""
        known, totals = parts.references, parts.totals
        return cls(
            len(known.objects), known.objects.nbytes, len(known.releases), len(known.sweeps),
            len(known.workers), totals.objects_freed, totals.releases_failed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of samples unless the name says otherwise; times are the core's clock, in seconds.

    ranks: of the current generation, by DP rank, as far as they have joined. absent_ranks: those
    that lost their connection and have not come back, without a goodbye. missing_ranks: those that
    have not joined. steps: planned and not committed, by number. open_steps: those that ranks may
    hold, at most `max_open_steps`; steps_waiting: those behind, which a rewind has brought back.
    lengths: of accepted samples. steps_unjudged: committed with --max-staleness set while DP rank 0
    had reported no policy version.
    ready_units: groups, where a dispatch batch and so the window are counted in these.
    """

    received: Mapping[Outcome, int]
    refused: Mapping[str, int]
    received_tokens: int
    received_bytes: int
    samples_referenced: int
    referenced_bytes: int
    lengths: LengthStatistics
    buffered: int
    buffered_tokens: int
    buffered_bytes: int
    buffered_referenced_bytes: int
    ready: int
    ready_units: int
    open_groups: int
    open_group_samples: int
    oldest_arrival: float | None
    pushes_held: int
    pushes_held_bytes: int
    backpressure: bool
    in_flight: int
    open_steps: int
    steps_waiting: int
    steps: tuple[StepStatistics, ...]
    steps_planned: Mapping[Trigger, int]
    small_steps: int
    dispatched_tokens: int
    steps_committed: int
    samples_committed: int
    steps_rewound: int
    samples_rewound: int
    steps_not_rewound: int
    steps_evicted: int
    steps_retained: int
    samples_retained: int
    retained_bytes: int
    dropped: Mapping[DropReason, int]
    run_id: str
    generation: int
    dp_size: int
    policy_version: int | None
    steps_unjudged: int
    producers_connected: int
    ranks_connected: int
    missing_ranks: tuple[int, ...]
    absent_ranks: tuple[int, ...]
    ranks: Mapping[int, RankStatistics]
    wanted: bool
    hungry: bool
    run_state: str
    selection_bias: float
    selection_bias_chance: float
    objects: ObjectStatistics

    @property
    def accepted(self) -> int:
        """Samples acknowledged as accepted; equals all that is held, in flight, done or dropped."""
        return self.received[Outcome.ACCEPTED]

    @property
    def balanced(self) -> bool:
        """Whether the books balance."""
        done = self.samples_committed - self.samples_rewound
        return self.accepted == (self.buffered + self.in_flight + done + sum(self.dropped.values()))

    @classmethod
    def of(cls, parts: Parts, run_id: str) -> Self:
        """What the parts of a run show at this moment."""
        buffer, totals, ledger = parts.buffer, parts.totals, parts.ledger
        retained, held = parts.checkpoints.retained, parts.held
        ranks, generation = ledger.ranks, ledger.generation
        steps = tuple(map(StepStatistics.of, ledger.steps.uncommitted()))
        return cls(
            received=dict(totals.received),
            refused=dict(totals.refused),
            received_tokens=totals.arrived.tokens,
            received_bytes=totals.received_bytes,
            samples_referenced=totals.samples_referenced,
            referenced_bytes=totals.referenced_bytes,
            lengths=LengthStatistics.of(totals.arrived),
            buffered=len(buffer),
            buffered_tokens=buffer.held_tokens,
            buffered_bytes=buffer.held_bytes,
            buffered_referenced_bytes=buffer.referenced_bytes,
            ready=buffer.num_ready,
            ready_units=buffer.ready_units,
            open_groups=len(buffer.groups),
            open_group_samples=buffer.groups.samples,
            oldest_arrival=buffer.oldest_arrival(),
            pushes_held=len(held),
            pushes_held_bytes=held.nbytes,
            backpressure=parts.capacity.pressed is not None,
            in_flight=sum(step.num_samples for step in steps),
            open_steps=len(ledger.steps),
            steps_waiting=ledger.steps.waiting,
            steps=steps,
            steps_planned=dict(totals.planned),
            small_steps=totals.small_steps,
            dispatched_tokens=totals.dispatched.tokens,
            steps_committed=totals.steps_committed,
            samples_committed=totals.samples_committed,
            steps_rewound=totals.steps_rewound,
            samples_rewound=totals.samples_rewound,
            steps_not_rewound=totals.steps_not_rewound,
            steps_evicted=totals.steps_evicted,
            steps_retained=len(retained),
            samples_retained=retained.samples,
            retained_bytes=retained.nbytes,
            dropped=dict(totals.dropped),
            run_id=run_id,
            generation=generation.number,
            dp_size=generation.dp_size,
            policy_version=parts.freshness.reported,
            steps_unjudged=parts.freshness.unjudged,
            producers_connected=parts.producers.num_there,
            ranks_connected=sum(rank.connected for rank in ranks.values()),
            missing_ranks=tuple(generation.missing),
            absent_ranks=tuple(generation.absent),
            ranks={dp_rank: RankStatistics.of(rank) for dp_rank, rank in sorted(ranks.items())},
            wanted=ledger.wanted,
            hungry=ledger.hungry,
            run_state=parts.lifecycle.state,
            selection_bias=parts.selection_bias.distance,
            selection_bias_chance=parts.selection_bias.chance,
            objects=ObjectStatistics.of(parts),
        )
