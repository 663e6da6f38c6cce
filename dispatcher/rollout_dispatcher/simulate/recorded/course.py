"""How a recorded run went, as columns over its steps and its ranks: what pages and traces show."""

from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.core.measuring.speeds import lower_median
from rollout_dispatcher.core.measuring.times import Pass
from rollout_dispatcher.record.recording import RecordedStep, Recording
from rollout_dispatcher.simulate.recorded.arrivals import durations
from rollout_dispatcher.simulate.recorded.as_it_ran import excess_of, main_pass
from rollout_dispatcher.simulate.replay.virtual import Setting
from rollout_planner.types import FloatArray, Sync


@dataclass(frozen=True, slots=True)
class Course:
    """Columns over the trained steps, in order; nan where something was not seen.

    at: when planned, seconds since the first. took: seconds in training. fifo, planned, measured,
    bound: straggler excess. fill: eligible samples over a full window. stale: mean versions.
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
        window = setting.core.trigger.window
        stale = [np.mean(step.staleness) if step.staleness else np.nan for step in steps]
        return cls(
            at=np.array([step.at - steps[0].at for step in steps]),
            took=np.array(durations(steps)),
            fifo=np.array([step.fifo_excess for step in steps]),
            planned=np.array([step.excess for step in steps]),
            measured=np.array([np.nan if excess is None else excess for excess in found]),
            bound=np.array([step.lower_bound_excess for step in steps]),
            fill=np.array(
                # The window of its own time: --window-multiple may change while it serves.
                [step.eligible / window * setting.window / step.window_multiple for step in steps]
            ),
            stale=np.array(stale, dtype=np.float64),
        )

    def lost(self, excess: FloatArray) -> float | None:
        """Share of trainer time lost to waiting for stragglers, each step by what it took."""
        known = ~np.isnan(excess) & ~np.isnan(self.took)
        if not known.any() or self.took[known].sum() <= 0:
            return float(np.nanmean(lost_share(excess))) if (~np.isnan(excess)).any() else None
        return float(np.average(lost_share(excess[known]), weights=self.took[known]))


def lost_share(excess: FloatArray) -> FloatArray:
    """Of the whole time, where the excess is over the work itself."""
    share: FloatArray = excess / (1 + excess)
    return share


@dataclass(frozen=True, slots=True)
class RankShare:
    """One DP rank, in seconds of the time from the first step to the last: at work, waiting for
    other ranks, for data, and what nobody told. Of so many steps, work and stragglers are measured
    by the rank; of the others they are by the plans' costs.
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
    """Each rank of the last number of DP ranks, over the steps that had that many."""
    ranks = steps[-1].dp_size
    timed = [
        (step, seconds)
        for step, seconds in zip(steps, durations(steps), strict=True)
        if step.dp_size == ranks and seconds > 0
    ]
    if not timed:
        return []
    work, stragglers = np.zeros(ranks), np.zeros(ranks)
    measured = 0
    for step, seconds in timed:
        found = _measured_work(step, setting.plan.sync)
        measured += found is not None
        busy, lost = _planned_work(step, seconds, setting) if found is None else found
        work += busy
        stragglers += lost
    first = min(min(step.taken) for step, _ in timed)
    last = max(step.committed or 0.0 for step, _ in timed)
    data = np.zeros(ranks)
    for wait in recording.waits:
        if wait.rank < ranks:
            data[wait.rank] += max(0.0, min(wait.at + wait.seconds, last) - max(wait.at, first))
    return [
        RankShare(
            rank, float(work[rank]), float(stragglers[rank]), float(data[rank]),
            last - first, steps=len(timed), measured_steps=measured,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def slowness(steps: list[RecordedStep]) -> FloatArray | None:
    """float64[R]: seconds a unit of planned cost, over the median rank's; 1 is as the median.

    The median that metrics have: of an even number the faster one in the middle.
    None where it was not measured, or the number of DP ranks has changed.
    """
    found = [
        (compute, step.cost / step.slowness[:, None])
        for step in steps
        if (compute := main_pass(step)) is not None
    ]
    if not found or len({len(compute) for compute, _ in found}) != 1:
        return None
    seconds = sum((compute.sum(axis=1) for compute, _ in found), np.zeros(len(found[0][0])))
    cost = sum((planned.sum(axis=1) for _, planned in found), np.zeros(len(found[0][1])))
    rates = seconds / np.maximum(cost, 1e-300)
    middle = float(lower_median(rates))
    return rates / middle if middle > 0 else None


def _measured_work(step: RecordedStep, sync: Sync) -> tuple[FloatArray, FloatArray] | None:
    """Seconds of computing and of waiting for slower ranks, of each rank over all passes."""
    found: list[Pass] = list(step.measured.values())
    computed = [times.compute(step.dp_size) for times in found]
    known = [compute for compute in computed if compute is not None]
    if not known or main_pass(step) is None:
        return None
    work = sum((compute.sum(axis=1) for compute in known), np.zeros(step.dp_size))
    lost = sum((_behind(compute, sync) for compute in known), np.zeros(step.dp_size))
    return work, lost


def _planned_work(
    step: RecordedStep, seconds: float, setting: Setting
) -> tuple[FloatArray, FloatArray]:
    """The same by the plan's costs, scaled to the time that the step took."""
    work, lost = step.cost.sum(axis=1), _behind(step.cost, setting.plan.sync)
    scale = seconds / float((work + lost).max() or 1.0)
    return work * scale, lost * scale


def _behind(cost: FloatArray, sync: Sync) -> FloatArray:
    """What each rank waits for slower ones, of cost[R, M]."""
    if sync is Sync.STEP:
        ranks = cost.sum(axis=1)
        behind: FloatArray = ranks.max() - ranks
    else:
        behind = (cost.max(axis=0) - cost).sum(axis=1)
    return behind
