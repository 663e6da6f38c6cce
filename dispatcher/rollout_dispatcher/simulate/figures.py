"""Figures: what was planned, step by step, becomes one row of the table.

Selection bias is the Kolmogorov-Smirnov distance of lengths that left from those of the whole
trace, over 20 dispatches, for every 20 consecutive ones there are; beside it what chance does: the
same for as many samples in the order in which they arrived.

Invariant: warm-up steps (negative numbers) count for nothing but the order in which samples
arrived. Sums come first, ratios after: an expensive step weighs what it costs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.core.planning.planning import KEPT
from rollout_dispatcher.core.totals import LONGEST, StepMix, long_weight
from rollout_dispatcher.simulate.replay import Clockwork, Setting, VirtualStep
from rollout_dispatcher.simulate.result import Run, Spread, Timing, TraceSummary
from rollout_dispatcher.simulate.trace import Trace
from rollout_planner.types import (
    FloatArray,
    IntArray,
    Layout,
    computed_lengths,
    even_time,
    step_time,
    summed,
)

#: Dispatches over which selection bias is measured.
DISPATCHES = 20


@dataclass(frozen=True, slots=True)
class _Times:
    """Of one step, in cost: what it takes, and would evenly, a rank's mean share, and so on."""

    step: float
    even: float
    mean: float
    largest: float
    bound: float
    unpadded: float


class Figures:
    """Takes steps as they are planned; `run` sums them up.

    kept: tokens of all samples that are not dropped.
    """

    def __init__(self, setting: Setting, kept: IntArray) -> None:
        self._setting = setting
        self._kept = kept
        self._arrived: list[int] = []
        # Samples as they arrive and their loss tokens, as `UsualLoss` sums them up.
        self._usual_sums = np.zeros(2)
        self._dispatched_before = 0
        self._counted: list[VirtualStep] = []
        self._usual: list[float] = []
        self._tokens: list[IntArray] = []
        self._dropped: Counter[str] = Counter()
        self.warm_up_steps = 0

    def add(self, step: VirtualStep) -> None:
        """One more step; a negative number marks one of the warm-up."""
        self._arrived += [sample.tokens for sample in step.arrived]
        loss_tokens = [sample.loss_tokens for sample in step.arrived]
        self._usual_sums = KEPT * self._usual_sums + (len(loss_tokens), sum(loss_tokens))
        if step.number < 0:
            self.warm_up_steps += 1
            self._dispatched_before += len(step.samples)
            return
        tokens = np.fromiter((sample.tokens for sample in step.samples), np.int64)
        self._counted.append(step)
        self._usual.append(float(self._usual_sums[1] / max(self._usual_sums[0], 1.0)))
        self._tokens.append(tokens)
        self._dropped.update(step.dropped.values())

    def run(self, clockwork: Clockwork | None) -> Run:
        """Sum up the counted steps."""
        steps, setting = self._counted, self._setting
        times = [self._times(at) for at in range(len(steps))]
        work = sum(each.mean for each in times) or 1.0
        even = sum(each.even for each in times) or 1.0
        excess = sum(each.step for each in times) / even - 1
        step_excess = [each.step / each.even - 1 if each.even else 0.0 for each in times]
        tokens = np.concatenate(self._tokens)
        skips = np.concatenate([step.skips for step in steps])
        config = setting.plan
        arrived = np.array(self._arrived, dtype=np.int64)
        work_of = np.array([float(step.plan.cost.sum()) for step in steps])
        ks, ks_fifo = selection_bias(self._kept, self._tokens, arrived, self._dispatched_before)
        mix, expected = step_mix(self._kept, self._tokens, work_of, np.array(self._usual))
        return Run(
            strategy=setting.name,
            window=setting.window,
            steps=len(steps),
            warm_up_steps=self.warm_up_steps,
            samples=len(tokens),
            excess=excess,
            step_excess=spread(step_excess),
            imbalance=sum(each.largest for each in times) / work - 1,
            # A record has bounds of nine digits, which may be a hair below the work itself.
            lower_bound=max(0.0, sum(each.bound for each in times) / even - 1),
            padding=work / (sum(each.unpadded for each in times) or 1.0) - 1,
            delay=spread(skips),
            delays=np.bincount(skips).tolist(),
            small_steps=sum(len(each) < config.dispatch_batch_size for each in self._tokens),
            dropped=dict(self._dropped),
            triggers=dict(Counter(str(step.trigger) for step in steps)),
            ks=ks,
            ks_fifo=ks_fifo,
            mix=mix,
            plan_ms=1000 * float(np.median([step.seconds for step in steps])),
            timing=_timing(clockwork),
            long_weight_expected=expected,
            cost_errors={f"{each:g}": self._excess_if(each) for each in setting.cost_errors}
            if config.max_split == 1
            else {},
        )

    def _times(self, at: int) -> _Times:
        made = self._counted[at].plan
        ranks = made.cost.sum(axis=1)
        own = float(self._setting.plan.cost(self._tokens[at]).sum())
        mean, even = float(ranks.mean()), made.even_time
        if made.cp_sizes is not None:  # what splitting costs is lost as well as waiting is
            mean = even = own / len(ranks)
        return _Times(
            step=made.time,
            even=even,
            mean=mean,
            largest=float(ranks.max()),
            bound=made.lower_bound,
            unpadded=own / made.cost.shape[0],
        )

    def _excess_if(self, factor: float) -> float:
        """Excess of the same plans, were the part of the cost that is proportional so much more."""
        config = self._setting.plan
        one, two, three = config.cost(np.array([1, 2, 3])).tolist()
        linear = (two - one - 1.5 * (three - 2 * two + one)) * (factor - 1)  # of a s^2 + b s: b
        took = even = 0.0
        for step, tokens in zip(self._counted, self._tokens, strict=True):
            plan = step.plan
            s = computed_lengths(
                tokens, plan.counts, padded=config.layout is Layout.PADDED,
                multiple=config.sample_length_multiple,
            )  # fmt: skip
            cost = summed(config.cost(s) + linear * s, plan.counts)
            took += step_time(cost, config.sync, config.pipeline_stages)
            even += even_time(cost, config.pipeline_stages)
        return took / (even or 1.0) - 1


def spread(values: IntArray | FloatArray | list[float]) -> Spread:
    """Mean, median, 99th percentile and maximum; zeros for no values."""
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0)
    median, p99 = np.percentile(values, (50, 99))
    return Spread(float(np.mean(values)), float(median), float(p99), float(np.max(values)))


def summary(trace: Trace) -> TraceSummary:
    """What a report says of the trace."""
    return TraceSummary(trace.name, len(trace), trace.empty_rows, spread(trace.tokens))


def _timing(clockwork: Clockwork | None) -> Timing | None:
    if clockwork is None:
        return None
    elapsed = clockwork.elapsed or 1.0
    of_data, of_stragglers = clockwork.of_data / elapsed, clockwork.of_stragglers / elapsed
    return Timing(
        elapsed=clockwork.elapsed,
        finished=clockwork.finished,
        busy=1 - of_data - of_stragglers,
        waiting_for_data=of_data,
        waiting_for_stragglers=of_stragglers,
        wait=spread(clockwork.waits),
    )


# -- selection bias ---------------------------------------------------------------------------


def selection_bias(
    trace: IntArray, dispatched: Sequence[IntArray], arrived: IntArray, before: int
) -> tuple[float, float]:
    """Mean distance from the trace's lengths, of what was dispatched and of what arrived.

    trace: tokens of all samples. dispatched: tokens, step by step. arrived: tokens in order of
    arrival, the first `before` of them dispatched by uncounted steps.
    """
    lengths = Lengths(trace)
    sizes = [len(tokens) for tokens in dispatched]
    in_turn = np.split(arrived[before : before + sum(sizes)], np.cumsum(sizes)[:-1])
    ours = [lengths.distance(counts) for counts in _runs(list(map(lengths.counts, dispatched)))]
    by_chance = [lengths.distance(counts) for counts in _runs(list(map(lengths.counts, in_turn)))]
    return float(np.mean(ours)), float(np.mean(by_chance))


class Lengths:
    """The lengths of a trace, and how far others are from them."""

    def __init__(self, trace: IntArray) -> None:
        self._lengths = np.unique(trace)
        self._whole = np.cumsum(self.counts(trace)) / len(trace)

    def counts(self, tokens: IntArray) -> IntArray:
        """How many there are of each length; all are among the trace's."""
        at = np.searchsorted(self._lengths, tokens)
        return np.bincount(at, minlength=len(self._lengths)).astype(np.int64)

    def distance(self, counts: IntArray) -> float:
        """Kolmogorov-Smirnov distance of so many from the trace."""
        return float(np.abs(np.cumsum(counts) / counts.sum() - self._whole).max())


def step_mix(
    trace: IntArray, steps: Sequence[IntArray], work: FloatArray, usual_loss: FloatArray
) -> tuple[StepMix, float]:
    """The mix, and `long_weight` under token-mean-expected.

    trace: tokens of all samples. steps: tokens of each one's. work: of each step, in cost.
    usual_loss: loss tokens of the mean arrival when it was planned.
    """
    lengths, rising = Lengths(trace), np.sort(trace)
    long = rising[min(int((1 - LONGEST) * len(rising)), len(rising) - 1)]
    loss = np.array([float((tokens - 1).sum()) for tokens in steps])
    of_long = np.array([float((tokens[tokens >= long] - 1).sum()) for tokens in steps])
    mix = StepMix.of(
        loss,
        of_long,
        with_long=np.array([bool((tokens >= long).any()) for tokens in steps]),
        work=work,
        distances=np.array([lengths.distance(lengths.counts(tokens)) for tokens in steps]),
    )
    return mix, long_weight(loss, of_long, divided_by=usual_loss * list(map(len, steps)))


def _runs(by_step: Sequence[IntArray]) -> Iterator[IntArray]:
    """Counts over every 20 consecutive steps, or over all if there are fewer."""
    span = min(DISPATCHES, len(by_step))
    within: IntArray = np.stack(by_step[:span]).sum(axis=0)
    yield within
    for added, left in zip(by_step[span:], by_step[:-span], strict=True):
        within = within + added - left
        yield within
