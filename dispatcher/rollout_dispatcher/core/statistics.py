"""A frozen snapshot of the core, for metrics, /statusz and the log.

Each statistic is one row: name, type, metric if it is one, and source.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Self

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.parts import Parts
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.rank_time import TimeCause
from rollout_dispatcher.core.steps.rank_state import RankState
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.core.totals import LengthCounts
from rollout_dispatcher.sample import Outcome

#: Keys of a row's metadata.
READ, METRIC = "read", "metric"
COUNTER: Final = "counter"
GAUGE: Final = "gauge"


class _Copied:
    """Copies the attributes of the same names."""

    __slots__: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, thing: RankState | OpenStep) -> Self:
        """The present values."""
        return cls(*(getattr(thing, name) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class RankStatistics(_Copied):
    """The last reports of a DP rank of the current generation; -1 for no step yet."""

    client_id: str
    connected: bool
    prepared: int
    taken: int
    committed: int
    handed_out: int
    collectives: int
    hungry: bool
    last_seen: float


@dataclass(frozen=True, slots=True)
class StepStatistics(_Copied):
    """A step that is planned and not committed. dp_size: DP ranks that it was planned for."""

    number: int
    state: StepState
    dp_size: int
    num_samples: int
    planned_at: float


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Accepted samples by length. octaves: pairs of (2**k, samples of fewer tokens than that)."""

    octaves: tuple[tuple[int, int], ...]
    samples: int
    tokens: int

    @classmethod
    def of(cls, counts: LengthCounts) -> Self:
        """The counts so far."""
        return cls(tuple(counts.octaves()), counts.samples, counts.tokens)


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """A statistic's metric. label: of a mapping's keys."""

    kind: str
    name: str
    text: str
    label: str = ""


def _value(read: Callable[[Parts], object]) -> Any:
    """A row without a metric."""
    return field(metadata={READ: read})


def _gauge(name: str, text: str, read: Callable[[Parts], object]) -> Any:
    return field(metadata={READ: read, METRIC: MetricInfo(GAUGE, name, text)})


def _counter(name: str, text: str, read: Callable[[Parts], object], label: str = "") -> Any:
    return field(metadata={READ: read, METRIC: MetricInfo(COUNTER, name, text, label)})


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows that are read together."""

    @classmethod
    def of(cls, parts: Parts, **given: object) -> Self:
        """The present values of the parts, and the `given` rows."""
        rows = {row.name: row.metadata[READ] for row in fields(cls) if row.name not in given}
        return cls(**given, **{name: read(parts) for name, read in rows.items()})


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStatistics(_Table):
    """Objects of payload stores.

    needed, needed_bytes: with samples that are live or pending. unneeded: to be deleted.
    sweeps: ended incarnations of producers that may have left objects. workers: that can delete.
    freed: deleted so far. failures: answers that some could not be.
    """

    needed: int = _gauge("objects_needed", "Objects of payload stores with live samples.",
                         lambda parts: len(parts.references.objects))
    needed_bytes: int = _gauge("objects_needed_bytes",
                               "Bytes of objects in payload stores with live samples.",
                               lambda parts: parts.references.objects.nbytes)
    unneeded: int = _gauge("objects_releasable",
                           "Objects that no sample needs and that are not released yet.",
                           lambda parts: len(parts.references.to_free))
    sweeps: int = _value(lambda parts: len(parts.references.sweeps))
    workers: int = _value(lambda parts: len(parts.references.workers))
    freed: int = _counter("objects_released", "Objects of payload stores released.",
                          lambda parts: parts.totals.objects_freed)
    failures: int = _counter("object_release_failures",
                             "Failed releases of objects, which are tried again.",
                             lambda parts: parts.totals.releases_failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics(_Table):
    """Counts of samples unless the name says otherwise; times are the core's clock, in seconds.

    ranks: of the current generation, by DP rank, as far as they have joined. absent_ranks: those
    that lost their connection and have not come back, without a goodbye. missing_ranks: those that
    have not joined. steps: planned and not committed, by number. open_steps: those that ranks may
    hold, at most `max_open_steps`; steps_waiting: those behind, which a rewind has brought back.
    last_committed: a step's number, -1 for none; steps_committed counts rewound steps again.
    lengths: of accepted samples. steps_unjudged: committed with --max-staleness set while DP rank 0
    had reported no policy version.
    ready_units: groups, where a dispatch batch and so the window are counted in these.
    """

    received: Mapping[Outcome, int] = _counter(
        "samples_received", "Samples pushed, by outcome.",
        lambda parts: dict(parts.totals.received), "outcome")
    refused: Mapping[str, int] = _counter(
        "samples_refused", "Samples refused, by reason.",
        lambda parts: dict(parts.totals.refused), "reason")
    received_tokens: int = _counter("received_tokens", "Tokens of accepted samples.",
                                    lambda parts: parts.totals.arrived.tokens)
    received_bytes: int = _counter("received_bytes",
                                   "Payload bytes that came with accepted samples.",
                                   lambda parts: parts.totals.received_bytes)
    samples_referenced: int = _counter(
        "samples_referenced", "Accepted samples whose payloads lie in payload stores.",
        lambda parts: parts.totals.samples_referenced)
    referenced_bytes: int = _counter("referenced_bytes",
                                     "Bytes of accepted payloads in payload stores.",
                                     lambda parts: parts.totals.referenced_bytes)
    lengths: LengthStatistics = _value(  # noqa: RUF009  as `field`
        lambda parts: LengthStatistics.of(parts.totals.arrived))
    buffered: int = _gauge("buffer_samples", "Samples in the buffer.",
                           lambda parts: len(parts.buffer))
    buffered_tokens: int = _gauge("buffer_tokens", "Tokens in the buffer.",
                                  lambda parts: parts.buffer.held.tokens)
    buffered_bytes: int = _gauge("buffer_bytes", "Payload bytes in memory.",
                                 lambda parts: parts.buffer.held.nbytes)
    buffered_referenced_bytes: int = _gauge(
        "buffer_referenced_bytes", "Payload bytes of buffered samples in payload stores.",
        lambda parts: parts.buffer.held.referenced)
    ready: int = _value(lambda parts: parts.buffer.num_ready)
    ready_units: int = _gauge("ready_samples",
                              "Buffered samples (or groups) that a plan may choose from.",
                              lambda parts: parts.buffer.ready_units)
    open_groups: int = _gauge("open_groups", "Groups that lack members.",
                              lambda parts: len(parts.buffer.groups))
    open_group_samples: int = _gauge("open_group_samples", "Samples of groups that lack members.",
                                     lambda parts: parts.buffer.groups.samples)
    oldest_arrival: float | None = _value(lambda parts: parts.buffer.oldest_arrival())
    pushes_held: int = _gauge("pushes_held", "Pushes blocked by a cap.",
                              lambda parts: len(parts.blocked))
    pushes_held_bytes: int = _gauge("pushes_held_bytes", "Payload bytes of blocked pushes.",
                                    lambda parts: parts.blocked.nbytes)
    backpressure_seconds: float = _counter(
        "backpressure_seconds", "Time in which a cap blocked producers.",
        lambda parts: round(parts.rank_time.blocked, 3))
    rank_time: Mapping[TimeCause, float] = _counter(
        "rank_time_seconds", "Time of all DP ranks since the first step, by where it went.",
        lambda parts: {cause: round(spent, 3) for cause, spent in parts.rank_time.seconds.items()},
        "cause")
    in_flight: int = _gauge(
        "samples_in_flight", "Samples of open steps.",
        lambda parts: parts.ledger.steps.in_flight)
    open_steps: int = _gauge(
        "open_steps",
        "Steps planned, not committed, and open to ranks: at most --max-open-steps.",
        lambda parts: len(parts.ledger.steps))
    steps_waiting: int = _gauge("steps_waiting",
                                "Rewound steps that wait behind the open ones.",
                                lambda parts: parts.ledger.steps.waiting)
    steps: tuple[StepStatistics, ...] = _value(
        lambda parts: tuple(map(StepStatistics.of, parts.ledger.steps.uncommitted())))
    steps_planned: Mapping[Trigger, int] = _counter(
        "steps_planned", "Steps planned, by trigger.",
        lambda parts: dict(parts.totals.planned), "trigger")
    partial_steps: int = _counter("partial_steps", "Steps of fewer samples than a batch.",
                                  lambda parts: parts.totals.small_steps)
    dispatched_tokens: int = _counter("dispatched_tokens", "Tokens of planned samples.",
                                      lambda parts: parts.totals.dispatched.tokens)
    steps_committed: int = _counter("steps_committed", "Steps that every rank committed.",
                                    lambda parts: parts.totals.steps_committed)
    last_committed: int = _value(lambda parts: parts.ledger.steps.committed)
    samples_committed: int = _counter("samples_committed", "Samples of committed steps.",
                                      lambda parts: parts.totals.samples_committed)
    steps_rewound: int = _counter("steps_rewound",
                                  "Committed steps that a rewind opened again.",
                                  lambda parts: parts.totals.steps_rewound)
    samples_rewound: int = _counter("samples_rewound", "Samples of steps that were rewound.",
                                    lambda parts: parts.totals.samples_rewound)
    steps_lost: int = _counter(
        "steps_lost", "Steps after the loaded checkpoint that could not be given again.",
        lambda parts: parts.totals.steps_not_rewound)
    steps_evicted: int = _counter(
        "steps_evicted", "Retained steps evicted before a saved checkpoint covered them.",
        lambda parts: parts.totals.steps_evicted)
    steps_retained: int = _gauge("steps_retained",
                                 "Committed steps that no saved checkpoint covers.",
                                 lambda parts: parts.checkpoints.num_retained)
    samples_retained: int = _gauge("samples_retained", "Samples of retained steps.",
                                   lambda parts: parts.checkpoints.samples)
    retained_bytes: int = _gauge(
        "retained_bytes", "Payload bytes of retained steps, on disk and in payload stores.",
        lambda parts: parts.checkpoints.nbytes)
    dropped: Mapping[DropReason, int] = _counter(
        "samples_dropped", "Accepted samples dropped, by reason.",
        lambda parts: dict(parts.totals.dropped), "reason")
    run_id: str
    generation: int = _gauge("generation", "Process groups that have joined so far.",
                             lambda parts: parts.ledger.generation.number)
    dp_size: int = _gauge("dp_size", "DP ranks of the current process group.",
                          lambda parts: parts.ledger.generation.dp_size)
    policy_version: int | None = _gauge("policy_version",
                                        "Policy version last reported; absent before.",
                                        lambda parts: parts.freshness.reported)
    steps_unjudged: int = _gauge(
        "steps_unjudged",
        "Steps committed with --max-staleness set and no policy version reported so far.",
        lambda parts: parts.freshness.unjudged)
    producers_connected: int = _gauge("producers_connected", "Producers connected.",
                                      lambda parts: parts.producers.num_there)
    ranks_connected: int = _gauge(
        "ranks_connected", "DP ranks connected.",
        lambda parts: sum(rank.connected for rank in parts.ledger.ranks.values()))
    missing_ranks: tuple[int, ...] = _value(
        lambda parts: tuple(parts.ledger.generation.missing))
    absent_ranks: tuple[int, ...] = _value(lambda parts: tuple(parts.ledger.generation.absent))
    ranks: Mapping[int, RankStatistics] = _value(lambda parts: {
        dp_rank: RankStatistics.of(rank) for dp_rank, rank in sorted(parts.ledger.ranks.items())})
    wanted: bool = _gauge("step_requested", "1 while every rank has room for one more step.",
                          lambda parts: parts.ledger.has_room)
    hungry: bool = _value(lambda parts: parts.ledger.hungry)
    run_state: str = _value(lambda parts: parts.lifecycle.state)
    selection_bias: float = _gauge(
        "selection_bias_ratio",
        "Kolmogorov-Smirnov distance between lengths dispatched lately and all that arrived.",
        lambda parts: parts.selection_bias.distance)
    selection_bias_chance: float = _gauge(
        "selection_bias_chance_ratio",
        "95th percentile of dispatcher_selection_bias_ratio for random draws.",
        lambda parts: parts.selection_bias.chance)
    objects: ObjectStatistics = _value(ObjectStatistics.of)  # noqa: RUF009  as `field`

    @property
    def accepted(self) -> int:
        """Samples acknowledged as accepted; equals all that is held, in flight, done or dropped."""
        return self.received[Outcome.ACCEPTED]

    @property
    def balanced(self) -> bool:
        """Whether the books balance."""
        done = self.samples_committed - self.samples_rewound
        return self.accepted == (self.buffered + self.in_flight + done + sum(self.dropped.values()))
# fmt: on
