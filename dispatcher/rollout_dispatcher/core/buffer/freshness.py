"""Freshness: which weights wrote a sample, which will train on it, and what follows.

Staleness of a sample is the policy version that its step will train with, minus its own. DP rank 0
reports a version with the number of the first step that it trains with it; from there on the
version rises by one every `steps_per_version` steps, as far as steps are planned and not committed.
A sample that is exempt is never stale, nor is any before the first report; a group is judged by its
oldest version, without members that are exempt.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

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
