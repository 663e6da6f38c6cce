"""One pass over a step's micro-batches, as the DP ranks have timed it.

Ranks meet inside collectives, so all are equally busy; they differ in the time inside. The last
rank to arrive waits for no other: its time inside is that of the transport, which all ranks have.
With `busy[r, m]` and `collective[r, m]` of rank r and micro-batch m

    transport[m] = min over r of collective[r, m]
    wait[r, m]   = collective[r, m] - transport[m]       for slower ranks
    compute[r, m] = busy[r, m] - collective[r, m]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import gt, sub
from typing import NamedTuple

import numpy as np

from rollout_dispatcher.hints import name_some
from rollout_planner.types import FloatArray, IntArray

#: Largest differences between the clocks of a device and its host, as a share and in seconds.
CLOCKS_DIFFER = 0.02
CLOCKS_DIFFER_S = 0.001


class Unmeasured(StrEnum):
    """Why a pass over a step is not measured."""

    NOT_REPORTED = "not-reported"
    INCOMPLETE = "incomplete"
    NOT_SEPARATED = "not-separated"
    INCONSISTENT = "inconsistent"
    GENERATION = "generation"
    UNKNOWN_STEP = "unknown-step"
    TOO_MANY_KEYS = "too-many-keys"


class Flaw(NamedTuple):
    """Why times are of no use; text: for people."""

    reason: Unmeasured
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class RankTimes:
    """A DP rank's report of a pass: seconds of each micro-batch, in order.

    collective: of them, inside collectives; None if they cannot be separated, for the reason `why`.
    """

    step: int
    cost_key: str
    busy: Sequence[float]
    collective: Sequence[float] | None
    why: str = ""

    def flaw(self, micro_batches: int) -> Flaw | None:
        """Why it is of no use for a step of so many micro-batches, or None."""
        if len(self.busy) != micro_batches:
            text = f"timed {len(self.busy)} micro-batches of {micro_batches}"
            return Flaw(Unmeasured.INCONSISTENT, text)
        if self.collective is None:
            return Flaw(Unmeasured.NOT_SEPARATED, _not_separated(self.why))
        return None


Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Times of a pass, separated, in seconds.

    busy, collective: [R][M], as reported; collective nowhere above busy. of_ranks: float64[2, R],
    compute and wait of each rank, over all micro-batches. transport_s: over all micro-batches.
    """

    busy: Rows
    collective: Rows
    of_ranks: FloatArray
    transport_s: float

    @property
    def compute(self) -> FloatArray:
        """float64[R, M], outside collectives."""
        return np.subtract(self.busy, self.collective)


@dataclass(slots=True, eq=False)
class Pass:
    """Reports of one pass: by DP rank, seconds of each micro-batch.

    collective: of them, inside collectives; None if a rank could not separate them, for the reason
    `why`.
    """

    busy: dict[int, Sequence[float]] = field(default_factory=dict)
    collective: dict[int, Sequence[float] | None] = field(default_factory=dict)
    why: str = ""

    def report(
        self,
        dp_rank: int,
        busy: Sequence[float],
        collective: Sequence[float] | None,
        why: str = "",
    ) -> None:
        """A rank reported its times; only its first report counts."""
        if dp_rank not in self.busy:
            self.busy[dp_rank], self.collective[dp_rank] = busy, collective
            self.why = why or self.why

    def not_reported(self, dp_size: int) -> str:
        """For people: which of so many DP ranks have not reported."""
        missing = [dp_rank for dp_rank in range(dp_size) if dp_rank not in self.busy]
        return f"{name_some(missing, 'DP rank')} {'have' if missing[1:] else 'has'} not reported"

    def split(self, dp_size: int) -> Split | Flaw:
        """The separated times, once each of so many ranks has reported; else why not."""
        ranks = range(dp_size)
        if not self.busy.keys() >= set(ranks):
            return Flaw(Unmeasured.INCOMPLETE, self.not_reported(dp_size))
        inside = [times for rank in ranks if (times := self.collective[rank]) is not None]
        if len(inside) < dp_size:
            rank = next(rank for rank in ranks if self.collective[rank] is None)
            text = f"DP rank {rank} {_not_separated(self.why)}"
            return Flaw(Unmeasured.NOT_SEPARATED, text)
        own = [self.busy[rank] for rank in ranks]
        if len(set(map(len, own + inside))) > 1:
            text = "the DP ranks have timed different numbers of micro-batches"
            return Flaw(Unmeasured.INCONSISTENT, text)
        if any(any(map(gt, *times)) for times in zip(inside, own, strict=True)):
            if flaw := _contradiction(np.array(own), np.array(inside)):
                return flaw
            inside = np.minimum(inside, own).tolist()
        return _split(own, inside)

    def compute(self, dp_size: int) -> FloatArray | None:
        """float64[R, M], seconds outside collectives; None where `split` has a flaw."""
        found = self.split(dp_size)
        return None if isinstance(found, Flaw) else found.compute


def _contradiction(busy: FloatArray, collective: FloatArray) -> Flaw | None:
    """The flaw of impossible reports, unless the difference of clocks explains them."""
    too_long = collective > busy * (1 + CLOCKS_DIFFER) + CLOCKS_DIFFER_S
    if not too_long.any():
        return None
    dp_rank = int(too_long.any(axis=1).argmax())
    text = f"DP rank {dp_rank} was inside collectives for longer than it took at all"
    return Flaw(Unmeasured.INCONSISTENT, text)


def _split(busy: Rows, collective: Rows) -> Split | Flaw:
    """Without arrays: their calls take far longer for the few numbers of a step."""
    inside = list(map(sum, collective))
    computed = list(map(sub, map(sum, busy), inside))
    if not any(computed):
        text = "the DP ranks report no time outside collectives"
        return Flaw(Unmeasured.INCONSISTENT, text)
    transport_s = sum(map(min, zip(*collective, strict=True)))
    waited = [max(0.0, each - transport_s) for each in inside]  # counters: no negative rounding
    return Split(busy, collective, np.array((computed, waited)), transport_s)


def _not_separated(why: str) -> str:
    return f"cannot separate time inside collectives: {why or 'no reason reported'}"


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step that ranks may report on. passes: open ones; settled: keys of the others.

    tokens: int64[n], of its samples, rank by rank; counts: int64[R, M], samples of micro-batches.
    planned: float64[R, M] or None; slowness: of the ranks in the plan, float64[R].
    """

    number: int
    tokens: IntArray
    counts: IntArray
    planned: FloatArray | None
    slowness: FloatArray
    passes: dict[str, Pass] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return int(self.counts.shape[1])
