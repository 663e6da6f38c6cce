"""What the DP ranks have measured, as metrics; read when Prometheus asks."""

import math
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.measuring.report import MeasuredStatistics
from rollout_dispatcher.service.metrics.exposition import RankFamily

#: Rows of `MeasuredStatistics.totals`: counters of each rank.
_SECONDS = (
    ("rank_compute_seconds", "Time each rank computed, outside collectives, as measured."),
    (
        "rank_straggler_wait_seconds",
        "Time each rank waited for slower ones inside collectives, as measured.",
    ),
)
#: Of seconds that are added up, and of ratios: each digit is 200 bytes of a scrape of 512 ranks.
_DIGITS = 2


class MeasuredCollector:
    """Series of which nothing can be told are absent. per_rank: also those of each DP rank."""

    def __init__(self, core: Dispatch, *, per_rank: bool) -> None:
        self._core, self._per_rank = core, per_rank

    def describe(self) -> Iterator[Metric]:
        """The same families, for the registry's check of names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Every family of one snapshot."""
        at = self._core.measured
        yield CounterMetricFamily(
            "dispatcher_measured_steps",
            "Passes over steps that every rank has timed.",
            value=at.steps,
        )
        unmeasured = CounterMetricFamily(
            "dispatcher_unmeasured_steps",
            "Passes over steps of which no loss can be told, by why.",
            labels=["reason"],
        )
        for reason, count in at.unmeasured.items():
            unmeasured.add_metric([str(reason)], count)
        yield unmeasured
        yield GaugeMetricFamily(
            "dispatcher_cost_loss_ratio",
            "Share of the ranks' time lost as plans balance another cost than what is measured.",
            value=at.cost.loss,
        )
        transport = CounterMetricFamily(
            "dispatcher_collective_transport_seconds",
            "Time in collectives that is nobody's fault, the same for all ranks, as measured.",
            labels=["cost_key"],
        )
        for cost_key, seconds in at.transport.items():
            transport.add_metric([cost_key], round(seconds, _DIGITS))
        yield transport
        if self._per_rank:
            yield from _by_rank(at)


def _by_rank(at: MeasuredStatistics) -> Iterator[Metric]:
    for row, (name, text) in enumerate(_SECONDS):
        family = RankFamily(f"dispatcher_{name}", text, "counter")
        for cost_key, seconds in at.totals.items():
            family.add(dict(enumerate(seconds[row].round(_DIGITS).tolist())), cost_key=cost_key)
        yield family
    slowness = dict(enumerate(at.slowness.round(_DIGITS).tolist()))
    yield RankFamily(
        "dispatcher_rank_slowness_ratio",
        "Seconds a unit of planned cost over the median rank's; 1 is as fast as that.",
        "gauge",
        {dp_rank: value for dp_rank, value in slowness.items() if not math.isnan(value)},
    )
