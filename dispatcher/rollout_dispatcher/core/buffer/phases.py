"""Phases, which bound the samples of a plan, and the staleness of samples.

Samples of an ended phase are planned before newer ones. The phase is over once none of its samples
is ready; until then a step may be as small as the rest of the phase.

`Freshness`: the policy versions that generate and train samples.

Staleness of a sample is the policy version that its step will train with, minus its own. DP rank 0
reports a version with the first step that it trains with it; from there on the version rises by one
every `steps_per_version` steps, for steps that are planned and not committed. An exempt sample is
never stale, nor is any before the first report; a group has the oldest version of its members
without the exempt ones.
"""

from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

import numpy as np

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_planner.types import BoolArray


class StalenessPolicy(StrEnum):
    """The treatment of samples older than `max_staleness` policy versions."""

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
        #: Steps committed without a reported version to judge their samples by.
        self.unjudged = 0

    def report(self, version: int, first_step: int) -> bool:
        """DP rank 0 trains these weights from `first_step` on; returns whether they are newer.

        A version that is not newer changes nothing.
        """
        if self.reported is not None and version <= self.reported:
            return False
        self.reported, self._first_step, self.unjudged = version, first_step, 0
        return True

    def committed(self, steps: int) -> None:
        """The trainer has committed `steps` further steps."""
        if self._max_staleness is not None and self.reported is None:
            self.unjudged += steps

    def training_version(self, step: NextStep) -> int | None:
        """The policy version that a step will train with."""
        if self.reported is None:
            return None
        since = max(0, step.number - self._first_step)
        # Committed steps are in the reported weights, or their report is under way: only steps
        # still to be trained can make newer weights.
        ahead = max(0, step.number - max(self._first_step, step.committed + 1))
        per_version = self._steps_per_version
        return self.reported + min(since // per_version, -(-ahead // per_version))

    @property
    def drops(self) -> bool:
        """Whether samples may ever be too stale."""
        return self._max_staleness is not None and self._policy is _DROP

    def oldest(self, step: NextStep) -> int | None:
        """The oldest version that a step may train on; None if unknown or nothing is dropped."""
        if self._max_staleness is None or not self.drops:
            return None
        version = self.training_version(step)
        return None if version is None else version - self._max_staleness

    def must_go(self, entries: list[Entry], step: NextStep, batch: int) -> BoolArray:
        """Mark samples that are too stale for any later step: the oldest, up to `batch`."""
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


#: Ended phases that may still have samples; beyond it the oldest merges with the next.
MAX_PHASES = 1024


@dataclass(frozen=True, slots=True, order=True)
class _Phase:
    """An ended phase. version: its samples are older. ticket: of the first sample after its end."""

    version: int
    ticket: int

    def precedes(self, entry: Entry) -> bool:
        """Whether a sample belongs before its end; without a version its ticket decides."""
        known = entry.version
        return entry.ticket < self.ticket if known is None else known < self.version


class Phases:
    """Ended phases that may still have samples, oldest first. batch: units that a step needs."""

    def __init__(self, buffer: SampleBuffer, batch: int) -> None:
        self._buffer, self._batch = buffer, batch
        self._ended: list[_Phase] = []  # a heap
        self._versions: set[int] = set()
        self._checked_at = -1
        #: Whether any phase has ended, so that steps separate versions.
        self.in_use = False

    def end(self, version: int) -> None:
        """Plan samples older than `version`, and unversioned buffered ones, before newer ones."""
        self.in_use = True
        if version not in self._versions:
            self._buffer.watch_versions()
            self._versions.add(version)
            heappush(self._ended, _Phase(version, self._buffer.next_ticket))
            if len(self._ended) > MAX_PHASES:  # its samples are planned with the next
                self._versions.discard(heappop(self._ended).version)
            self._checked_at = -1

    @property
    def flushing(self) -> bool:
        """Whether an ended phase may still have samples."""
        return bool(self._ended)

    def window(self, limit: int) -> list[Entry]:
        """Samples for the next plan to choose from, oldest first, of at most `limit` units."""
        self._forget_empty()
        return self._buffer.ready(limit, self._ended[0].precedes if self._ended else None)

    def count(self, limit: int) -> int:
        """Units that are ready for the next plan; within a phase at most `limit`."""
        if not self._ended:
            return self._buffer.ready_units
        found = self.window(limit)
        return self._buffer.units_of(found) if self._ended else self._buffer.ready_units

    def units_short(self) -> int:
        """Units that a step still needs; 0 or less if one can be planned."""
        if self._ended:
            self._forget_empty()
        return 0 if self._ended else self._batch - self._buffer.ready_units

    def _forget_empty(self) -> None:
        """Forget phases without ready samples; only a removal can cause one."""
        if self._checked_at == self._buffer.removals:
            return
        self._checked_at = self._buffer.removals
        ages = self._buffer.drop_index
        while self._ended and not ages.has_before(self._ended[0].version, self._ended[0].ticket):
            self._versions.discard(heappop(self._ended).version)
