"""How long the training loop of each DP rank was blocked, and has been so far.

A wait counts while it lasts, so that its rate shows a rank that stands still; what is observed once
it is over is how long it was. Invariant: the seconds of a rank never fall, whatever becomes of it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping


class RankWaits:
    """Waits of the current process group's ranks. observe: is told of each that ended in a step."""

    def __init__(self, observe: Callable[[float], object]) -> None:
        self._observe = observe
        self._since: dict[int, float] = {}
        self._before: defaultdict[int, float] = defaultdict(float)

    def begins(self, dp_rank: int, now: float) -> None:
        """It waits, if it did not already."""
        self._since.setdefault(dp_rank, now)

    def ends(self, dp_rank: int, now: float) -> float | None:
        """It has its step; how long it waited for it, if it did."""
        if (seconds := self._stop(dp_rank, now)) is not None:
            self._observe(seconds)
        return seconds

    def is_waiting(self, dp_rank: int) -> bool:
        """Whether it waits."""
        return dp_rank in self._since

    def stops(self, dp_rank: int, now: float) -> None:
        """It waits no more and has no step: its connection is gone, or the stream has ended."""
        self._stop(dp_rank, now)

    def all_stop(self, now: float) -> None:
        """Another process group takes the place of this one."""
        for dp_rank in list(self._since):
            self._stop(dp_rank, now)

    def seconds(self, dp_size: int, now: float) -> Mapping[int, float]:
        """Of each DP rank, in hundredths: more digits would double what a scrape sends."""
        before, since = self._before, self._since
        return {
            # Added up as `_stop` does: a bit less, rounded down, would be a counter that falls.
            dp_rank: round(before.get(dp_rank, 0.0) + (now - since.get(dp_rank, now)), 2)
            for dp_rank in range(dp_size)
        }

    def _stop(self, dp_rank: int, now: float) -> float | None:
        since = self._since.pop(dp_rank, None)
        if since is None:
            return None
        self._before[dp_rank] += now - since
        return now - since
