"""Freshness: which weights wrote a sample, which will train on it, and what follows.

Staleness of a sample is the policy version that its step will train with, minus its own: the
version last reported by DP rank 0 plus the open steps that will be applied before. A sample
without a version is never stale. A phase that has ended is dispatched before anything newer.
"""

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from dispatcher.core.buffer import Entry, SampleBuffer
from dispatcher.plan import BoolArray


class StalenessPolicy(StrEnum):
    """What becomes of samples older than `max_staleness` policy versions."""

    DROP = "drop"
    PREFER_OLDEST = "prefer-oldest"


class Freshness:
    """Policy versions and phases of one run."""

    def __init__(self, max_staleness: int | None, policy: StalenessPolicy) -> None:
        self._max_staleness = max_staleness
        self._policy = policy
        self._phases: list[int] = []
        self.reported: int | None = None

    def report(self, version: int) -> None:
        """DP rank 0 trains these weights now; an older version than before changes nothing."""
        self.reported = max(version, self.reported or 0)

    def training_version(self, open_steps: int) -> int | None:
        """The policy version that the step after `open_steps` others will train with."""
        return None if self.reported is None else self.reported + open_steps

    def end_phase(self, version: int) -> None:
        """Samples older than `version` go before anything newer."""
        if version not in self._phases:
            self._phases = sorted([*self._phases, version])

    @property
    def phases(self) -> tuple[int, ...]:
        """Phases that have ended and may still have samples, oldest first."""
        return tuple(self._phases)

    @property
    def flushing(self) -> bool:
        """Whether an ended phase still has samples, as of the last `window`."""
        return bool(self._phases)

    def window(self, buffer: SampleBuffer, limit: int) -> list[Entry]:
        """The samples that the next plan may choose from, oldest first."""
        while self._phases:
            if found := buffer.ready(limit, before_phase(self._phases[0])):
                return found
            self._phases.pop(0)
        return buffer.ready(limit)

    def count(self, buffer: SampleBuffer, limit: int) -> int:
        """How many samples `window` has, without listing them if that can be avoided."""
        if self._phases or buffer.num_ready > limit:
            return len(self.window(buffer, limit))
        return buffer.num_ready

    def stale(self, open_steps: int) -> Callable[[Entry], bool] | None:
        """What the next step may no longer train on; None if nothing is ever dropped."""
        version = self.training_version(open_steps)
        if version is None or self._max_staleness is None or self._policy is not _DROP:
            return None
        return _below(version - self._max_staleness)

    def must_go(self, entries: list[Entry], open_steps: int, batch: int) -> BoolArray:
        """Samples too stale for any step after the next: the oldest ones, at most a batch."""
        due = np.zeros(len(entries), np.bool_)
        version = self.training_version(open_steps)
        if version is None or self._max_staleness is None:
            return due
        expires = _below(version + 1 - self._max_staleness)
        expiring = [at for at, entry in enumerate(entries) if expires(entry)]
        expiring.sort(key=lambda at: entries[at].sample.policy_version or 0)
        due[expiring[:batch]] = True
        return due


_DROP = StalenessPolicy.DROP


def before_phase(version: int) -> Callable[[Entry], bool]:
    """Whether a sample belongs before the phase of `version`; one without a version does."""

    def belongs(entry: Entry) -> bool:
        known = entry.sample.policy_version
        return known is None or known < version

    return belongs


def _below(version: int) -> Callable[[Entry], bool]:
    def is_below(entry: Entry) -> bool:
        known = entry.sample.policy_version
        return known is not None and known < version

    return is_below
