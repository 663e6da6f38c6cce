"""What ranks say of one pass over one step, and what they computed in it."""

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from rollout_dispatcher.plan import FloatArray


@dataclass(slots=True)
class Measured:
    """By DP rank: seconds of each micro-batch, from its begin to its end.

    collective: of these, blocked in collectives; None where that could not be told apart, and
    `why` says why.
    """

    busy: dict[int, list[float]] = field(default_factory=dict)
    collective: dict[int, list[float] | None] = field(default_factory=dict)
    why: str = ""

    def compute(self, ranks: int) -> FloatArray | None:
        """float64[R, M], seconds outside collectives; None unless each of so many ranks told it."""
        order = sorted(self.busy)
        blocked = [times for rank in order if (times := self.collective.get(rank)) is not None]
        if order != list(range(ranks)) or len(blocked) != ranks:
            return None
        busy = [self.busy[rank] for rank in order]
        if len({len(times) for times in chain(busy, blocked)}) != 1:
            return None
        compute: FloatArray = np.maximum(np.array(busy) - np.array(blocked), 0.0)
        return compute
