"""What becomes of samples and steps as they go, for the record.

The shell tells it beside what it does; nothing that happens depends on it, and without a record
nothing is remembered. Invariant: at most `MAX_STEPS` are, whatever becomes of them; the oldest are
forgotten first. Times are the core's clock.

The docstring of `record` says what each event has: nothing of a payload, and no id that a user
gave. What is told a sample at a time or a rank at a time is put together first: one event a plan, a
commit, a second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.measuring.times import Pass, RankTimes
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.sample import Sample
from rollout_planner.types import FloatArray, Plan

MAX_STEPS = 64
#: Where the ranks' time went is written so often though nothing else changes.
SPENT_SECONDS = 10.0
#: Passes over a step of which a rank's times are remembered.
MAX_COST_KEYS = 8
#: Digits after the point: microseconds of times, and of costs and ratios as many as are meant.
_TIME_DIGITS = 6
_COST_DIGITS = 7
#: Samples that come in within a second are one event, unless there are more than this.
_SAMPLES_AN_EVENT = 1024
#: In place of a group's number.
_NO_GROUP = -1
#: Costs beyond this are rounded to whole numbers.
_LARGE = 1e6
#: Its ticket, its skips, its staleness, and its share of what its micro-batch has.
_NUMBERS_A_PLANNED_SAMPLE = 4
#: The cheapest ways to a column of many entries, and of many samples, which are tuples.
_SAMPLE, _GROUP, _TICKET = attrgetter("sample"), attrgetter("group"), attrgetter("ticket")
_TOKENS, _LOSS_TOKENS, _VERSION = (
    itemgetter(Sample._fields.index(name)) for name in ("tokens", "loss_tokens", "policy_version")
)


@dataclass(slots=True)
class SeenStep:
    """One step. shape: DP ranks, and micro-batches of each.

    attempt: how often it was planned. delivered, taken, done: when each rank was given its last
    micro-batch, began to train, and committed. measured: by pass.
    """

    number: int
    shape: tuple[int, ...]
    attempt: int = 1
    is_released: bool = False
    is_committed: bool = False
    delivered: dict[int, float] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    measured: dict[str, Pass] = field(default_factory=dict)

    @property
    def dp_size(self) -> int:
        """DP ranks that it is planned for."""
        return self.shape[0]

    def times_of(self, cost_key: str, dp_rank: int, count: int) -> Pass | None:
        """Where this rank's `count` times of a pass belong; None for what is not its first word,
        or has not one time for each micro-batch.
        """
        times = self.measured.get(cost_key)
        if not 0 <= dp_rank < self.dp_size or count != self.shape[1]:
            return None
        if times is not None and dp_rank in times.busy:
            return None
        if sum(dp_rank in known.busy for known in self.measured.values()) == MAX_COST_KEYS:
            return None
        if times is None:
            times = self.measured[cost_key] = Pass()
        return times

    def began_again(self) -> None:
        """It is delivered anew: what ranks did with it before is void."""
        self.is_released = self.is_committed = False
        for seen in (self.delivered, self.taken, self.done):
            seen.clear()
        self.measured.clear()


@dataclass(slots=True)
class _Accepted:
    """Samples that came in and are not written yet; tickets follow `first`.

    pushes: the time of each, and how many of the samples it had.
    """

    first: int
    pushes: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    loss: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)


class StepTrace:
    """Of one run. writer: None where nothing is recorded. origin: of the core's clock, where the
    times that are written begin.
    """

    def __init__(
        self, clock: Callable[[], float], writer: RecordWriter | None = None, origin: float = 0.0
    ) -> None:
        self._clock, self._writer, self._origin = clock, writer, origin
        self._steps: dict[int, SeenStep] = {}
        self._accepted: _Accepted | None = None
        self._waits: list[tuple[int, float, float]] = []
        self._state: dict[str, int] = {}
        self._spent: dict[str, float] = {}
        self._state_at = -inf

    # -- samples ----------------------------------------------------------------------------

    def accepted(self, effect: e.SamplesAccepted) -> None:
        """Samples came in together; their tickets follow those of the samples before."""
        if self._writer is None:
            return
        entries, plain = effect.entries, effect.plain
        waiting, count = self._accepted, len(entries)
        if waiting is None:
            waiting = self._accepted = _Accepted(entries[0].ticket)
        waiting.pushes.append((self._at(entries[0].arrived), count))
        if plain is not None:
            waiting.tokens += plain.tokens
            waiting.loss += plain.loss_tokens
            waiting.versions += plain.policy_versions
            waiting.groups += repeat(_NO_GROUP, count)
        else:
            samples = list(map(_SAMPLE, entries))
            waiting.tokens += map(_TOKENS, samples)
            waiting.loss += map(_LOSS_TOKENS, samples)
            waiting.versions += map(_VERSION, samples)
            waiting.groups += map(_GROUP, entries)
        if len(waiting.tokens) >= _SAMPLES_AN_EVENT:
            self._put_accepted()

    def _put_accepted(self) -> None:
        """Write who has come in since the last time."""
        if (waiting := self._accepted) is None or self._writer is None:
            return
        self._accepted = None
        event: dict[str, Any] = {
            "event": "accepted",
            "at": waiting.pushes[-1][0],
            "first": waiting.first,
            "pushes": waiting.pushes,
            "tokens": waiting.tokens,
            "loss": waiting.loss,
        }
        if max(waiting.groups) >= 0:
            event["group"] = waiting.groups
        versions = waiting.versions
        if versions.count(versions[0]) < len(versions):
            event["version"] = versions
        elif versions[0] is not None:
            event["version"] = versions[0]
        self._writer.put(event, 4 * len(waiting.tokens) + len(waiting.pushes))

    def dropped(self, effect: e.SamplesDropped) -> None:
        """Accepted samples were given up."""
        if self._writer is not None:
            for reason, entries in effect.dropped.items():
                tickets = [entry.ticket for entry in entries]
                self._put("dropped", None, len(tickets), reason=str(reason), tickets=tickets)

    def policy_reported(self, effect: e.PolicyReported) -> None:
        """The trainer has other weights."""
        self._put("version", version=effect.policy_version)

    def configured(self, settings: Mapping[str, object]) -> None:
        """Options that changed while it serves, as they are from now on."""
        self._put("settings", None, len(settings), config=settings)

    # -- plans ------------------------------------------------------------------------------

    def planned(
        self, wanted: e.PlanRequested, effects: Sequence[e.Effect], now: float, generation: int
    ) -> None:
        """What the core made of a plan: a step, unless it was not used."""
        if self._writer is None:
            return
        for report in effects:
            if not isinstance(report, e.StepPlanned):
                continue
            plan, eligible = report.plan, len(wanted.entries)
            self._steps[report.step] = SeenStep(report.step, plan.cost.shape)
            if len(self._steps) > MAX_STEPS:
                self._give_up_measuring(self._steps.pop(next(iter(self._steps))), now)
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
        if (seen := self._steps.get(step.number)) is not None:
            seen.shape = plan.cost.shape
            seen.attempt += 1
        if self._writer is not None:
            sizes = [list(map(len, rank)) for rank in step.micro_batches]
            self._put_plan(
                step.number, 2 if seen is None else seen.attempt, plan, now,
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
        tickets = np.fromiter(map(_TICKET, entries), np.int64, len(entries))
        first = int(tickets[0])  # small numbers take less time to write, and less room
        self._put(
            "planned",
            now,
            _NUMBERS_A_PLANNED_SAMPLE * len(tickets),
            step=step,
            attempt=attempt,
            **others,
            first=first,
            tickets=(tickets - first).tolist(),
            sizes=sizes,
            cost=_rounded(plan.cost),
            fifo_excess=round(plan.fifo_excess, _COST_DIGITS),
            fifo_imbalance=round(plan.fifo_imbalance, _COST_DIGITS),
            lower_bound=float(f"{plan.lower_bound:.9g}"),
            **({} if plan.slowness is None else {"slowness": list(plan.slowness)}),
            **({} if plan.cp_sizes is None else {"cp_sizes": plan.cp_sizes.tolist()}),
        )

    def withdrawn(self, step: int) -> None:
        """Nothing is left of a step, maybe told once more to a rank that came back."""
        if self._steps.pop(step, None) is not None:
            self._put("withdrawn", step=step)

    # -- steps on their way -----------------------------------------------------------------

    def delivered(self, step: int, dp_rank: int, now: float) -> None:
        """A rank was handed its last micro-batch."""
        if (seen := self._steps.get(step)) is not None:
            seen.delivered[dp_rank] = now

    def released(self, step: int) -> None:
        """Every rank may train it; told once a rank that came back too."""
        seen, now = self._steps.get(step), self._clock()
        if seen is not None:
            if seen.is_released:
                return
            seen.is_released = True
        self._put("released", now, step=step)

    def taken(self, dp_rank: int, step: int, now: float) -> None:
        """A rank's training loop has begun this step, if it has begun any."""
        if (seen := self._steps.get(step)) is not None:
            seen.taken.setdefault(dp_rank, now)

    def rank_commits(self, dp_rank: int, through: int, now: float) -> None:
        """A rank has applied every step up to that one."""
        for seen in reversed(self._steps.values()):
            if seen.number <= through and not seen.is_committed:
                if dp_rank in seen.done:
                    return  # and what comes before it
                seen.done[dp_rank] = now

    def committed(self, step: int) -> None:
        """Every rank has applied it; an earlier process may have planned it."""
        seen, now = self._steps.get(step), self._clock()
        if seen is not None:
            seen.is_committed = True
        if seen is None or self._writer is None:
            self._put("committed", now, step=step)
            return
        columns = {
            name: [self._at(times[rank]) if rank in times else None for rank in range(seen.dp_size)]
            for name, times in (
                ("delivered", seen.delivered), ("taken", seen.taken), ("done", seen.done),
            )
        }  # fmt: skip
        self._put("committed", now, 3 * seen.dp_size, step=step, **columns)

    def redelivered(self, effect: e.Redelivered) -> None:
        """It goes out again: to a rank that came back, or to all."""
        seen = self._steps.get(effect.step)
        if seen is not None and effect.reason != "reconnect":
            seen.began_again()
        self._put("redelivered", step=effect.step, reason=effect.reason)

    def waited(self, dp_rank: int, since: float, seconds: float) -> None:
        """A rank's training loop waited for a step; told with the next look."""
        if self._writer is not None:
            self._waits.append((dp_rank, self._at(since), round(seconds, _TIME_DIGITS)))

    # -- measured times ---------------------------------------------------------------------

    def measured(self, dp_rank: int, told: RankTimes) -> None:
        """A rank says how long each micro-batch took, of a step that is remembered."""
        seen = self._steps.get(told.step)
        times = None if seen is None else seen.times_of(told.cost_key, dp_rank, len(told.busy))
        if seen is None or times is None:
            return
        times.report(dp_rank, told.busy, told.collective, told.why)
        if len(times.busy) == seen.dp_size:
            self._put_measured(told.step, told.cost_key, times, self._clock())

    def _give_up_measuring(self, seen: SeenStep, now: float) -> None:
        """Record what some ranks have reported of a step whose others never will."""
        for cost_key, times in seen.measured.items():
            if len(times.busy) < seen.dp_size:
                self._put_measured(seen.number, cost_key, times, now)

    def _put_measured(self, step: int, cost_key: str, times: Pass, now: float) -> None:
        """What ranks reported of one pass, as far as they have, with the digits that they gave."""
        ranks = sorted(times.busy)
        busy = [times.busy[rank] for rank in ranks]
        collective = [times.collective[rank] for rank in ranks]
        why = {"why": times.why} if times.why else {}
        self._put(
            "measured", now, 2 * sum(map(len, busy)), step=step, cost_key=cost_key, ranks=ranks,
            busy=busy, collective=collective, **why,
        )  # fmt: skip

    # -- once a second ----------------------------------------------------------------------

    def look(self, statistics: Callable[[], Statistics]) -> None:
        """Record what is held, if it is not what was held before, and where the ranks' time went by
        now; and who came and waited since.
        """
        if self._writer is None:
            return
        self._put_accepted()
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
        if self._waits:
            ranks, since, seconds = zip(*self._waits, strict=True)
            self._put("waited", now, 3 * len(ranks), ranks=ranks, since=since, seconds=seconds)
            self._waits = []

    def _put(self, name: str, now: float | None = None, numbers: int = 1, /, **what: Any) -> None:
        """Write an event, if anything is recorded."""
        if self._writer is not None:
            at = self._at(self._clock() if now is None else now)
            self._writer.put({"event": name, "at": at, **what}, numbers + len(what))

    def _at(self, moment: float) -> float:
        return round(moment - self._origin, _TIME_DIGITS)


def _rounded(costs: FloatArray) -> list[list[float]]:
    """Costs are sums of squares of lengths: whole numbers, unless they are small."""
    rounded: list[list[float]] = (np.rint(costs) if costs.max() > _LARGE else costs).tolist()
    return rounded
