"""A recorded run: as a trace to simulate, as the row "as it ran", as columns over its steps and
ranks, and the fitted cost of its samples.

Invariant: all figures are of recorded plans and measured times; nothing is planned again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rollout_dispatcher.core.measuring.cost_in_use import (
    CostConfig,
    CostInUse,
    CostStatistics,
    Timing,
)
from rollout_dispatcher.core.measuring.speeds import lower_median
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import RecordedStep, Recording
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.simulate.figures import Figures
from rollout_dispatcher.simulate.replay import Setting, VirtualStep
from rollout_dispatcher.simulate.result import RankTime, Recorded
from rollout_dispatcher.simulate.trace import Trace, bare_sample
from rollout_planner.types import (
    FloatArray,
    IntArray,
    Plan,
    Sync,
    straggler_excess,
    straggler_waits,
)

#: The pass that a step is planned for; without it, the longest pass counts.
PLANNED_FOR = "update"


def trace_of(recording: Recording) -> Trace:
    """Every accepted sample, in order of its arrival. Raises ConfigError if there is none."""
    samples = sorted(recording.samples.values(), key=lambda sample: (sample.at, sample.ticket))
    if not samples:
        raise ConfigError(f"{recording.name}: nothing had arrived when this was recorded")
    numbers: dict[str, int] = {}
    groups = [
        -1 if sample.group is None else numbers.setdefault(sample.group, len(numbers))
        for sample in samples
    ]
    arrival = np.array([sample.at for sample in samples])
    return Trace(
        recording.name,
        np.arange(len(samples)),
        np.array([sample.tokens for sample in samples], dtype=np.int64),
        np.array(groups, dtype=np.int64),
        arrival - arrival[0],
    )


def trained_steps(recording: Recording) -> list[RecordedStep]:
    """Committed steps, in order. Raises ConfigError if there is none."""
    steps = recording.trained()
    if not steps:
        raise ConfigError(
            f"{recording.name}: no step was committed whose samples are all on record; let the "
            "run go on, or give it more --set record-bytes"
        )
    return steps


def durations(steps: list[RecordedStep]) -> list[float]:
    """Seconds that each step was in training: from when its last rank began to its commit.

    nan where a beginning is not recorded, as of steps that an earlier process had begun.
    """
    return [(step.committed or 0.0) - max(step.taken) if _began(step) else np.nan for step in steps]


def _began(step: RecordedStep) -> bool:
    """Whether the beginning of the step is recorded of every rank."""
    return bool(step.taken) and not np.isnan(step.taken).any()


# -- as it ran --------------------------------------------------------------------------------


def as_it_ran(recording: Recording, setting: Setting) -> Recorded:
    """The figures of the recorded steps. Raises ConfigError if none was committed."""
    steps = trained_steps(recording)
    figures = Figures(setting, trace_of(recording).tokens)
    waiting = sorted(recording.samples.values(), key=lambda sample: sample.at, reverse=True)
    for number, step in enumerate(steps):
        arrived = []
        while waiting and waiting[-1].at <= step.at:
            arrived.append(bare_sample("", waiting.pop().tokens))
        figures.add(_virtual(recording, step, number, setting, tuple(arrived)))
    took = durations(steps)
    measured = [excess_of(step, setting) for step in steps]
    known = [
        (excess, seconds)
        for excess, seconds in zip(measured, took, strict=True)
        if excess is not None
    ]
    run = replace(figures.run(_rank_time(recording, steps, took, measured)), strategy="as it ran")
    return Recorded(
        run=replace(run, dropped=dict(recording.dropped)),
        began=steps[0].at,
        measured=_mean_excess(known) if known else None,
        measured_steps=len(known),
    )


def main_pass(step: RecordedStep) -> FloatArray | None:
    """float64[R, M], seconds that ranks computed in the pass that steps are planned for.

    None unless all ranks measured it.
    """
    found = {key: times.compute(step.dp_size) for key, times in step.measured.items()}
    there = {key: compute for key, compute in found.items() if compute is not None}
    if not there or PLANNED_FOR in there:
        return there.get(PLANNED_FOR)
    return max(there.values(), key=lambda each: float(each.sum()))


def excess_of(step: RecordedStep, setting: Setting) -> float | None:
    """Straggler excess of measured compute times; None unless all ranks measured them."""
    compute = main_pass(step)
    if compute is None:
        return None
    return straggler_excess(compute, setting.plan.sync)


def trainer_load(recording: Recording, setting: Setting) -> float | None:
    """The speed of the trainer as a value of `--trainer-load`; None if it is not known."""
    steps = recording.trained()
    plans = [_plan(recording, step, setting) for step in steps]
    rates = [
        seconds / plan.time
        for plan, seconds in zip(plans, durations(steps), strict=True)
        if plan.time > 0 and seconds > 0
    ]
    if not rates:
        return None
    trace = trace_of(recording)
    total, span = float(setting.plan.cost(trace.tokens).sum()), float(np.ptp(trace.arrival))
    if span <= 0:
        return None
    return float(np.median(rates)) * total / (span * setting.plan.dp_size)


def _virtual(
    recording: Recording,
    step: RecordedStep,
    number: int,
    setting: Setting,
    arrived: tuple[Sample, ...],
) -> VirtualStep:
    tokens = (recording.samples[step.run, ticket].tokens for ticket in step.tickets)
    known = {trigger.value: trigger for trigger in Trigger}
    return VirtualStep(
        number=number,
        at=step.at,
        plan=_plan(recording, step, setting),
        samples=tuple(bare_sample("", each) for each in tokens),
        arrived=arrived,
        skips=np.array(step.skips, dtype=np.int64),
        trigger=known.get(step.trigger, Trigger.WINDOW_FULL),
        seconds=0.0,
        dropped={},
    )


def _plan(recording: Recording, step: RecordedStep, setting: Setting) -> Plan:
    """The recorded plan, of a window with no other samples, in units of the setting's cost.

    Recorded costs are in units of the cost that was in use: another one once a fit replaced it.
    """
    tokens, counts = _laid_out(recording, step)
    unit = 1.0
    if step.cp_sizes is None:  # costs of split samples have what splitting adds, and are not fitted
        own = CostInUse(setting.core.cost).work(tokens, counts).prior.sum()
        unit = float(own) / (float(step.cost.sum()) or 1.0)
    return Plan(
        chosen=np.arange(len(step.tickets)),
        counts=counts,
        cost=step.cost * unit,
        sync=setting.plan.sync,
        fifo_imbalance=step.fifo_imbalance,
        fifo_excess=step.fifo_excess,
        lower_bound=step.lower_bound * unit,
        pipeline_stages=setting.plan.pipeline_stages,
        cp_sizes=None if step.cp_sizes is None else np.array(step.cp_sizes),
    )


def _rank_time(
    recording: Recording,
    steps: list[RecordedStep],
    took: list[float],
    measured: list[float | None],
) -> RankTime | None:
    """Rank time by cause; waiting for stragglers as measured or else as planned.

    As in a simulation, ranks are in a step or wait for one: optimizer, weight syncs and other time
    between steps are left out.
    """
    began = [min(step.taken) for step in steps if _began(step)]
    if not began:
        return None
    first, last = min(began), max(step.committed or 0.0 for step in steps)
    ranks = max(step.dp_size for step in steps)
    waited = float(_waiting_for_data(recording, max(ranks, 1), first, last).sum())
    of_stragglers = 0.0
    for step, seconds, found in zip(steps, took, measured, strict=True):
        excess = step.excess if found is None else found
        of_stragglers += (0.0 if np.isnan(seconds) else seconds) * excess / (1 + excess)
    samples = recording.samples
    waits = [step.at - samples[step.run, ticket].at for step in steps for ticket in step.tickets]
    origin = min(sample.at for sample in samples.values())
    of_data = min(waited / ranks, last - first)
    elapsed = float(np.nansum(took)) + of_data
    return RankTime.of(elapsed, last - origin, of_data, of_stragglers, waits)


def _waiting_for_data(recording: Recording, ranks: int, first: float, last: float) -> FloatArray:
    """float64[R], seconds that each rank waited for a step, between two times."""
    waited = np.zeros(ranks)
    for wait in recording.waits:
        if wait.rank < ranks:
            waited[wait.rank] += max(0.0, min(wait.at + wait.seconds, last) - max(wait.at, first))
    return waited


def _mean_excess(known: list[tuple[float, float]]) -> float:
    """Excess of all steps together: their time, over that of an even split."""
    took = [0.0 if np.isnan(seconds) else seconds for _, seconds in known]
    weights = took if sum(took) > 0 else [1.0] * len(known)
    even = sum(weight / (1 + excess) for (excess, _), weight in zip(known, weights, strict=True))
    return sum(weights) / even - 1


# -- columns over steps and ranks -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """Columns over the trained steps, in order; nan where something is not recorded.

    at: time of the plan, seconds since the first. took: seconds in training. fifo, planned,
    measured, bound: straggler excess. fill: eligible samples over a full window. stale: mean
    staleness.
    """

    at: FloatArray
    took: FloatArray
    fifo: FloatArray
    planned: FloatArray
    measured: FloatArray
    bound: FloatArray
    fill: FloatArray
    stale: FloatArray

    @classmethod
    def of(cls, steps: list[RecordedStep], setting: Setting) -> "Course":
        """The columns of these steps; there has to be one."""
        found = [excess_of(step, setting) for step in steps]
        batch = setting.plan.dispatch_batch_size  # samples, also where steps count groups
        stale = [np.mean(step.staleness) if step.staleness else np.nan for step in steps]
        return cls(
            at=np.array([step.at - steps[0].at for step in steps]),
            took=np.array(durations(steps)),
            fifo=np.array([step.fifo_excess for step in steps]),
            planned=np.array([step.excess for step in steps]),
            measured=np.array([np.nan if excess is None else excess for excess in found]),
            bound=np.array([step.lower_bound_excess for step in steps]),
            fill=np.array(
                # The window at that time: --window may change while the run goes on.
                [step.eligible / int(batch * step.window_multiple) for step in steps]
            ),
            stale=np.array(stale, dtype=np.float64),
        )

    def lost(self, excess: FloatArray) -> float | None:
        """Share of trainer time lost to stragglers, each step weighted by its duration."""
        known = ~np.isnan(excess) & ~np.isnan(self.took)
        if not known.any() or self.took[known].sum() <= 0:
            return float(np.nanmean(lost_share(excess))) if (~np.isnan(excess)).any() else None
        return float(np.average(lost_share(excess[known]), weights=self.took[known]))


def lost_share(excess: FloatArray) -> FloatArray:
    """Share of the whole time; excess is over the work alone."""
    share: FloatArray = excess / (1 + excess)
    return share


@dataclass(frozen=True, slots=True)
class RankShare:
    """Seconds of one DP rank from the first step to the last: at work, waiting for other ranks,
    waiting for data; the rest is not measured.
    """

    rank: int
    work: float
    stragglers: float
    data: float
    elapsed: float
    steps: int
    measured_steps: int

    @property
    def shares(self) -> tuple[float, float, float]:
        """Work, stragglers, data, over all of the time."""
        whole = self.elapsed or 1.0
        return self.work / whole, self.stragglers / whole, self.data / whole


def rank_shares(
    recording: Recording, steps: list[RecordedStep], setting: Setting
) -> list[RankShare]:
    """One row for each rank, over the steps with the last number of DP ranks.

    Empty if ranks measured no step.
    """
    ranks = steps[-1].dp_size
    timed = [
        step
        for step, seconds in zip(steps, durations(steps), strict=True)
        if step.dp_size == ranks and seconds > 0
    ]
    found = (_measured_work(step, setting.plan.sync) for step in timed)
    measured = [each for each in found if each is not None]
    if not measured:
        return []
    work, stragglers = (np.sum(each, axis=0) for each in zip(*measured, strict=True))
    first = min(min(step.taken) for step in timed)
    last = max(step.committed or 0.0 for step in timed)
    data = _waiting_for_data(recording, ranks, first, last)
    return [
        RankShare(
            rank, float(work[rank]), float(stragglers[rank]), float(data[rank]),
            last - first, steps=len(timed), measured_steps=len(measured),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def slowness(steps: list[RecordedStep]) -> FloatArray | None:
    """float64[R]: seconds per unit of planned cost, over the median rank's.

    The median is that of the metrics: of an even number, the faster of the two in the middle.
    None if it was not measured, or the number of DP ranks has changed.
    """
    found = [
        (compute, step.cost / step.slowness[:, None])
        for step in steps
        if (compute := main_pass(step)) is not None
    ]
    if not found or len({len(compute) for compute, _ in found}) != 1:
        return None
    seconds = _by_rank(compute for compute, _ in found)
    rates = seconds / np.maximum(_by_rank(planned for _, planned in found), 1e-300)
    middle = float(lower_median(rates))
    return rates / middle if middle > 0 else None


def _by_rank(times: Iterable[FloatArray]) -> FloatArray:
    """float64[R], the sums of float64[R, M] each."""
    total: FloatArray = np.sum([each.sum(axis=1) for each in times], axis=0)
    return total


def _measured_work(step: RecordedStep, sync: Sync) -> tuple[FloatArray, FloatArray] | None:
    """Seconds of computing and of waiting for slower ranks, of each rank over all passes."""
    if main_pass(step) is None:
        return None
    computed = [times.compute(step.dp_size) for times in step.measured.values()]
    known = [compute for compute in computed if compute is not None]
    waits: FloatArray = np.sum([straggler_waits(each, sync) for each in known], axis=0)
    return _by_rank(known), waits


def _laid_out(recording: Recording, step: RecordedStep) -> tuple[IntArray, IntArray]:
    """Tokens of the step's samples, int64[n], and samples of each micro-batch, int64[R, M]."""
    tokens = [recording.samples[step.run, ticket].tokens for ticket in step.tickets]
    counts = [[len(part) for part in rank] for rank in step.micro_batches]
    return np.array(tokens, dtype=np.int64), np.array(counts, dtype=np.int64)


# -- the cost of its samples ------------------------------------------------------------------


def fitted_cost(recording: Recording, config: CostConfig) -> tuple[CostStatistics, int]:
    """The cost fitted to measured micro-batches, and the number of measured steps.

    config: the prior of the fit.
    """
    cost, steps = CostInUse(config), recording.trained()
    slow = slowness(steps)
    timings = [(step.number, _timing(recording, step, cost, slow)) for step in steps]
    measured = [(number, timing) for number, timing in timings if timing is not None]
    for number, timing in measured:
        cost.measured(timing, number + 1)
    return cost.statistics(), len(measured)


def _timing(
    recording: Recording, step: RecordedStep, cost: CostInUse, slow: FloatArray | None
) -> Timing | None:
    compute = main_pass(step)
    if compute is None or step.cp_sizes is not None:
        return None
    return Timing(
        cost.work(*_laid_out(recording, step)), step.cost, compute, step.slowness,
        np.ones(step.dp_size) if slow is None else slow, step.sync,
    )  # fmt: skip
