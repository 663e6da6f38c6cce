"""Phases, and what a plan may choose from: samples of a phase that has ended go before newer ones.

A phase that has ended is over once nothing of it is ready; while one is not, a step may be as small
as what is left of it.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry

#: Ended phases that may still have samples; steps are kept apart by no more of them.
MAX_PHASES = 1024


@dataclass(frozen=True, slots=True, order=True)
class _Phase:
    """version: nothing older belongs to newer phases. ticket: the first sample after its end."""

    version: int
    ticket: int

    def precedes(self, entry: Entry) -> bool:
        """Whether a sample belongs before its end; one without a version by when it came."""
        known = entry.version
        return entry.ticket < self.ticket if known is None else known < self.version


class Phases:
    """Ended phases that may still have samples, oldest first; batch: units that a step needs."""

    def __init__(self, buffer: SampleBuffer, batch: int) -> None:
        self._buffer, self._batch = buffer, batch
        self._ended: list[_Phase] = []  # a heap
        self._versions: set[int] = set()
        self._looked_at = -1
        #: Whether any phase has ended: samples of different versions are kept apart.
        self.in_use = False

    def end(self, version: int) -> None:
        """Samples older than `version`, and unknown ones that are here, go before what is newer."""
        self.in_use = True
        if version not in self._versions:
            self._buffer.watch_versions()
            self._versions.add(version)
            heappush(self._ended, _Phase(version, self._buffer.next_ticket))
            if len(self._ended) > MAX_PHASES:  # what is older than it goes with the next
                self._versions.discard(heappop(self._ended).version)
            self._looked_at = -1

    @property
    def flushing(self) -> bool:
        """Whether an ended phase may still have samples."""
        return bool(self._ended)

    def window(self, limit: int) -> list[Entry]:
        """The samples that the next plan may choose from, oldest first, of so many units."""
        self._forget_empty()
        return self._buffer.ready(limit, self._ended[0].precedes if self._ended else None)

    def count(self, limit: int) -> int:
        """How many units are ready for the next plan, and at most `limit` of them in a phase."""
        if not self._ended:
            return self._buffer.ready_units
        found = self.window(limit)
        return self._buffer.units_of(found) if self._ended else self._buffer.ready_units

    def shortfall(self) -> int:
        """Units that are ready fewer than a step needs; 0 or less if one could be planned."""
        if self._ended:
            self._forget_empty()
        return 0 if self._ended else self._batch - self._buffer.ready_units

    def _forget_empty(self) -> None:
        """A phase of which nothing is ready is over; only what leaves can bring that about."""
        if self._looked_at == self._buffer.departures:
            return
        self._looked_at = self._buffer.departures
        ages = self._buffer.ages
        while self._ended and not ages.has_before(self._ended[0].version, self._ended[0].ticket):
            self._versions.discard(heappop(self._ended).version)
