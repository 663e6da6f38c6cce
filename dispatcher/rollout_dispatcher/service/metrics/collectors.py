"""Metric families that are read from snapshots at each scrape."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.measuring.measuring import MeasuredStatistics
from rollout_dispatcher.core.statistics import (
    COUNTER,
    GAUGE,
    METRIC,
    ObjectStatistics,
    Statistics,
)
from rollout_dispatcher.record.writer import RecordWriter

if TYPE_CHECKING:
    from rollout_dispatcher.journal.journal import Journal

#: Digits after the point of sums of seconds and of ratios.
_DIGITS = 2


def family(
    kind: str, name: str, text: str, value: float | Mapping[Any, float] | None, label: str = ""
) -> Metric:
    """Return a counter or gauge of one value, absent while that is None; or of one a `label`."""
    make = CounterMetricFamily if kind == COUNTER else GaugeMetricFamily
    found = make(f"dispatcher_{name}", text, labels=[label] if label else ())
    if isinstance(value, Mapping):
        for key, each in value.items():
            found.add_metric([str(key)], float(each))
    elif value is not None:
        found.add_metric((), float(value))
    return found


def of_statistics(at: Statistics | ObjectStatistics) -> Iterator[Metric]:
    """Return a family for each field that is a metric."""
    for row in fields(at):
        if (info := row.metadata.get(METRIC)) is not None:
            yield family(info.kind, info.name, info.text, getattr(at, row.name), info.label)


def of_core(core: DispatcherCore, at: Statistics, now: float) -> Iterator[Metric]:
    """Return the families of the core's snapshot, and the settings to compare them with."""
    yield from of_statistics(at)
    yield from of_statistics(at.objects)
    age = 0.0 if at.oldest_arrival is None else now - at.oldest_arrival
    text = "Age of the oldest buffered sample."
    yield family(GAUGE, "buffer_oldest_age_seconds", text, age)
    text = "Ready samples (or groups) at which producers wait."
    yield family(GAUGE, "buffer_capacity_samples", text, core.config.limits.samples)
    text = "Samples (or groups) that the strategy chooses from: a full window, or a batch."
    yield family(GAUGE, "window_samples", text, core.config.trigger.window)
    mix = core.step_mix  # of single steps, over the last hundred; None before the first
    text = "Weight under token-mean of a loss token of the longest 1 % of samples, over the mean."
    yield family(GAUGE, "long_sample_weight_ratio", text, getattr(mix, "long_weight", None))
    text = "Share of steps without any of the longest 1 % of samples."
    yield family(
        GAUGE, "steps_without_long_samples_ratio", text, getattr(mix, "without_long", None)
    )
    text = "Standard deviation of the steps' planned work over its mean."
    yield family(GAUGE, "step_work_variation_ratio", text, getattr(mix, "work_variation", None))
    text = "Mean Kolmogorov-Smirnov distance between lengths of one step and of all arrivals."
    yield family(GAUGE, "step_selection_bias_ratio", text, getattr(mix, "ks_step", None))
    buckets = [(f"{bound - 1:.1f}", below) for bound, below in at.lengths.octaves]
    yield HistogramMetricFamily(
        "dispatcher_sample_tokens",
        "Tokens of accepted samples.",
        [*buckets, ("+Inf", at.lengths.samples)],
        float(at.lengths.tokens),
    )


def of_measured(at: MeasuredStatistics, *, per_rank: bool) -> Iterator[Metric]:
    """Return what DP ranks have measured; unknown values are absent.

    per_rank: with series of each DP rank.
    """
    text = "Passes over steps that every rank has timed."
    yield family(COUNTER, "measured_steps", text, at.steps)
    text = "Passes over steps without usable timing, by reason."
    yield family(COUNTER, "steps_without_timing", text, at.unmeasured, "reason")
    text = "Share of the ranks' time lost because plans use another cost than the measured one."
    yield family(GAUGE, "cost_loss_ratio", text, at.cost.loss)
    text = "Time of the collectives alone, without waits for slower ranks, as measured."
    transport = {key: round(seconds, _DIGITS) for key, seconds in at.transport.items()}
    yield family(COUNTER, "collective_transport_seconds", text, transport, "cost_key")
    if not per_rank:
        return
    texts = {
        "compute": "Time each rank computed, outside collectives, as measured.",
        "straggler_wait": "Time each rank waited for slower ones inside collectives, as measured.",
    }
    for row, (name, text) in enumerate(texts.items()):
        labels = ["cost_key", "dp_rank"]
        found = CounterMetricFamily(f"dispatcher_rank_{name}_seconds", text, labels=labels)
        for cost_key, seconds in at.totals.items():
            for dp_rank, value in enumerate(seconds[row].round(_DIGITS).tolist()):
                found.add_metric([cost_key, str(dp_rank)], value)
        yield found
    text = "Seconds per unit of planned cost, relative to the median rank."
    slowness = enumerate(at.slowness.round(_DIGITS).tolist())
    known = {dp_rank: value for dp_rank, value in slowness if not math.isnan(value)}
    yield family(GAUGE, "rank_slowness_ratio", text, known, "dp_rank")


def of_journal(journal: "Journal") -> Iterator[Metric]:
    """Return the journal's size and failures."""
    at = journal.statistics()
    yield family(GAUGE, "journal_bytes", "Bytes on disk.", at.nbytes)
    text = "1 while nothing becomes durable: no room, or broken."
    yield family(GAUGE, "journal_failing", text, journal.failure is not None)
    text = "Failures of the journal, by reason."
    yield family(COUNTER, "journal_errors", text, at.errors, "reason")


def of_record(writer: RecordWriter) -> Iterator[Metric]:
    """Return the record's size and failed writes."""
    yield family(GAUGE, "recorded_bytes", "Bytes of the record on disk.", writer.nbytes)
    text = "Failed writes of the record, and events lost before them."
    yield family(COUNTER, "record_errors", text, writer.errors)


class PerRank:
    """Families with one series a DP rank of the current process group, present from the start."""

    def __init__(self, core: DispatcherCore, clock: Callable[[], float]) -> None:
        self._core, self._clock = core, clock
        self._cost: defaultdict[int, float] = defaultdict(float)

    def planned(self, costs: Sequence[float]) -> None:
        """Add a planned step's cost of each DP rank."""
        for dp_rank, cost in enumerate(costs):
            self._cost[dp_rank] += cost

    def collect(self) -> Iterator[Metric]:
        """Return every family."""
        now, (dp_size, last_seen) = self._clock(), self._core.ranks_seen
        text = "Estimated cost planned for each rank."
        costs = {rank: float(f"{self._cost[rank]:.9g}") for rank in range(dp_size)}
        yield family(COUNTER, "rank_dispatched_cost", text, costs, "dp_rank")
        text = "1 for each rank that blocks all others while its heartbeats come, as in /readyz."
        stall = self._core.stall(now)
        hung = frozenset(() if stall is None else stall.hung)
        hangs = {rank: rank in hung for rank in range(dp_size)}
        yield family(GAUGE, "rank_hung", text, hangs, "dp_rank")
        # The core's clock is monotonic; dashboards want the time of day.
        offset = time.time() - now
        text = (
            "Time of a rank's last message, heartbeats included; absent before it joins and after "
            "its goodbye."
        )
        seen = {dp_rank: round(at + offset, 1) for dp_rank, at in last_seen.items()}
        yield family(GAUGE, "rank_last_seen_timestamp_seconds", text, seen, "dp_rank")
