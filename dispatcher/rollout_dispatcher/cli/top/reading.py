"""One look at a dispatcher: what `/statusz` and `/metrics` said, and nothing made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_dispatcher.cli.top.exposition import Metrics

#: Of what imbalance is told: a plain split, the plan by its costs, and what ranks measured.
STAGES = ("fifo", "planned", "measured")

#: Families that are shown; nothing else of `/metrics` is read.
FAMILIES = (
    "process_start_time_seconds",
    "window_samples",
    "buffer_capacity_samples",
    "step_imbalance_ratio_sum",
    "step_imbalance_ratio_count",
    "step_straggler_excess_ratio_sum",
    "step_straggler_excess_ratio_count",
    "sample_staleness_versions_sum",
    "sample_staleness_versions_count",
    "rank_wait_seconds_total",
    "rank_compute_seconds_total",
    "rank_straggler_wait_seconds_total",
    "rank_slowness_ratio",
    "rank_last_seen_timestamp_seconds",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """at: when it was read, on our monotonic clock. time: the dispatcher's time of day."""

    at: float
    time: float
    status: Mapping[str, Any]
    metrics: Metrics

    @property
    def process(self) -> tuple[str, float]:
        """The run, and the start of its process: counters go on as long as both are the same."""
        return str(self.status["run_id"]), self.value("process_start_time_seconds")

    @property
    def uptime(self) -> float:
        """Seconds since the process began."""
        return max(0.0, self.time - self.value("process_start_time_seconds"))

    def value(self, name: str, *labels: str) -> float:
        """A series; 0 where there is none."""
        return self.metrics[name].get(labels, 0.0)

    def by_rank(self, name: str) -> dict[int, float]:
        """A family by DP rank, the sum over other labels (`cost_key` sorts before `dp_rank`)."""
        found: dict[int, float] = {}
        for labels, value in self.metrics[name].items():
            dp_rank = int(labels[-1])
            found[dp_rank] = found.get(dp_rank, 0.0) + value
        return found
