"""The metrics: families that are read at each scrape, and histograms that are observed.

Counts and gauges are read from the core's `statistics()` at scrape, so the books balance in every
scrape. Durations and the quality of plans are observed as they occur. Nothing is registered
globally.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector
from prometheus_client import Histogram as SharedHistogram
from prometheus_client.core import InfoMetricFamily, Metric

from rollout_dispatcher import __version__
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import StepPlanned
from rollout_dispatcher.core.statistics import GAUGE, Statistics
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections.receiving import Receiving
from rollout_dispatcher.service.metrics import collectors
from rollout_dispatcher.service.metrics.collectors import PerRank, family
from rollout_dispatcher.service.metrics.histogram import Histogram
from rollout_dispatcher.service.reloading import OUTCOMES
from rollout_dispatcher.transport.listener import Pending
from rollout_planner.types import Layout, round_up

if TYPE_CHECKING:
    from rollout_dispatcher.journal.journal import Journal

# Buckets are the same whatever the settings are, as series of one name are added up.
#: Of work in this process, from a tenth of a millisecond on.
_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5,
    10, 30, 60, 300,
)  # fmt: skip
#: Of work that ranks or disks take part in.
_STEP_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
    1800,
)  # fmt: skip
_LONG_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
_SMALL_COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# Known label values: their series begin at 0, so that the first event shows.
_ROLES = ("producer", "rank")
_SPLITS = ("even", "bound", "planned", "baseline")
_REDELIVERIES = ("reconnect", "rewind", "new-generation", "new-size", "unresolved")
_ENDED_UNKNOWN = (
    "eof", "reset", "protocol", "version", "unauthorized", "tls", "frame-too-large", "made-room",
    "connection-limit",
)  # fmt: skip
_ENDED_KNOWN = (
    "eof", "reset", "closed", "silent", "protocol", "unauthorized", "frame-too-large", "too-slow",
    "write-timeout", "connection-limit",
)  # fmt: skip
_ENDED = {
    "unknown": _ENDED_UNKNOWN,
    "producer": (*_ENDED_KNOWN, "segment-refused"),
    "rank": (*_ENDED_KNOWN, "rank-refused", "fenced", "checkpoint"),
    "http": (
        "malformed", "unauthorized", "tls", "handshake-timeout", "write-timeout", "made-room",
        "connection-limit",
    ),
}  # fmt: skip


class Metrics:
    """The metrics of one dispatcher, in a registry of its own.

    is_ready, receiving, pending: set by the router, the last by plane.
    """

    def __init__(
        self, config: ServeConfig, core: DispatcherCore, clock: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._config, self._core, self._clock, self._generation = config, core, clock, 0
        self._padded = config.layout is Layout.PADDED
        self.is_ready: Callable[[Statistics], bool] = lambda at: at.run_state == "running"
        self.receiving: Receiving | None = None
        self.pending: dict[str, Pending] = {}
        #: When each rank that waits for a step began to.
        self.waiting_since: dict[int, float] = {}
        #: Tokens that ranks pad every micro-batch to, by rank.
        self.packed_lengths: dict[int, int] = {}
        self._sources: list[Callable[[], Iterable[Metric]]] = [self._now]
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._make_counters()
        self._make_histograms()
        self._per_rank = PerRank(core, clock)
        if config.per_rank_metrics:
            self._sources.append(self._per_rank.collect)
        self.registry.register(self)

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dispatcher_{name}", text, labels, registry=self.registry)

        self.config_reloads = counter(
            "config_reloads", "Reloads of the settings, by outcome.", "outcome"
        )
        self.loss_positions_left_out = counter(
            "loss_positions_left_out",
            "Positions that loss masks of pushed samples mark and the loss leaves out: of first "
            "tokens, or the last of shifted masks.",
        )
        self.connections = counter("connections", "Connections accepted.", "role")
        self.connection_errors = counter(
            "connection_errors",
            "Connections that ended without a goodbye, by reason.",
            "role",
            "reason",
        )
        self.redeliveries = counter("redeliveries", "Open steps delivered again.", "reason")
        self._planned_cost = counter(
            "planned_cost",
            "Estimated cost of planned steps, by split: without waits (even), a lower bound "
            "(bound), as planned (planned), by a plain split (baseline).",
            "split",
        )
        self._dispatched_bytes = counter("dispatched_bytes", "Payload bytes of planned samples.")
        self._padding_tokens = counter(
            "padding_tokens",
            "Padding tokens that ranks compute, dummy micro-batches included.",
        )
        for label, counts in (
            (OUTCOMES, self.config_reloads), (_ROLES, self.connections),
            (_REDELIVERIES, self.redeliveries), (_SPLITS, self._planned_cost),
        ):  # fmt: skip
            for value in label:
                counts.labels(value)
        for role, reasons in _ENDED.items():
            for reason in reasons:
                self.connection_errors.labels(role, reason)

    def _make_histograms(self) -> None:
        def histogram(
            name: str,
            text: str,
            bounds: tuple[float, ...],
            label: str = "",
            known: Iterable[str] = ("",),
        ) -> Histogram:
            found = Histogram(f"dispatcher_{name}", text, bounds, label, known)
            self._sources.append(lambda: [found.family()])
            return found

        self.message_duration = histogram(
            "message_duration_seconds",
            "Time from a readable message to its answer, durable if there is a journal.",
            _SECONDS,
            "role",
            _ROLES,
        )
        self.event_loop_lag = histogram(
            "event_loop_lag_seconds", "Delay of due callbacks in the event loop.", _SECONDS
        )
        self.plan_duration = histogram("plan_duration_seconds", "Time to plan a step.", _SECONDS)
        self._micro_batches = histogram(
            "step_micro_batches", "Micro-batches of a step on each DP rank.", _COUNTS
        )
        self._wait = histogram(
            "sample_wait_seconds", "Time a dispatched sample was buffered.", _LONG_SECONDS
        )
        self._skips = histogram(
            "sample_skips",
            "Dispatches that passed a sample over before it was planned.",
            _SMALL_COUNTS,
        )
        self._staleness = histogram(
            "sample_staleness_versions",
            "Policy versions between a dispatched sample and its training.",
            _SMALL_COUNTS,
        )
        self.delivery_duration = histogram(
            "delivery_duration_seconds",
            "From a step's plan to its last micro-batch being written to a rank.",
            _STEP_SECONDS,
        )
        self.rank_wait_duration = histogram(
            "rank_wait_duration_seconds",
            "Time a rank's training loop waited for a step, observed when the step arrives.",
            _STEP_SECONDS,
        )

    def collect(self) -> Iterator[Metric]:
        """Return every family."""
        for source in self._sources:
            yield from source()

    def _now(self) -> Iterator[Metric]:
        self._core.rank_time(self._clock())
        at, receiving = self._core.statistics(), self.receiving
        text = "Version of the dispatcher."
        yield InfoMetricFamily("dispatcher_build", text, {"version": __version__})
        yield InfoMetricFamily(
            "dispatcher_config", "Settings in force.", _config_labels(self._config)
        )
        text = "Changes of the settings since the start."
        yield family(GAUGE, "config_generation", text, self._generation)
        text = "1 while samples are accepted, as in /readyz."
        yield family(GAUGE, "ready", text, self.is_ready(at))
        text = "Bytes of frames and request bodies that are being received."
        yield family(GAUGE, "receiving_bytes", text, receiving.nbytes if receiving else 0)
        text = "Connections without a hello or a request so far."
        pending = {plane: len(pending) for plane, pending in self.pending.items()}
        yield family(GAUGE, "pending_connections", text, pending, "plane")
        yield from collectors.of_core(self._core, at, self._clock())
        measured, per_rank = self._core.measured, self._config.per_rank_metrics
        yield from collectors.of_measured(measured, per_rank=per_rank)

    def configured(self, config: ServeConfig, generation: int) -> None:
        """Use these options from now on. generation: changes so far."""
        self._config, self._generation = config, generation

    def watch_journal(self, journal: "Journal") -> None:
        """Export the journal's metrics; its own thread observes syncs."""
        syncs = SharedHistogram(
            "dispatcher_journal_fsync_duration_seconds",
            "Time to make a group of batches durable.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._sources.append(lambda: collectors.of_journal(journal))
        journal.on_sync = syncs.observe

    def watch_record(self, writer: RecordWriter) -> None:
        """Export the record's metrics."""
        self._sources.append(lambda: collectors.of_record(writer))

    def step_planned(self, step: StepPlanned) -> None:
        """Observe the quality of a plan, and the delays of its samples."""
        plan, even = step.plan, step.plan.even_time
        costs = plan.cost.sum(axis=1).tolist()
        for split, cost in zip(
            _SPLITS,
            (even, max(even, plan.lower_bound), plan.time, even * (1 + plan.fifo_excess)),
            strict=True,
        ):
            self._planned_cost.labels(split).inc(cost)
        self._micro_batches.observe(plan.num_micro_batches)
        self._wait.observe_all(step.waits)
        self._skips.observe_all(step.skips)
        self._staleness.observe_all(step.staleness)
        self._dispatched_bytes.inc(step.nbytes)
        self._padding_tokens.inc(self._padding(step))
        self._per_rank.planned(costs)

    def _padding(self, step: StepPlanned) -> int:
        """Return the padding tokens computed: of samples, and of fillers, one token each."""
        counts = step.plan.counts
        full = counts[counts > 0]
        multiple = self._config.sample_length_multiple
        tokens, starts = round_up(step.tokens, multiple), full.cumsum() - full
        rows = np.full(counts.shape, multiple)
        if self._padded:
            rows[counts > 0] = np.maximum.reduceat(tokens, starts) * full
        else:
            rows[counts > 0] = np.add.reduceat(tokens, starts)
        if (sizes := step.plan.cp_sizes) is not None:
            # A block pads its samples to two pieces a rank, which has as many rows of them.
            each = np.repeat(sizes[counts > 0], full)
            pieces = np.where(each > 1, 2 * each * multiple, multiple)
            rows[counts > 0] = np.add.reduceat(-(-step.tokens // pieces) * pieces, starts)
            first = np.arange(len(rows))[:, None] // sizes * sizes
            rows = np.take_along_axis(rows, first, axis=0) // sizes
        lengths = list(map(self.packed_lengths.get, range(len(rows)), repeat(0)))
        return int(np.maximum(rows.T, lengths).sum() - step.tokens.sum())


def _config_labels(config: ServeConfig) -> dict[str, str]:
    names = (
        "dp_size", "global_batch_size", "global_batch_groups", "window",
        "micro_batch_size", "micro_batch_tokens", "layout", "sync", "strategy", "groups", "cost",
        "max_wait", "max_imbalance",
    )  # fmt: skip
    labels = {name: str(getattr(config, name)) for name in names}
    labels["max_delay"] = str(config.skips_bound)
    return labels
