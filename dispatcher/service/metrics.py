"""The metrics: a collector that translates snapshots, and the histograms that are observed.

Counts and gauges are read from the core's `statistics()` at scrape, so the books balance in every
scrape. Only what is over once it has happened (durations, a plan's quality) is observed as it
happens. Nothing is registered globally.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from dispatcher import __version__
from dispatcher.core.dispatch import Dispatch
from dispatcher.core.events import StepPlanned
from dispatcher.core.lengths import LengthCounts
from dispatcher.core.statistics import Statistics
from dispatcher.plan import Layout
from dispatcher.service.config import ServeConfig
from dispatcher.service.histogram import ArrayHistogram

_Label = TypeVar("_Label", bound=str)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LONG_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
_RATIOS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SMALL_COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Everything that /metrics shows, in a registry of its own."""

    def __init__(self, config: ServeConfig, core: Dispatch, clock: Callable[[], float]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        self._config = config
        self._padded = config.layout is Layout.PADDED
        registry = self.registry
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        Info("dispatcher_build", "Version of the dispatcher.", registry=registry).info(
            {"version": __version__}
        )
        Info("dispatcher_config", "Settings that shape plans.", registry=registry).info(
            _config_labels(config)
        )
        registry.register(CoreCollector(core, config, clock))
        self._make_connection_metrics(registry)
        self._make_plan_metrics(registry)
        self._make_sample_histograms(registry)
        self._make_rank_metrics(registry)

    def _make_connection_metrics(self, registry: CollectorRegistry) -> None:
        self.connections = Counter(
            "dispatcher_connections", "Connections accepted.", ["role"], registry=registry
        )
        self.connection_errors = Counter(
            "dispatcher_connection_errors",
            "Connections that ended otherwise than by a goodbye.",
            ["role", "reason"],
            registry=registry,
        )
        self.event_loop_lag = Histogram(
            "dispatcher_event_loop_lag_seconds",
            "How late the event loop runs what is due.",
            buckets=_SECONDS,
            registry=registry,
        )

    def _make_plan_metrics(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"dispatcher_{name}", text, labels, buckets=buckets, registry=registry)

        self.plan_duration = histogram("plan_duration_seconds", "Time to plan a step.", _SECONDS)
        self._imbalance = histogram(
            "step_imbalance_ratio", "Max over mean of the ranks' cost, minus 1.", _RATIOS, "stage"
        )
        self._excess = histogram(
            "step_straggler_excess_ratio",
            "Share of trainer time lost to waiting for stragglers.",
            _RATIOS,
            "stage",
        )
        self._bound_excess = histogram(
            "step_lower_bound_excess_ratio",
            "The least straggler excess that any split of the step's samples could have.",
            _RATIOS,
        )
        self._micro_batches = histogram(
            "step_micro_batches", "Micro-batches of a step on each DP rank.", _COUNTS
        )
        self.redeliveries = Counter(
            "dispatcher_redeliveries",
            "Open steps delivered again.",
            ["reason"],
            registry=registry,
        )
        self._dispatched_bytes = Counter(
            "dispatcher_dispatched_bytes", "Payload bytes of planned samples.", registry=registry
        )
        self._padding_tokens = Counter(
            "dispatcher_padding_tokens",
            "Tokens that ranks compute for layout's sake only: padding and fillers.",
            registry=registry,
        )

    def _make_sample_histograms(self, registry: CollectorRegistry) -> None:
        self._wait = ArrayHistogram(
            "dispatcher_sample_wait_seconds",
            "Time a dispatched sample was buffered.",
            _LONG_SECONDS,
            registry,
        )
        self._skips = ArrayHistogram(
            "dispatcher_sample_skips",
            "Dispatches that passed a sample over before it went.",
            _SMALL_COUNTS,
            registry,
        )
        self._staleness = ArrayHistogram(
            "dispatcher_sample_staleness_versions",
            "Policy versions between a dispatched sample and its training.",
            _SMALL_COUNTS,
            registry,
        )

    def _make_rank_metrics(self, registry: CollectorRegistry) -> None:
        self.delivery_duration = Histogram(
            "dispatcher_delivery_duration_seconds",
            "From a step's plan to its last micro-batch being written to a rank.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._rank_wait = Histogram(
            "dispatcher_rank_wait_seconds",
            "Time a rank's training loop was blocked waiting for a step.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_rank = PerRank()
        if self._config.per_rank_metrics:
            registry.register(self._per_rank)

    def step_planned(self, step: StepPlanned) -> None:
        """Observe the quality of a plan and what its samples went through."""
        plan = step.plan
        self._imbalance.labels("fifo").observe(plan.fifo_imbalance)
        self._imbalance.labels("planned").observe(plan.imbalance)
        self._excess.labels("fifo").observe(plan.fifo_excess)
        self._excess.labels("planned").observe(plan.excess)
        mean = float(plan.cost.sum()) / len(plan.cost)
        self._bound_excess.observe(max(0.0, plan.lower_bound / mean - 1) if mean else 0.0)
        self._micro_batches.observe(plan.num_micro_batches)
        self._wait.observe_all(step.waits)
        self._skips.observe_all(step.skips)
        self._staleness.observe_all(step.staleness)
        self._dispatched_bytes.inc(step.nbytes)
        self._padding_tokens.inc(self._padding(step))
        for dp_rank, cost in enumerate(plan.cost.sum(axis=1).tolist()):
            self._per_rank.cost[dp_rank] += cost

    def rank_waited(self, dp_rank: int, seconds: float) -> None:
        """A rank's training loop was blocked for so long."""
        self._rank_wait.observe(seconds)
        self._per_rank.wait[dp_rank] += seconds

    def _padding(self, step: StepPlanned) -> int:
        tokens = dict(zip(step.plan.chosen.tolist(), step.tokens, strict=True))
        padding = 0
        for rank in step.plan.micro_batches:
            for part in rank:
                lengths = [tokens[int(at)] for at in part]
                if not lengths:
                    padding += 1
                elif self._padded:
                    padding += len(lengths) * max(lengths) - sum(lengths)
        return padding


class PerRank:
    """Counters with one series a DP rank.

    Not `Counter`s of prometheus-client: to that, `rank_wait_seconds_total` and the histogram
    `rank_wait_seconds` are one name, which they are in OpenMetrics and not in the text format.
    """

    def __init__(self) -> None:
        self.wait: defaultdict[int, float] = defaultdict(float)
        self.cost: defaultdict[int, float] = defaultdict(float)

    def describe(self) -> list[Metric]:
        """Nothing to check: see above."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Both families."""
        for name, text, values in (
            ("rank_wait_seconds", "Time each rank's training loop was blocked.", self.wait),
            ("rank_dispatched_cost", "Estimated cost planned for each rank.", self.cost),
        ):
            family = CounterMetricFamily(f"dispatcher_{name}", text, labels=["dp_rank"])
            for dp_rank in sorted(values):
                family.add_metric([str(dp_rank)], values[dp_rank])
            yield family


def _config_labels(config: ServeConfig) -> dict[str, str]:
    names = (
        "dp_size", "dispatch_batch_size", "window_multiple", "micro_batch_size",
        "micro_batch_tokens", "layout", "sync", "strategy", "groups", "cost",
    )  # fmt: skip
    return {name: str(getattr(config, name)) for name in names}


class CoreCollector:
    """Translates one snapshot of the core into metric families."""

    def __init__(self, core: Dispatch, config: ServeConfig, clock: Callable[[], float]) -> None:
        self._core, self._config, self._clock = core, config, clock

    def describe(self) -> Iterator[Metric]:
        """The same families, for the registry's check of names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Every family of one snapshot."""
        at = self._core.statistics()
        yield from self._counters(at)
        yield from self._gauges(at)
        yield _lengths(self._core.totals.arrived)
        if self._config.per_rank_metrics:
            yield self._last_seen(at)

    def _counters(self, at: Statistics) -> Iterator[Metric]:
        def labelled(name: str, text: str, label: str, values: Mapping[_Label, int]) -> Metric:
            family = CounterMetricFamily(f"dispatcher_{name}", text, labels=[label])
            for value, count in values.items():
                family.add_metric([str(value)], count)
            return family

        yield labelled("samples_received", "Samples pushed, by outcome.", "outcome", at.received)
        yield labelled("samples_dropped", "Accepted samples given up.", "reason", at.dropped)
        yield labelled("steps_planned", "Steps, by trigger.", "trigger", at.steps_planned)
        totals = self._core.totals
        for name, text, value in (
            ("received_tokens", "Tokens of accepted samples.", at.received_tokens),
            ("received_bytes", "Payload bytes of accepted samples.", at.received_bytes),
            ("small_steps", "Steps of fewer samples than a batch.", at.small_steps),
            ("steps_committed", "Steps that every rank applied.", at.steps_committed),
            ("samples_committed", "Samples of committed steps.", at.samples_committed),
            (
                "dispatched_tokens",
                "Tokens of planned samples.",
                totals.dispatched.tokens,
            ),
        ):
            yield CounterMetricFamily(f"dispatcher_{name}", text, value=value)

    def _gauges(self, at: Statistics) -> Iterator[Metric]:
        now = self._clock()
        age = 0.0 if at.oldest_arrival is None else now - at.oldest_arrival
        for name, text, value in (
            ("ready", "1 while samples are accepted.", at.phase == "running"),
            ("buffer_samples", "Samples held.", at.buffered),
            ("buffer_tokens", "Tokens held.", at.buffered_tokens),
            ("buffer_bytes", "Payload bytes held.", at.buffered_bytes),
            ("buffer_capacity_samples", "Cap on samples held.", self._config.buffer_samples),
            ("window_samples", "Samples that a full window has.", self._config.window_samples),
            ("ready_samples", "Held samples that a plan may choose from.", at.ready),
            ("open_groups", "Groups that lack members.", at.open_groups),
            ("buffer_oldest_age_seconds", "Age of the oldest sample held.", age),
            ("backpressure_active", "1 while a cap holds producers back.", at.backpressure),
            ("pushes_held", "Pushes that wait for room.", at.pushes_held),
            ("samples_in_flight", "Samples of open steps.", at.in_flight),
            ("open_steps", "Steps planned and not committed.", at.open_steps),
            ("generation", "Process groups that have joined so far.", at.generation),
            ("ranks_connected", "DP ranks connected.", at.ranks_connected),
            ("step_wanted", "1 while every rank has room for one more step.", at.wanted),
            ("policy_version", "Policy version last reported.", at.policy_version or 0),
            (
                "selection_bias_ratio",
                "Kolmogorov-Smirnov distance of dispatched from arrived lengths.",
                at.selection_bias,
            ),
        ):
            yield GaugeMetricFamily(f"dispatcher_{name}", text, value=float(value))

    def _last_seen(self, at: Statistics) -> Metric:
        """The core's clock is monotonic; dashboards want the time of day."""
        offset = time.time() - self._clock()
        family = GaugeMetricFamily(
            "dispatcher_rank_last_seen_timestamp_seconds",
            "When a rank was last heard of.",
            labels=["dp_rank"],
        )
        for dp_rank, seen in at.last_seen.items():
            family.add_metric([str(dp_rank)], seen + offset)
        return family


def _lengths(counts: LengthCounts) -> Metric:
    buckets = [(f"{bound - 1}", below) for bound, below in counts.octaves()]
    return HistogramMetricFamily(
        "dispatcher_sample_tokens",
        "Tokens of accepted samples.",
        [*buckets, ("+Inf", counts.samples)],
        float(counts.tokens),
    )
