"""Phases, and what a plan may choose from: samples of a phase that has ended go before newer ones.

A phase that has ended is over once nothing of it is ready; while one is not, a step may be as small
as what is left of it.

`Freshness`: which weights wrote a sample, which will train on it, and what follows.

Staleness of a sample is the policy version that its step will train with, minus its own. DP rank 0
reports a version with the number of the first step that it trains with it; from there on the
version rises by one every `steps_per_version` steps, as far as steps are planned and not committed.
A sample that is exempt is never stale, nor is any before the first report; a group is judged by its
oldest version, without members that are exempt.
"""

from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

import numpy as np

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_planner.types import BoolArray


class StalenessPolicy(StrEnum):
    """What becomes of samples older than `max_staleness` policy versions."""

    DROP = "drop"
    PREFER_OLDEST = "prefer-oldest"


@dataclass(frozen=True, slots=True)
class NextStep:
    """The number of the step to be planned, and of the last one that is committed."""

    number: int
    committed: int


class Freshness:
    """Policy versions of one run."""

    def __init__(
        self, max_staleness: int | None, policy: StalenessPolicy, steps_per_version: int = 1
    ) -> None:
        self._max_staleness, self._policy = max_staleness, policy
        self._steps_per_version = steps_per_version
        self._first_step = 0
        self.reported: int | None = None
        #: Steps committed although nobody could tell how old their samples were.
        self.unjudged = 0

    def report(self, version: int, first_step: int) -> bool:
        """DP rank 0 trains these weights from that step on; returns whether that is news.

        An older version than before changes nothing.
        """
        if self.reported is not None and version <= self.reported:
            return False
        self.reported, self._first_step, self.unjudged = version, first_step, 0
        return True

    def committed(self, steps: int) -> None:
        """The trainer has committed so many steps more."""
        if self._max_staleness is not None and self.reported is None:
            self.unjudged += steps

    def training_version(self, step: NextStep) -> int | None:
        """The policy version that a step will train with."""
        if self.reported is None:
            return None
        since = max(0, step.number - self._first_step)
        # What is committed was applied to the weights that were reported, or the next report is
        # on its way: only steps that are still to be trained can have made newer ones.
        ahead = max(0, step.number - max(self._first_step, step.committed + 1))
        per_version = self._steps_per_version
        return self.reported + min(since // per_version, -(-ahead // per_version))

    @property
    def drops(self) -> bool:
        """Whether samples may ever be too stale."""
        return self._max_staleness is not None and self._policy is _DROP

    def oldest(self, step: NextStep) -> int | None:
        """The oldest version that a step may train on, if it is known and others are dropped."""
        if self._max_staleness is None or not self.drops:
            return None
        version = self.training_version(step)
        return None if version is None else version - self._max_staleness

    def must_go(self, entries: list[Entry], step: NextStep, batch: int) -> BoolArray:
        """Samples too stale for any step after that one: the oldest ones, about a batch."""
        due = np.zeros(len(entries), np.bool_)
        if self._max_staleness is None:
            return due
        version = self.training_version(NextStep(step.number + 1, step.committed))
        if version is None:
            return due
        oldest, versions = version - self._max_staleness, [entry.version for entry in entries]
        expiring = [at for at, known in enumerate(versions) if known is not None and known < oldest]
        expiring.sort(key=lambda at: versions[at] or 0)
        due[expiring[:batch]] = True
        return due


_DROP = StalenessPolicy.DROP


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

    def units_short(self) -> int:
        """Units that are ready fewer than a step needs; 0 or less if one could be planned."""
        if self._ended:
            self._forget_empty()
        return 0 if self._ended else self._batch - self._buffer.ready_units

    def _forget_empty(self) -> None:
        """A phase of which nothing is ready is over; only what leaves can bring that about."""
        if self._looked_at == self._buffer.removals:
            return
        self._looked_at = self._buffer.removals
        ages = self._buffer.drop_index
        while self._ended and not ages.has_before(self._ended[0].version, self._ended[0].ticket):
            self._versions.discard(heappop(self._ended).version)
