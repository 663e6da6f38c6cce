"""The events of samples and steps, for the record of a run.

The shell reports events here. The class never affects the service; without a record it keeps
nothing. Invariant: it keeps times of at most `MAX_STEPS` steps, the newest. Times are the core's
clock.

`rollout_dispatcher.record` lists the fields of each event: nothing of a payload, and no id that a
user gave. What occurs for each sample or rank is written as one event a plan, a commit, a second.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.record.writer import RecordWriter
from rollout_planner.types import Plan

MAX_STEPS = 64
#: Seconds after which the ranks' time is written though nothing else has changed.
SPENT_SECONDS = 10.0
#: Digits after the point: microseconds.
_TIME_DIGITS = 6
#: Samples, and reports of times, that one event holds.
_MOST_AN_EVENT = 1024
#: Costs beyond this are rounded to whole numbers.
_LARGE = 1e6
#: Numbers that the record has of a planned sample: ticket, skips, staleness, a share of sizes.
_NUMBERS_A_PLANNED_SAMPLE = 4


@dataclass(slots=True)
class _Step:
    """A planned step. taken, done: when each rank began to train it, and committed it.

    attempt: how often it was planned.
    """

    number: int
    dp_size: int
    attempt: int = 1
    taken: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)


class StepTrace:
    """Writes the events of one run.

    writer: None: nothing is recorded. origin: the time that the record counts from.
    """

    def __init__(
        self, clock: Callable[[], float], writer: RecordWriter | None = None, origin: float = 0.0
    ) -> None:
        self._clock, self._writer, self._origin = clock, writer, origin
        self._steps: dict[int, _Step] = {}
        #: Not written yet: accepted samples and their pushes, waits of ranks, and reported times.
        self._entries: list[Entry] = []
        self._pushes: list[tuple[float, int]] = []
        self._waits: list[tuple[int, float, float]] = []
        self._times: defaultdict[tuple[int, str], list[tuple[int, RankTimes]]] = defaultdict(list)
        self._state: dict[str, int] = {}
        self._spent: dict[str, float] = {}
        self._state_at = -inf

    # -- samples ----------------------------------------------------------------------------

    def accepted(self, effect: e.SamplesAccepted) -> None:
        """Samples were accepted; their tickets follow those of the samples before."""
        if self._writer is not None:
            self._entries += effect.entries
            self._pushes.append((self._at(effect.entries[0].arrived), len(effect.entries)))
            if len(self._entries) >= _MOST_AN_EVENT:
                self._put_accepted()

    def _put_accepted(self) -> None:
        entries, pushes = self._entries, self._pushes
        if not entries:
            return
        self._entries, self._pushes = [], []
        samples = [entry.sample for entry in entries]
        event: dict[str, Any] = {
            "first": entries[0].ticket,
            "pushes": pushes,
            "tokens": [sample.tokens for sample in samples],
            "loss": [sample.loss_tokens for sample in samples],
        }
        groups = [entry.group for entry in entries]
        if max(groups) >= 0:
            event["group"] = groups
        versions = [sample.policy_version for sample in samples]
        if versions.count(versions[0]) < len(versions):
            event["version"] = versions
        elif versions[0] is not None:
            event["version"] = versions[0]
        self._put("accepted", entries[-1].arrived, 4 * len(entries) + len(pushes), **event)

    def dropped(self, effect: e.SamplesDropped) -> None:
        """Accepted samples were dropped."""
        if self._writer is not None:
            for reason, entries in effect.dropped.items():
                tickets = [entry.ticket for entry in entries]
                self._put("dropped", None, len(tickets), reason=str(reason), tickets=tickets)

    def policy_reported(self, effect: e.PolicyReported) -> None:
        """The trainer reported another policy version."""
        self._put("version", version=effect.policy_version)

    def configured(self, settings: Mapping[str, object]) -> None:
        """Options changed while serving; settings: all that may change."""
        self._put("settings", None, len(settings), config=settings)

    # -- plans ------------------------------------------------------------------------------

    def planned(
        self, wanted: e.PlanRequested, effects: Sequence[e.Effect], now: float, generation: int
    ) -> None:
        """The core used a plan, if its effects have a planned step."""
        if self._writer is None:
            return
        for report in effects:
            if not isinstance(report, e.StepPlanned):
                continue
            plan, eligible = report.plan, len(wanted.entries)
            self._steps[report.step] = _Step(report.step, len(plan.cost))
            if len(self._steps) > MAX_STEPS:
                del self._steps[next(iter(self._steps))]
            self._put_accepted()
            chosen: dict[str, Any] = {"trigger": str(report.trigger), "eligible": eligible}
            if report.skips.any():
                chosen["skips"] = report.skips.tolist()
            if stale := report.staleness:
                is_one = stale.count(stale[0]) == len(report.tokens)
                chosen["staleness"] = stale[0] if is_one else stale
            self._put_plan(
                report.step, 1, plan, now, entries=report.entries, sizes=plan.counts.tolist(),
                generation=generation, **chosen,
            )  # fmt: skip

    def replanned(self, step: OpenStep, plan: Plan, now: float, generation: int) -> None:
        """An open step has another plan, and other samples if it has lost some."""
        attempt = 2
        if (seen := self._steps.get(step.number)) is not None:
            seen.dp_size = len(plan.cost)
            seen.attempt += 1
            attempt = seen.attempt
        if self._writer is not None:
            sizes = [list(map(len, rank)) for rank in step.micro_batches]
            self._put_plan(
                step.number, attempt, plan, now,
                entries=[*step.entries()], sizes=sizes, generation=generation,
            )  # fmt: skip

    def _put_plan(
        self,
        step: int,
        attempt: int,
        plan: Plan,
        now: float,
        *,
        entries: Sequence[Entry],
        sizes: list[list[int]],
        **others: Any,
    ) -> None:
        first = entries[0].ticket  # small numbers take less time to write, and less room
        self._put(
            "planned",
            now,
            _NUMBERS_A_PLANNED_SAMPLE * len(entries),
            step=step,
            attempt=attempt,
            **others,
            first=first,
            tickets=[entry.ticket - first for entry in entries],
            sizes=sizes,
            cost=(np.rint(plan.cost) if plan.cost.max() > _LARGE else plan.cost).tolist(),
            fifo_excess=plan.fifo_excess,
            fifo_imbalance=plan.fifo_imbalance,
            lower_bound=plan.lower_bound,
            **({} if plan.slowness is None else {"slowness": list(plan.slowness)}),
            **({} if plan.cp_sizes is None else {"cp_sizes": plan.cp_sizes.tolist()}),
        )

    def withdrawn(self, step: int) -> None:
        """No sample of a step is left; reported once more for a rank that reconnects."""
        if self._steps.pop(step, None) is not None:
            self._put("withdrawn", step=step)

    # -- steps on their way -----------------------------------------------------------------

    def released(self, step: int) -> None:
        """Every rank may train it; reported once more for a rank that reconnects."""
        self._put("released", step=step)

    def taken(self, dp_rank: int, step: int, now: float) -> None:
        """A rank's training loop has begun this step; -1: none yet."""
        if (seen := self._steps.get(step)) is not None:
            seen.taken.setdefault(dp_rank, now)

    def rank_commits(self, dp_rank: int, through: int, now: float) -> None:
        """A rank has applied every step up to that one."""
        for seen in reversed(self._steps.values()):
            if seen.number <= through:
                if dp_rank in seen.done:
                    return  # and in those before it
                seen.done[dp_rank] = now

    def committed(self, step: int) -> None:
        """Every rank has applied a step, which an earlier process may have planned."""
        columns: dict[str, list[float | None]] = {}
        if (seen := self._steps.get(step)) is not None:
            for name, times in (("taken", seen.taken), ("done", seen.done)):
                known = {rank: self._at(at) for rank, at in times.items()}
                columns[name] = [known.get(rank) for rank in range(seen.dp_size)]
        self._put("committed", None, sum(map(len, columns.values())), step=step, **columns)

    def redelivered(self, effect: e.Redelivered) -> None:
        """A step is delivered again: to a rank that reconnects, or to all, who train it anew."""
        seen = self._steps.get(effect.step)
        if seen is not None and effect.reason != "reconnect":
            seen.taken.clear()
            seen.done.clear()
        self._put_measured()
        self._put("redelivered", step=effect.step, reason=effect.reason)

    def waited(self, dp_rank: int, since: float, seconds: float) -> None:
        """A rank's training loop waited for a step."""
        if self._writer is not None:
            self._waits.append((dp_rank, self._at(since), round(seconds, _TIME_DIGITS)))

    def measured(self, dp_rank: int, times: RankTimes) -> None:
        """A rank reported times of micro-batches; its first report of a pass counts."""
        if self._writer is not None:
            reports = self._times[times.step, times.cost_key]
            reports.append((dp_rank, times))
            if len(reports) >= _MOST_AN_EVENT:
                self._put_measured()

    def _put_measured(self) -> None:
        for (step, cost_key), reports in self._times.items():
            why = [times.why for _, times in reports if times.why][-1:]
            self._put(
                "measured", None, sum(2 * len(times.busy) for _, times in reports),
                step=step, cost_key=cost_key, ranks=[dp_rank for dp_rank, _ in reports],
                busy=[times.busy for _, times in reports],
                collective=[times.collective for _, times in reports],
                **({"why": why[0]} if why else {}),
            )  # fmt: skip
        self._times.clear()

    # -- once a second ----------------------------------------------------------------------

    def flush(self) -> None:
        """Write the samples, waits and times that were reported since the last call."""
        self._put_accepted()
        self._put_measured()
        if self._waits:
            ranks, since, seconds = zip(*self._waits, strict=True)
            self._put("waited", None, 3 * len(ranks), ranks=ranks, since=since, seconds=seconds)
            self._waits = []

    def record_state(self, statistics: Callable[[], Statistics]) -> None:
        """Flush; write how many samples are held if that changed, and the ranks' time at times."""
        if self._writer is None:
            return
        self.flush()
        at, now = statistics(), self._clock()
        state = {
            "buffered": at.buffered,
            "ready": at.ready,
            "in_flight": at.in_flight,
            "held_pushes": at.pushes_held,
        }
        spent: dict[str, float] = {
            cause: round(seconds, 1) for cause, seconds in at.rank_time.items() if seconds
        }
        is_due = spent != self._spent and now >= self._state_at + SPENT_SECONDS
        if state != self._state or is_due:
            self._state, self._spent, self._state_at = state, spent, now
            self._put("state", now, **state, rank_time=spent)

    def _put(self, name: str, now: float | None = None, numbers: int = 1, /, **what: Any) -> None:
        """Write an event, if anything is recorded. now: None: the clock's time."""
        if self._writer is not None:
            at = self._at(self._clock() if now is None else now)
            self._writer.put({"event": name, "at": at, **what}, numbers + len(what))

    def _at(self, moment: float) -> float:
        return round(moment - self._origin, _TIME_DIGITS)
