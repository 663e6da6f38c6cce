"""Turns what happens into the events of a record; docs/record.md says what each of them has.

Nothing of a payload, and no id that a user gave, is ever in one. What is told a sample at a time or
a rank at a time is put together first: one event a plan, a commit, a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.effects import PlanWanted, SamplesDropped, StepPlanned
from rollout_dispatcher.core.measuring.times import Pass
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.sample import Sample, SamplesByField
from rollout_dispatcher.service.chronicle.recent import SeenStep
from rollout_planner.types import FloatArray, IntArray, Plan

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


class Recorder:
    """Tells the writer. origin: of the core's clock, where the times that are written begin."""

    def __init__(self, writer: RecordWriter, origin: float) -> None:
        self._writer, self._origin = writer, origin
        self._accepted: _Accepted | None = None
        self._waits: list[tuple[int, float, float]] = []
        self._state: dict[str, int] = {}

    def accepted(self, entries: Sequence[Entry], plain: SamplesByField | None = None) -> None:
        """Samples came in together; their tickets follow those of the samples before.

        plain: as in `effects.SamplesAccepted`.
        """
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
        if (waiting := self._accepted) is None:
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

    def dropped(self, effect: SamplesDropped, now: float) -> None:
        """Accepted samples were given up."""
        for reason, entries in effect.dropped.items():
            tickets = [entry.ticket for entry in entries]
            self._put("dropped", now, len(tickets), reason=str(reason), tickets=tickets)

    def planned(
        self, report: StepPlanned, wanted: PlanWanted, now: float, *, generation: int
    ) -> None:
        """A step was planned for the first time."""
        self._put_accepted()
        tickets = np.fromiter(map(_TICKET, report.entries), np.int64, len(report.entries))
        sizes = report.plan.counts.tolist()
        chosen: dict[str, Any] = {"trigger": str(report.trigger), "eligible": len(wanted.entries)}
        if report.skips.any():
            chosen["skips"] = report.skips.tolist()
        if stale := report.staleness:
            is_one = stale.count(stale[0]) == len(report.tokens)
            chosen["staleness"] = stale[0] if is_one else stale
        self._plan(
            report.step, 1, report.plan, now, tickets=tickets, sizes=sizes, generation=generation,
            **chosen,
        )  # fmt: skip

    def replanned(
        self, step: OpenStep, attempt: int, plan: Plan, now: float, *, generation: int
    ) -> None:
        """An open step has another plan."""
        sizes = [list(map(len, rank)) for rank in step.micro_batches]
        tickets = np.fromiter(map(_TICKET, step.entries()), np.int64)
        self._plan(
            step.number, attempt, plan, now, tickets=tickets, sizes=sizes, generation=generation
        )

    def _plan(
        self,
        step: int,
        attempt: int,
        plan: Plan,
        now: float,
        *,
        tickets: IntArray,
        sizes: list[list[int]],
        **others: Any,
    ) -> None:
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
        )

    def withdrawn(self, step: int, now: float) -> None:
        """Nothing is left of it."""
        self._put("withdrawn", now, step=step)

    def released(self, step: int, now: float) -> None:
        """Every rank may train it."""
        self._put("released", now, step=step)

    def committed(self, step: int, seen: SeenStep | None, now: float) -> None:
        """Every rank has applied it; seen: how it went, unless an earlier process planned it."""
        if seen is None:
            self._put("committed", now, step=step)
            return
        ranks = range(seen.dp_size)
        columns = {
            name: [self._at(times[rank]) if rank in times else None for rank in ranks]
            for name, times in (
                ("delivered", seen.delivered), ("taken", seen.taken), ("done", seen.done),
            )
        }  # fmt: skip
        self._put("committed", now, 3 * seen.dp_size, step=step, **columns)

    def redelivered(self, step: int, reason: str, now: float) -> None:
        """It goes out again."""
        self._put("redelivered", now, step=step, reason=reason)

    def measured(self, step: int, cost_key: str, times: Pass, now: float) -> None:
        """What ranks reported of one pass, as far as they have, with the digits that they gave."""
        ranks = sorted(times.busy)
        busy = [times.busy[rank] for rank in ranks]
        collective = [times.collective[rank] for rank in ranks]
        numbers = 2 * sum(map(len, busy))
        self._put(
            "measured", now, numbers, step=step, cost_key=cost_key, ranks=ranks,
            busy=busy, collective=collective, **({"why": times.why} if times.why else {}),
        )  # fmt: skip

    def version(self, version: int, now: float) -> None:
        """The trainer has other weights."""
        self._put("version", now, version=version)

    def configured(self, settings: Mapping[str, object], now: float) -> None:
        """Options that changed while it serves, as they are from now on."""
        self._put("settings", now, len(settings), config=settings)

    def waited(self, rank: int, since: float, seconds: float) -> None:
        """A training loop waited; told with the next `state`."""
        self._waits.append((rank, self._at(since), round(seconds, _TIME_DIGITS)))

    def state(self, at: Statistics, now: float) -> None:
        """What is held now, if it is not what was held before; and who came and waited since."""
        self._put_accepted()
        state = {
            "buffered": at.buffered,
            "ready": at.ready,
            "in_flight": at.in_flight,
            "held_pushes": at.pushes_held,
        }
        if state != self._state:
            self._state = state
            self._put("state", now, **state)
        if self._waits:
            ranks, since, seconds = zip(*self._waits, strict=True)
            self._put("waited", now, 3 * len(ranks), ranks=ranks, since=since, seconds=seconds)
            self._waits = []

    def _put(self, name: str, now: float, numbers: int = 1, /, **what: Any) -> None:
        event = {"event": name, "at": self._at(now), **what}
        self._writer.put(event, numbers + len(what))

    def _at(self, moment: float) -> float:
        return round(moment - self._origin, _TIME_DIGITS)


def _rounded(costs: FloatArray) -> list[list[float]]:
    """Costs are sums of squares of lengths: whole numbers, unless they are small."""
    rounded: list[list[float]] = (np.rint(costs) if costs.max() > _LARGE else costs).tolist()
    return rounded
