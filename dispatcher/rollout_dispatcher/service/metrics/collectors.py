"""Collectors: counts and gauges that are read when Prometheus asks, and kept nowhere else."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.measuring.report import MeasuredStatistics
from rollout_dispatcher.core.planning.step_mix import StepMix
from rollout_dispatcher.core.statistics import LengthStatistics, Statistics
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.connections.shared_memory import SharedMemory
from rollout_dispatcher.service.metrics.exposition import RankFamily, ValueHistogram
from rollout_dispatcher.transport.fair_selector import turns_of

if TYPE_CHECKING:
    from rollout_dispatcher.journal.journal import Journal


class RankWaits:
    """Waits of the current process group's ranks. observe: is told of each that ended in a step."""

    def __init__(self, observe: Callable[[float], object]) -> None:
        self._observe = observe
        self._since: dict[int, float] = {}
        self._before: defaultdict[int, float] = defaultdict(float)

    def begins(self, dp_rank: int, now: float) -> None:
        """It waits, if it did not already."""
        self._since.setdefault(dp_rank, now)

    def ends(self, dp_rank: int, now: float) -> float | None:
        """It has its step; how long it waited for it, if it did."""
        if (seconds := self._stop(dp_rank, now)) is not None:
            self._observe(seconds)
        return seconds

    def is_waiting(self, dp_rank: int) -> bool:
        """Whether it waits."""
        return dp_rank in self._since

    def stops(self, dp_rank: int, now: float) -> None:
        """It waits no more and has no step: its connection is gone, or the stream has ended."""
        self._stop(dp_rank, now)

    def all_stop(self, now: float) -> None:
        """Another process group takes the place of this one."""
        for dp_rank in list(self._since):
            self._stop(dp_rank, now)

    def seconds(self, dp_size: int, now: float) -> Mapping[int, float]:
        """Of each DP rank, in hundredths: more digits would double what a scrape sends."""
        before, since = self._before, self._since
        return {
            # Added up as `_stop` does: a bit less, rounded down, would be a counter that falls.
            dp_rank: round(before.get(dp_rank, 0.0) + (now - since.get(dp_rank, now)), 2)
            for dp_rank in range(dp_size)
        }

    def _stop(self, dp_rank: int, now: float) -> float | None:
        since = self._since.pop(dp_rank, None)
        if since is None:
            return None
        self._before[dp_rank] += now - since
        return now - since


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


class MessageTimes:
    """Of messages that were answered, until their times are observed."""

    def __init__(self, durations: ValueHistogram) -> None:
        self._durations, self._loop = durations, asyncio.get_running_loop()
        self._answered: list[tuple[Peer, float]] = []
        turns = turns_of(self._loop)
        #: An event loop of others tells of no turns: it is asked to call.
        self._has_turns = turns is not None
        if turns is not None:
            turns.ended.append(self._observe)

    def note(self, peer: Peer, readable_since: float | None) -> None:
        """A message of this peer was answered that can be read since then; None: since now."""
        since = self._loop.time() if readable_since is None else readable_since
        if not self._answered and not self._has_turns:
            self._loop.call_soon(lambda: self._observe(self._loop.time()))
        self._answered.append((peer, since))

    def _observe(self, now: float) -> None:
        answered, self._answered = self._answered, []
        for peer, since in answered:
            self._durations.observe(now - since, peer.role)


_Label = TypeVar("_Label", bound=str)


class PerRank:
    """Families with one series a DP rank of the current process group, present from the start.

    seconds_waited: of so many ranks, until now. Values have no digits that nobody needs: each takes
    hundreds of bytes of a scrape where ranks are hundreds.
    """

    def __init__(
        self,
        core: Dispatch,
        seconds_waited: Callable[[int, float], Mapping[int, float]],
        clock: Callable[[], float],
    ) -> None:
        self._core, self._seconds_waited, self._clock = core, seconds_waited, clock
        #: Planned for each rank so far, and digits after its point: those of a thousandth of the
        #: first step. It is a counter, so they stay the same.
        self._cost: defaultdict[int, float] = defaultdict(float)
        self._digits: int | None = None

    def planned(self, costs: Sequence[float]) -> None:
        """A step was planned: of what cost, by DP rank."""
        mean = sum(costs) / len(costs)
        if self._digits is None and mean > 0:
            self._digits = 3 - math.floor(math.log10(mean))
        for dp_rank, cost in enumerate(costs):
            self._cost[dp_rank] += cost

    def describe(self) -> Iterator[Metric]:
        """The same families, for the registry's check of names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        now, (dp_size, last_seen) = self._clock(), self._core.ranks_seen
        yield RankFamily(
            "dispatcher_rank_wait_seconds",
            "Time each rank's training loop was blocked, a wait that lasts included.",
            "counter",
            self._seconds_waited(dp_size, now),
        )
        yield RankFamily(
            "dispatcher_rank_dispatched_cost",
            "Estimated cost planned for each rank.",
            "counter",
            {
                dp_rank: round(self._cost.get(dp_rank, 0.0), self._digits or 0)
                for dp_rank in range(dp_size)
            },
        )
        standstill = self._core.standstill(now)
        hung = frozenset(() if standstill is None else standstill.hung)
        yield RankFamily(
            "dispatcher_rank_hung",
            "1 for each rank that is behind all others while no rank gets on, though its "
            "heartbeats come; as /readyz says.",
            "gauge",
            {dp_rank: float(dp_rank in hung) for dp_rank in range(dp_size)},
        )
        # The core's clock is monotonic; dashboards want the time of day.
        offset = time.time() - now
        yield RankFamily(
            "dispatcher_rank_last_seen_timestamp_seconds",
            "When a rank was last heard of, heartbeats included; absent before it has joined, and "
            "once it has said goodbye.",
            "gauge",
            {dp_rank: round(at + offset, 1) for dp_rank, at in last_seen.items()},
        )


class CoreCollector:
    """Translates one snapshot of the core into metric families."""

    def __init__(self, core: Dispatch, config: ServeConfig, clock: Callable[[], float]) -> None:
        self._core, self._config, self._clock = core, config, clock
        #: Whether samples are accepted; who serves knows of more than the core's state.
        self.is_ready: Callable[[Statistics], bool] = lambda at: at.run_state == "running"

    def describe(self) -> Iterator[Metric]:
        """The same families, for the registry's check of names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Every family of one snapshot."""
        at = self._core.statistics()
        yield from self._counters(at)
        yield from self._gauges(at)
        yield from _step_mix(self._core.step_mix)
        yield _lengths(at.lengths)

    def _counters(self, at: Statistics) -> Iterator[Metric]:
        def labelled(name: str, text: str, label: str, values: Mapping[_Label, int]) -> Metric:
            family = CounterMetricFamily(f"dispatcher_{name}", text, labels=[label])
            for value, count in values.items():
                family.add_metric([str(value)], count)
            return family

        yield labelled("samples_received", "Samples pushed, by outcome.", "outcome", at.received)
        yield labelled("samples_refused", "Samples refused, by reason.", "reason", at.refused)
        yield labelled("samples_dropped", "Accepted samples given up.", "reason", at.dropped)
        yield labelled("steps_planned", "Steps, by trigger.", "trigger", at.steps_planned)
        for name, text, value in (
            ("received_tokens", "Tokens of accepted samples.", at.received_tokens),
            ("received_bytes", "Payload bytes that came with accepted samples.", at.received_bytes),
            (
                "samples_referenced",
                "Accepted samples whose payloads lie in payload stores.",
                at.samples_referenced,
            ),
            ("referenced_bytes", "Bytes of these payloads.", at.referenced_bytes),
            ("small_steps", "Steps of fewer samples than a batch.", at.small_steps),
            ("steps_committed", "Steps that every rank applied.", at.steps_committed),
            ("samples_committed", "Samples of committed steps.", at.samples_committed),
            ("steps_rewound", "Committed steps that a rewind opened again.", at.steps_rewound),
            ("samples_rewound", "Samples of steps that were rewound.", at.samples_rewound),
            (
                "steps_not_rewound",
                "Steps trained after the checkpoint that was loaded, and gone.",
                at.steps_not_rewound,
            ),
            (
                "steps_evicted",
                "Retained steps that had to go before a saved checkpoint covered them.",
                at.steps_evicted,
            ),
            ("dispatched_tokens", "Tokens of planned samples.", at.dispatched_tokens),
            ("objects_released", "Objects of payload stores released.", at.objects.freed),
            (
                "object_release_failures",
                "Times that objects could not be released, and were tried again.",
                at.objects.failures,
            ),
        ):
            yield CounterMetricFamily(f"dispatcher_{name}", text, value=value)

    def _gauges(self, at: Statistics) -> Iterator[Metric]:
        now = self._clock()
        age = 0.0 if at.oldest_arrival is None else now - at.oldest_arrival
        for name, text, value in (
            ("ready", "1 while samples are accepted, as /readyz says.", self.is_ready(at)),
            ("buffer_samples", "Samples held.", at.buffered),
            ("buffer_tokens", "Tokens held.", at.buffered_tokens),
            ("buffer_bytes", "Payload bytes held in memory.", at.buffered_bytes),
            (
                "buffer_referenced_bytes",
                "Payload bytes of held samples that lie in payload stores.",
                at.buffered_referenced_bytes,
            ),
            (
                "buffer_capacity_samples",
                "Ready samples (or groups) at which producers wait.",
                self._core.config.limits.samples,
            ),
            (
                "window_samples",
                "Samples (or groups) that the strategy chooses from: a full window, or a batch.",
                self._core.config.trigger.window,
            ),
            (
                "ready_samples",
                "Held samples (or groups) that a plan may choose from.",
                at.ready_units,
            ),
            ("open_groups", "Groups that lack members.", at.open_groups),
            ("buffer_oldest_age_seconds", "Age of the oldest sample held.", age),
            ("backpressure_active", "1 while a cap holds producers back.", at.backpressure),
            (
                "open_group_samples",
                "Samples of groups that lack members.",
                at.open_group_samples,
            ),
            ("pushes_held", "Pushes that wait for room.", at.pushes_held),
            ("pushes_held_bytes", "Payload bytes of pushes that wait.", at.pushes_held_bytes),
            ("samples_in_flight", "Samples of open steps.", at.in_flight),
            (
                "open_steps",
                "Steps planned, not committed, and open to ranks: at most --max-open-steps.",
                at.open_steps,
            ),
            (
                "steps_waiting",
                "Steps behind the open ones, which a rewind has brought back.",
                at.steps_waiting,
            ),
            (
                "steps_retained",
                "Committed steps that no saved checkpoint covers.",
                at.steps_retained,
            ),
            ("samples_retained", "Samples of retained steps.", at.samples_retained),
            (
                "retained_bytes",
                "Payload bytes of retained steps, on disk and in payload stores.",
                at.retained_bytes,
            ),
            ("objects_needed", "Objects of payload stores with live samples.", at.objects.needed),
            ("objects_needed_bytes", "Bytes of these objects.", at.objects.needed_bytes),
            ("objects_unneeded", "Objects that are to be released.", at.objects.unneeded),
            ("generation", "Process groups that have joined so far.", at.generation),
            ("dp_size", "DP ranks of the current process group.", at.dp_size),
            ("ranks_connected", "DP ranks connected.", at.ranks_connected),
            ("producers_connected", "Producers connected.", at.producers_connected),
            ("step_wanted", "1 while every rank has room for one more step.", at.wanted),
            (
                "steps_unjudged",
                "Steps committed with --max-staleness set and no policy version reported so far.",
                at.steps_unjudged,
            ),
            (
                "selection_bias_ratio",
                "Kolmogorov-Smirnov distance of lengths dispatched lately from all there were.",
                at.selection_bias,
            ),
            (
                "selection_bias_chance_ratio",
                "What chance alone keeps that distance below, in 95 % of all draws.",
                at.selection_bias_chance,
            ),
        ):
            yield GaugeMetricFamily(f"dispatcher_{name}", text, value=float(value))
        text = "Policy version last reported; absent before."
        yield _gauge_if_known("policy_version", text, at.policy_version)


def _step_mix(mix: StepMix | None) -> Iterator[Metric]:
    """Of single steps, over the last hundred; absent before the first."""
    for name, text, of in (
        (
            "long_sample_weight_ratio",
            "Weight under token-mean of a loss token of the longest 1 % of samples, mean token 1.",
            attrgetter("long_weight"),
        ),
        (
            "steps_without_long_samples_ratio",
            "Share of steps without any of the longest 1 % of samples.",
            attrgetter("without_long"),
        ),
        (
            "step_work_variation_ratio",
            "Standard deviation of the steps' planned work over its mean.",
            attrgetter("work_variation"),
        ),
        (
            "step_selection_bias_ratio",
            "Kolmogorov-Smirnov distance of a single step's lengths from all arrivals', mean.",
            attrgetter("ks_step"),
        ),
    ):
        yield _gauge_if_known(name, text, None if mix is None else of(mix))


def _gauge_if_known(name: str, text: str, value: float | None) -> Metric:
    """A gauge that is absent while there is no value."""
    family = GaugeMetricFamily(f"dispatcher_{name}", text, labels=())
    if value is not None:
        family.add_metric((), value)
    return family


class JournalCollector:
    """What the journal holds, and whether it can hold more."""

    def __init__(self, journal: "Journal") -> None:
        self._journal = journal

    def collect(self) -> Iterator[Metric]:
        """Every family of one snapshot."""
        at = self._journal.statistics()
        yield GaugeMetricFamily("dispatcher_journal_bytes", "Bytes on disk.", value=at.nbytes)
        yield GaugeMetricFamily(
            "dispatcher_journal_failing",
            "1 while nothing becomes durable: no room, or broken.",
            value=float(self._journal.failure is not None),
        )
        errors = CounterMetricFamily(
            "dispatcher_journal_errors",
            "Times that the journal had no room, or broke.",
            labels=["reason"],
        )
        for reason, count in at.errors.items():
            errors.add_metric([str(reason)], count)
        yield errors


class RecordCollector:
    """What is on record, and what could not be written."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterator[Metric]:
        """Both families."""
        yield GaugeMetricFamily(
            "dispatcher_recorded_bytes", "Bytes of the record on disk.", value=self._writer.nbytes
        )
        yield CounterMetricFamily(
            "dispatcher_record_errors",
            "Writes of the record that failed, and events that were lost before.",
            value=self._writer.errors,
        )


class SharedMemoryCollector:
    """What producers on this host have passed on as shared memory, and is held of it."""

    def __init__(self) -> None:
        #: None of it, until somebody says whose.
        self.watched = SharedMemory(0)

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        held = self.watched
        for name, text, value in (
            ("segments", "Pushes that are held as shared memory.", len(held)),
            ("bytes", "Bytes of these pushes, with samples that are done with.", held.nbytes),
            ("descriptors", "File descriptors that they take.", held.descriptors),
        ):
            yield GaugeMetricFamily(f"dispatcher_shared_memory_{name}", text, value=value)
        yield CounterMetricFamily(
            "dispatcher_shared_memory_copied_bytes",
            "Bytes that came as shared memory and were copied: the last samples of a push, or for "
            "want of descriptors.",
            value=held.copied_bytes,
        )


def _lengths(counts: LengthStatistics) -> Metric:
    buckets = [(f"{bound - 1:.1f}", below) for bound, below in counts.octaves]
    return HistogramMetricFamily(
        "dispatcher_sample_tokens",
        "Tokens of accepted samples.",
        [*buckets, ("+Inf", counts.samples)],
        float(counts.tokens),
    )
