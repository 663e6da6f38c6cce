"""One pass over a step's micro-batches, as the DP ranks have timed it.

Ranks meet inside collectives, so all of them look equally busy; what tells them apart is how long
each was inside. Whoever comes last waits for nobody: its time there is what bytes take, and
everybody pays that. With `busy[r, m]` and `collective[r, m]` of rank r and micro-batch m

    transport[m] = min over r of collective[r, m]
    wait[r, m]   = collective[r, m] - transport[m]       for slower ranks
    compute[r, m] = busy[r, m] - collective[r, m]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rollout_dispatcher.plan import FloatArray

#: Clocks of a device and of its host differ a little; by more, times cannot be.
CLOCKS_DIFFER = 0.02
CLOCKS_DIFFER_S = 0.001


class Unmeasured(StrEnum):
    """Why nothing can be said of a pass over a step."""

    NOT_REPORTED = "not-reported"
    INCOMPLETE = "incomplete"
    NOT_SEPARATED = "not-separated"
    INCONSISTENT = "inconsistent"
    GENERATION = "generation"
    UNKNOWN_STEP = "unknown-step"
    TOO_MANY_KEYS = "too-many-keys"


@dataclass(frozen=True, slots=True, eq=False)
class RankTimes:
    """What a DP rank says of a pass: seconds a micro-batch, in order.

    collective: of them, inside collectives; None where it cannot be told apart, and `why` not.
    """

    step: int
    cost_key: str
    busy: Sequence[float]
    collective: Sequence[float] | None
    why: str = ""

    def flaw(self, micro_batches: int) -> tuple[Unmeasured, str] | None:
        """What makes it useless for a step of so many micro-batches, or None."""
        if len(self.busy) != micro_batches:
            text = f"timed {len(self.busy)} micro-batches of {micro_batches}"
            return Unmeasured.INCONSISTENT, text
        if self.collective is None:
            text = f"cannot tell time inside collectives apart: {self.why or 'it does not say why'}"
            return Unmeasured.NOT_SEPARATED, text
        return None


@dataclass(slots=True, eq=False)
class Pass:
    """What has been reported of one pass. busy, collective: float64[R, M]."""

    busy: FloatArray
    collective: FloatArray
    reported: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, dp_size: int, micro_batches: int) -> "Pass":
        """Of which nothing is reported yet."""
        return cls(np.zeros((dp_size, micro_batches)), np.zeros((dp_size, micro_batches)))

    def report(self, dp_rank: int, times: RankTimes) -> None:
        """A rank has told its times, which have no flaw; only its first word counts."""
        assert times.collective is not None, "a flaw"
        if dp_rank not in self.reported:
            self.reported.add(dp_rank)
            self.busy[dp_rank], self.collective[dp_rank] = times.busy, times.collective

    @property
    def missing(self) -> list[int]:
        """DP ranks that have not reported."""
        return [dp_rank for dp_rank in range(len(self.busy)) if dp_rank not in self.reported]

    @property
    def flaw(self) -> str:
        """Why what every rank has reported cannot be; empty if it can."""
        too_long = self.collective > self.busy * (1 + CLOCKS_DIFFER) + CLOCKS_DIFFER_S
        if too_long.any():
            dp_rank = int(too_long.any(axis=1).argmax())
            return f"DP rank {dp_rank} was inside collectives for longer than it took at all"
        if not (self.busy > self.collective).any():
            return "the DP ranks report no time outside collectives"
        return ""

    def split(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """compute[R, M], wait[R, M], transport[M] of a pass that every rank has reported."""
        inside = np.minimum(self.collective, self.busy)
        transport = inside.min(axis=0)
        return self.busy - inside, inside - transport, transport


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step that ranks may report on. planned: float64[R, M] or None. settled: passes by key."""

    number: int
    micro_batches: int
    planned: FloatArray | None
    passes: dict[str, Pass] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
