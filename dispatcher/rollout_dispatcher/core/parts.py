"""The parts of one run, wired together: each takes from them what it asks or tells.

Read from top to bottom: what is remembered, what is buffered, who comes in, how it ends, what the
ranks hold, how steps come into being, what producers say.

`Statistics`: a frozen snapshot of the core, all of it values: what metrics, /statusz and the log
look at.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.eligibility import Capacity, Eligibility, Outcomes
from rollout_dispatcher.core.admission.ends import Ends, Presence
from rollout_dispatcher.core.admission.held_pushes import HeldPushes
from rollout_dispatcher.core.admission.producers import DuplicateMemory, Producers
from rollout_dispatcher.core.buffer.buffer import DECLARED, SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.open_groups import ClosedGroups, OpenGroups
from rollout_dispatcher.core.buffer.phases import Freshness, Phases
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.facts import DropReason, Note, Remembered
from rollout_dispatcher.core.lifecycle import Departures, Finishing, Joining, Lifecycle
from rollout_dispatcher.core.measuring.cost_in_use import CostInUse
from rollout_dispatcher.core.measuring.measuring import Measuring
from rollout_dispatcher.core.planning.planning import (
    Planning,
)
from rollout_dispatcher.core.planning.timing import Timing
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.references import References
from rollout_dispatcher.core.steps.checkpoints import Checkpoints
from rollout_dispatcher.core.steps.ledger import Attempts, StepLedger
from rollout_dispatcher.core.steps.rank_state import RankState
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.core.totals import OF_STEPS_AND_SAMPLES, LengthCounts, SelectionBias, Totals
from rollout_dispatcher.core.waiting import Lockstep, Standings, Waiting
from rollout_dispatcher.sample import Outcome


class Parts:
    """Parts that decide, by name; `Dispatch` tells each what is its."""

    def __init__(self, config: DispatchConfig, note: Note) -> None:
        batch, self.note = config.trigger.batch, note
        self.totals = Totals()
        self.producers = Producers(config.producer_timeout)
        self.memory = DuplicateMemory(config.id_horizon)
        self.references = References(config.limits.stores, self.totals, note)
        self.closed_groups = ClosedGroups(config.id_horizon, note)

        groups = OpenGroups(self.producers.__contains__, config.group_timeout, self.closed_groups)
        self.buffer = SampleBuffer(
            config.limits, groups,
            groups_matter=config.groups_matter, by_groups=config.by_groups,
            too_long=config.drop_above,
        )  # fmt: skip
        if config.schema is not None:
            self.buffer.schema, self.buffer.set_by = config.schema, DECLARED
        self.phases = Phases(self.buffer, batch)
        self.freshness = Freshness(
            config.max_staleness, config.staleness_policy, config.steps_per_version
        )
        self.dropping = Dropping(self, keep=config.keep_incomplete)

        self.capacity = Capacity(self.buffer, self.phases.shortfall)
        self.eligibility = Eligibility(self, config)
        self.outcomes = Outcomes(self, config)
        self.held = HeldPushes(config.limits.held_bytes, groups_matter=config.groups_matter)
        groups.on_change = self.closed_groups.on_change = self.held.regroup
        self.admission = Admission(self, config)

        self.ledger = StepLedger(config.dp_size, config.max_open_steps, config.check_size)
        self.attempts = Attempts(self.ledger, self.dropping, note)
        self.lockstep = Lockstep(self.ledger)
        self.cost = CostInUse(config.cost)
        self.measuring = Measuring(self.ledger, config.sync, config.max_open_steps, self.cost, note)
        self.lifecycle = Lifecycle(self, config)
        self.departures = Departures(self, config.rank_timeout)
        self.finishing = Finishing(self, keeps=config.durable)
        self.checkpoints = Checkpoints(self, retain=config.retain)
        self.joining = Joining(self)

        self.timing = Timing(config.trigger, groups, self.phases, self.admission, self.lifecycle)
        self.selection_bias = SelectionBias(self.totals)
        self.planning = Planning(self, config)

        self.presence = Presence(self)
        self.ends = Ends(self)
        self.standings = Standings(self, batch=batch)
        self.waiting = Waiting(self)

    def configure(self, config: DispatchConfig) -> None:
        """Heed what of the settings may change."""
        self.buffer.limits = config.limits
        self.planning.configure(config)

    def restore(self, memory: Remembered, now: float) -> None:
        """Go on where an earlier process stopped: all who had contributed may still come back."""
        self.totals.restore(memory.totals)
        self.references.restore(memory, now)  # before anything of it is dropped
        if memory.policy_version is not None:
            self.freshness.report(memory.policy_version, memory.policy_step or 0)
        accepted = {name for name, (floor, seqs) in memory.producers.items() if floor or seqs}
        awaited = (accepted | memory.words.keys()) - memory.left
        said = {
            name: memory.words.get(name, (0, False)) for name in memory.producers if name in awaited
        }
        self.producers.restore(said, now, contributed=accepted)
        given_ids = zip(memory.given_ids, memory.checksums, strict=True)
        self.memory.restore(memory.producers, given_ids, memory.keys)
        self.closed_groups.restore(memory.ended_groups)
        self.buffer.restore(memory.entries, memory.next_ticket, now)
        for name in memory.left:
            self.buffer.groups.producer_gone(name, left=True)
        held = LengthCounts()
        held.add([entry.sample.tokens for entry in memory.entries])
        self.selection_bias.restore(held)
        self._restore_schema(memory)
        self.cost.restore(memory.cost, memory.speeds)
        self.ends.restore(memory)
        self.checkpoints.restore(memory)
        self.departures.restore(now)
        self.finishing.restore(memory)

    def _restore_schema(self, memory: Remembered) -> None:
        """The settings come first: what was accepted with other fields gives way to them."""
        buffer = self.buffer
        if buffer.schema is None and memory.schema is not None:
            buffer.schema, buffer.set_by = memory.schema, memory.set_by
        elif buffer.schema is not None and buffer.schema != memory.schema:
            self.outcomes.fix_schema(buffer.schema, buffer.set_by)
            self.dropping.other_fields()


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
        retained, held = parts.checkpoints, parts.held
        ranks, generation = ledger.ranks, ledger.generation
        steps = tuple(map(StepStatistics.of, ledger.steps.uncommitted()))
        return cls(
            received=dict(totals.received),
            refused=dict(totals.refused),
            received_tokens=totals.arrived.tokens,
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
            dispatched_tokens=totals.dispatched.tokens,
            steps_retained=retained.num_retained,
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
            **{name: getattr(totals, name) for name in OF_STEPS_AND_SAMPLES},
        )
