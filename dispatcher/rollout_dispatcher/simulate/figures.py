"""The figures of one row of the table, summed up over its planned steps.

Selection bias is the Kolmogorov-Smirnov distance of dispatched lengths from those of the whole
trace, over every 20 consecutive dispatches. For comparison, the same of as many samples in order of
arrival.

Invariant: warm-up steps (negative numbers) count for the order of arrival alone. Ratios are ratios
of sums, so an expensive step has a larger weight.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from rollout_dispatcher.core.planning.planning import KEPT
from rollout_dispatcher.core.totals import LONGEST, StepMix, long_weight
from rollout_dispatcher.simulate.replay import Setting, VirtualStep
from rollout_dispatcher.simulate.result import RankTime, Run, Spread, TraceSummary
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

#: Consecutive dispatches over which selection bias is measured.
DISPATCHES = 20


class Figures:
    """Collects planned steps; `run` sums them up. kept: tokens of all samples not dropped."""

    def __init__(self, setting: Setting, kept: IntArray) -> None:
        self._setting = setting
        self._kept = kept
        self._arrived: list[int] = []
        # Decaying sums of arrived samples and of their loss tokens, as in `UsualLoss`.
        self._usual_sums = np.zeros(2)
        self._dispatched_before = 0
        self._counted: list[VirtualStep] = []
        self._usual: list[float] = []
        self._tokens: list[IntArray] = []
        self._dropped: Counter[str] = Counter()
        self.warm_up_steps = 0

    def add(self, step: VirtualStep) -> None:
        """Add a step; a negative number marks one of the warm-up."""
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

    def run(self, timing: RankTime | None) -> Run:
        """Sum up the counted steps; timing: of timed arrivals, or of a record."""
        steps, setting = self._counted, self._setting
        times = [self._times(at) for at in range(len(steps))]
        step_excess = [took / even - 1 if even else 0.0 for took, even, *_ in times]
        totals = (sum(each, 0.0) for each in zip(*times, strict=True))
        took, even, work, largest, bound, unpadded = totals
        even, work = even or 1.0, work or 1.0
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
            excess=took / even - 1,
            step_excess=Spread.of(step_excess),
            imbalance=largest / work - 1,
            # Bounds in a record are rounded to nine digits, maybe to slightly below the work.
            lower_bound=max(0.0, bound / even - 1),
            padding=work / (unpadded or 1.0) - 1,
            delay=Spread.of(skips),
            delays=np.bincount(skips).tolist(),
            small_steps=sum(len(each) < config.dispatch_batch_size for each in self._tokens),
            dropped=dict(self._dropped),
            triggers=dict(Counter(str(step.trigger) for step in steps)),
            ks=ks,
            ks_fifo=ks_fifo,
            mix=mix,
            plan_ms=1000 * float(np.median([step.seconds for step in steps])),
            timing=timing,
            long_weight_expected=expected,
            cost_errors={f"{each:g}": self._excess_if(each) for each in setting.cost_errors}
            if config.max_split == 1
            else {},
        )

    def _times(self, at: int) -> tuple[float, ...]:
        """Cost of a step: as planned, evenly, of the mean and the largest rank, its bound, and of
        the mean rank without padding.
        """
        made = self._counted[at].plan
        ranks = made.cost.sum(axis=1)
        own = float(self._setting.plan.cost(self._tokens[at]).sum())
        mean, even = float(ranks.mean()), made.even_time
        if made.cp_sizes is not None:  # the cost of splitting counts as lost, as waiting does
            mean = even = own / len(ranks)
        return made.time, even, mean, float(ranks.max()), made.lower_bound, own / len(ranks)

    def _excess_if(self, factor: float) -> float:
        """Excess of the same plans if the linear part of the cost were `factor` times as large."""
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


def summary(trace: Trace) -> TraceSummary:
    """The trace as the result has it."""
    return TraceSummary(trace.name, len(trace), trace.empty_rows, Spread.of(trace.tokens))


# -- selection bias ---------------------------------------------------------------------------


def selection_bias(
    trace: IntArray, dispatched: Sequence[IntArray], arrived: IntArray, before: int
) -> tuple[float, float]:
    """Mean distance from the trace's lengths, of the dispatched and of the arrived samples.

    trace: tokens of all samples. dispatched: tokens by step. arrived: tokens in order of arrival,
    the first `before` of them dispatched by steps that do not count.
    """
    lengths = Lengths(trace)
    sizes = [len(tokens) for tokens in dispatched]
    in_turn = np.split(arrived[before : before + sum(sizes)], np.cumsum(sizes)[:-1])
    ours = [lengths.distance(counts) for counts in _runs(list(map(lengths.counts, dispatched)))]
    by_chance = [lengths.distance(counts) for counts in _runs(list(map(lengths.counts, in_turn)))]
    return float(np.mean(ours)), float(np.mean(by_chance))


class Lengths:
    """The distribution of lengths of a trace, and the distance of others from it."""

    def __init__(self, trace: IntArray) -> None:
        self._lengths = np.unique(trace)
        self._whole = np.cumsum(self.counts(trace)) / len(trace)

    def counts(self, tokens: IntArray) -> IntArray:
        """Number of samples of each length of the trace."""
        at = np.searchsorted(self._lengths, tokens)
        return np.bincount(at, minlength=len(self._lengths)).astype(np.int64)

    def distance(self, counts: IntArray) -> float:
        """Kolmogorov-Smirnov distance of samples, by `counts`, from the trace."""
        return float(np.abs(np.cumsum(counts) / counts.sum() - self._whole).max())


def step_mix(
    trace: IntArray, steps: Sequence[IntArray], work: FloatArray, usual_loss: FloatArray
) -> tuple[StepMix, float]:
    """The mix, and `long_weight` under token-mean-expected.

    trace: tokens of all samples. steps: tokens of the samples of each. work: cost of each step.
    usual_loss: loss tokens of the mean arrival when each step was planned.
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
    """Counts over every DISPATCHES consecutive steps, or over all if there are fewer."""
    span = min(DISPATCHES, len(by_step))
    within: IntArray = np.stack(by_step[:span]).sum(axis=0)
    yield within
    for added, left in zip(by_step[span:], by_step[:-span], strict=True):
        within = within + added - left
        yield within
