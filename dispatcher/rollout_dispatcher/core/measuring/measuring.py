"""Joins the DP ranks' reports of step times: a pass is measured once every rank has reported it.

    reports of a pass                     outcome
    by none, or by some ranks             waits for the others, while the step is one of the last
    by every rank of the generation       measured
    by one rank, of no use                unmeasured at once, with its reason
    by all, but some cannot separate      unmeasured; if ranks meet at every micro-step, the cost is
      waits                               fitted to the slowest rank's times
    not by all when the step is long past unmeasured
    by ranks of an older generation       unmeasured

Invariants: only passes that every DP rank has timed are used; memory is bounded by steps, passes
and planned micro-batches, whatever ranks report; no peer waits for a report.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_dispatcher.core.effects import Effect, SpeedsChanged, StepMeasured
from rollout_dispatcher.core.facts import AppendFact, SpeedsMeasured
from rollout_dispatcher.core.measuring.cost_in_use import CostInUse, CostStatistics, Timing, Work
from rollout_dispatcher.core.measuring.speeds import RankSpeeds
from rollout_dispatcher.core.measuring.times import Flaw, Pass, RankTimes, TimedStep, Unmeasured
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_planner.types import UPDATE, FloatArray, Sync

#: Steps that ranks may report on beside those that are open: times are known a step or two later.
KEPT_STEPS = 8
#: Passes that a rank may name in a run beside `update`, as their names are labels of metrics; each
#: rank has its own limit, so that one cannot use up the others'.
MAX_COST_KEYS = 8
#: Unmeasured passes in a row after which known speeds are forgotten.
FORGET_AFTER = 16


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredStatistics:
    """Measured times of a whole run.

    why: for people, why the last steps are not measured; empty if they are. steps: measured passes;
    unmeasured: others, by reason. last: the last pass of this generation that a step was judged by.
    slowness: float64[R], nan if not known; in_plans: slowness in plans, None while all are 1.
    totals: by pass, compute and wait of each rank: float64[2, R]. transport: by pass, further time
    of every rank inside collectives. All in seconds.
    """

    why: str
    steps: int
    unmeasured: Mapping[Unmeasured, int]
    last: StepMeasured | None
    slowness: FloatArray
    in_plans: tuple[float, ...] | None
    cost: CostStatistics
    totals: Mapping[str, FloatArray]
    transport: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """For people: times in seconds; the last measured step by rank."""
        return {
            "why_not": self.why,
            "measured_steps": self.steps,
            "unmeasured_steps": dict(self.unmeasured),
            "cost": self.cost.as_json(),
            "slowness_in_plans": self.in_plans or "no rank is surely slower than others",
            "last_step": None if self.last is None else self._step(self.last),
        }

    def _step(self, last: StepMeasured) -> dict[str, Any]:
        computed, waited = last.split.of_ranks
        transport = last.split.transport_s
        columns = {
            "compute_s": computed,
            "wait_s": waited,
            "collective_s": waited + transport,
            "slowness": self.slowness,
        }
        ranks = [
            {"dp_rank": at} | {name: _number(column[at]) for name, column in columns.items()}
            for at in range(len(computed))
        ]
        return {
            "step": last.step,
            "cost_key": last.cost_key,
            "lost_share": _number(last.lost),
            "straggler_excess": _number(last.excess),
            "imbalance": _number(last.imbalance),
            "transport_s": _number(transport),
            "ranks": ranks,
        }


class Measuring:
    """Times of recent steps. sync: where ranks wait for each other."""

    def __init__(
        self,
        ledger: StepLedger,
        sync: Sync,
        max_open_steps: int,
        cost: CostInUse,
        append_fact: AppendFact,
    ) -> None:
        self._ledger, self._sync, self._cost, self._append = ledger, sync, cost, append_fact
        self._kept = KEPT_STEPS + max_open_steps
        self._generation, self._dp_size = 0, 0
        self._steps: dict[int, TimedStep] = {}
        #: By rank: passes that it has named, beside `update`.
        self._named: defaultdict[int, set[str]] = defaultdict(set)
        #: By pass: the first step of this generation with a report of it.
        self._first: dict[str, int] = {}
        #: See `MeasuredStatistics`.
        self._totals: dict[str, FloatArray] = {}
        self._transport: defaultdict[str, float] = defaultdict(float)
        self._unmeasured = Counter(dict.fromkeys(Unmeasured, 0))
        self._measured = self._in_a_row = 0
        self._last: StepMeasured | None = None
        self._why = ""
        self._last_refused: tuple[int, str] | None = None
        self._forget()

    # -- events -----------------------------------------------------------------------------

    def committed(self, steps: Iterable[OpenStep]) -> None:
        """Every rank has applied these steps, and may report on them for a while."""
        self._check_generation()
        for step in steps:
            self._timed(step)
        while len(self._steps) > self._kept:
            self._expire(self._steps.pop(min(self._steps)))

    def on_times(self, dp_rank: int, times: RankTimes) -> list[Effect]:
        """A rank reported times; returns the measured pass once every rank has."""
        self._check_generation()
        timed = self._find(dp_rank, times)
        if timed is None or times.cost_key in timed.settled:
            return []
        flaw = times.flaw(timed.micro_batches)
        waited = flaw is not None and flaw.reason is Unmeasured.NOT_SEPARATED
        if flaw is not None and not (waited and self._sync is Sync.MICRO_STEP):
            text = f"DP rank {dp_rank} {flaw.text}"
            self._settle(timed, times.cost_key, Flaw(flaw.reason, text))
            return []
        known = timed.passes.get(times.cost_key)
        if known is None:
            known = timed.passes[times.cost_key] = Pass()
        known.report(dp_rank, times.busy, times.collective, times.why)
        return [] if len(known.busy) < self._dp_size else self._judge(timed, times.cost_key)

    def _find(self, dp_rank: int, times: RankTimes) -> TimedStep | None:
        """The step that a rank reports on; None, and counted, for a wrong step or pass."""
        timed, rank = self._steps.get(times.step), self._ledger.ranks[dp_rank]
        if timed is None:
            step = self._ledger.steps.find(times.step)
            if step is None or times.step > rank.prepared:
                self._refuse(times, Unmeasured.UNKNOWN_STEP, "a step that is long past or unknown")
                return None
            timed = self._timed(step)
        if not self._may_name(dp_rank, times.cost_key):
            self._refuse(times, Unmeasured.TOO_MANY_KEYS, f"one pass more than {MAX_COST_KEYS}")
            return None
        self._first.setdefault(times.cost_key, times.step)
        return timed

    def _may_name(self, dp_rank: int, cost_key: str) -> bool:
        if cost_key == UPDATE:
            return True
        named = self._named[dp_rank]
        if len(named) < MAX_COST_KEYS:
            named.add(cost_key)
        return cost_key in named

    def _timed(self, step: OpenStep) -> TimedStep:
        planned = step.planned_cost
        # A step with blocks is not used for fits: its times are not those of one rank's work.
        if planned is not None and (len(planned) != self._dp_size or step.cp_sizes):
            planned = None
        tokens = [entry.sample.tokens for entry in step.entries()]
        counts = [[len(part) for part in rank] for rank in step.micro_batches]
        slowness = np.ones(self._dp_size)
        if planned is not None and step.slowness is not None:
            slowness = np.array(step.slowness)
        timed = TimedStep(step.number, np.array(tokens), np.array(counts), planned, slowness)
        return self._steps.setdefault(step.number, timed)

    # -- results ----------------------------------------------------------------------------

    def _judge(self, timed: TimedStep, cost_key: str) -> list[Effect]:
        known = timed.passes[cost_key]
        split = known.split(self._dp_size)
        if isinstance(split, Flaw):
            self._settle(timed, cost_key, split)
            waited = split.reason is Unmeasured.NOT_SEPARATED
            if not waited or timed.planned is None or not self._leads(cost_key, timed.number):
                return []
            busy = np.array([known.busy[rank] for rank in range(self._dp_size)])
            work = self._cost.work(timed.tokens, timed.counts)
            return [*self._learn_cost(timed, work, busy, waited=True)]
        timed.settled.add(cost_key)
        del timed.passes[cost_key]
        leads, estimated = self._leads(cost_key, timed.number), None
        if timed.planned is not None:
            estimated = timed.planned / timed.slowness[:, None]
        if not leads or estimated is None:
            found = StepMeasured(timed.number, cost_key, leads, self._sync, split, estimated)
            self._add(found)
            return [found]
        work = self._cost.work(timed.tokens, timed.counts)
        fitted = self._cost.seconds(work)
        estimated = estimated if fitted is None else fitted
        found = StepMeasured(timed.number, cost_key, leads, self._sync, split, estimated)
        self._add(found)
        self._speeds.add(split.of_ranks[0], estimated)
        return [found, *self._learn_cost(timed, work, split.compute), *self._learn_speeds()]

    def _learn_cost(
        self, timed: TimedStep, work: Work, seconds: FloatArray, *, waited: bool = False
    ) -> Iterator[Effect]:
        """Report the cost in plans if it has changed."""
        assert timed.planned is not None, "other steps are not used for fits"
        step = Timing(
            work, timed.planned, seconds, timed.slowness, self._speeds.slowness, self._sync, waited
        )
        if (cost := self._cost.measured(step, self._ledger.steps.next_number)) is not None:
            self._append(cost.fitted)
            yield cost

    def _learn_speeds(self) -> Iterator[Effect]:
        """Report the speeds in plans if they have changed."""
        if not self._cost.adapts:
            return
        next_step, generation = self._ledger.steps.next_number, self._ledger.generation.number
        used = self._cost.slowness(generation) or (1.0,) * self._dp_size
        if (slowness := self._speeds.revised(used)) != used:
            speeds = SpeedsMeasured(generation, slowness, next_step)
            self._cost.speeds = speeds
            self._append(speeds)
            yield SpeedsChanged(speeds)

    def _add(self, found: StepMeasured) -> None:
        self._measured += 1
        split, before = found.split, self._totals.get(found.cost_key, 0.0)
        self._totals[found.cost_key] = before + split.of_ranks
        self._transport[found.cost_key] += split.transport_s
        if found.leads:
            self._last, self._why, self._in_a_row = found, "", 0

    def _leads(self, cost_key: str, step: int) -> bool:
        """Whether a step is judged by this pass: training, else the longest one.

        The passes are known once one step has been through all of them.
        """
        if UPDATE in self._first:
            return cost_key == UPDATE
        known = [key for key in self._totals if self._first.get(key, step) < step]
        return cost_key == max(known, key=lambda key: self._totals[key][0].sum(), default=None)

    def _settle(self, timed: TimedStep, cost_key: str, flaw: Flaw) -> None:
        timed.settled.add(cost_key)
        timed.passes.pop(cost_key, None)
        self._count(flaw.reason, f"step {timed.number}, {cost_key}: {flaw.text}")

    def _expire(self, timed: TimedStep) -> None:
        """The step is long past: count its open passes as unmeasured."""
        for cost_key, known in list(timed.passes.items()):
            flaw = Flaw(Unmeasured.INCOMPLETE, known.not_reported(self._dp_size))
            self._settle(timed, cost_key, flaw)
        if not timed.settled:
            text = f"no DP rank has reported what step {timed.number} took"
            self._count(Unmeasured.NOT_REPORTED, text)

    def _refuse(self, times: RankTimes, reason: Unmeasured, text: str) -> None:
        """Count a report of a wrong step or pass, once for all ranks that send the same."""
        if self._last_refused != (times.step, times.cost_key):
            self._last_refused = times.step, times.cost_key
            self._unmeasured[reason] += 1
            if self._last is None:
                self._why = f"step {times.step}, {times.cost_key}: {text}"

    def _count(self, reason: Unmeasured, text: str) -> None:
        self._unmeasured[reason] += 1
        self._in_a_row += 1
        self._why = text
        if self._in_a_row >= FORGET_AFTER:
            self._forget()

    def _forget(self) -> None:
        self._speeds = RankSpeeds(self._dp_size)

    def _check_generation(self) -> None:
        """In a new generation, expire open passes and forget speeds: machines may be others."""
        generation = self._ledger.generation
        if generation.number == self._generation:
            return
        for timed in self._steps.values():
            for cost_key in list(timed.passes):
                text = f"generation {self._generation} was over before all of it had reported"
                self._settle(timed, cost_key, Flaw(Unmeasured.GENERATION, text))
        self._steps.clear()
        self._first.clear()
        self._generation, self._last, self._why = generation.number, None, ""
        if generation.dp_size != self._dp_size:
            self._dp_size = generation.dp_size
            self._totals = {key: _resized(old, self._dp_size) for key, old in self._totals.items()}
        self._forget()

    # -- reading ----------------------------------------------------------------------------

    def statistics(self) -> MeasuredStatistics:
        """A frozen snapshot."""
        return MeasuredStatistics(
            why=self._explain(),
            steps=self._measured,
            unmeasured=dict(self._unmeasured),
            last=self._last,
            slowness=self._speeds.slowness,
            in_plans=self._cost.slowness(self._generation),
            cost=self._cost.statistics(),
            totals=dict(self._totals),
            transport=dict(self._transport),
        )

    def _explain(self) -> str:
        if self._why or self._last is not None:
            return self._why
        for timed in self._steps.values():
            for cost_key, known in timed.passes.items():
                missing = known.not_reported(self._dp_size)
                return f"step {timed.number}, {cost_key}: {missing} yet"
        if self._steps:
            return "no DP rank has reported what its steps took"
        return "no step is committed yet"


def _resized(seconds: FloatArray, dp_size: int) -> FloatArray:
    """The same for `dp_size` ranks: new ones begin at 0."""
    resized = np.zeros((len(seconds), dp_size))
    both = min(dp_size, seconds.shape[1])
    resized[:, :both] = seconds[:, :both]
    return resized


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)
