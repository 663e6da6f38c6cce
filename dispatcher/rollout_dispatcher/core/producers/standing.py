"""How far producers are ahead of the trainer: what whoever pushes is told, to keep pace with it.

Looked up for every answer to a push, so it is worked out from counts that are kept anyway.
"""

from typing import NamedTuple

from rollout_dispatcher.core.admission.held_pushes import HeldPushes
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.freshness import Freshness, NextStep
from rollout_dispatcher.core.effects import Advised, Effect
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.core.steps.ledger import StepLedger

#: The trainer's word of its weights may come later than the weights: by one version.
MOST_AHEAD = 1
AHEAD = (
    "samples have policy_version {}, and the trainer stands at {}: they count as fresh under "
    "--max-staleness, however old they are. Push the version that stream.set_policy_version() "
    "reports of the weights, and report it when workers get them"
)


class Standing(NamedTuple):
    """Where the trainer is, for those who push.

    policy_version: that DP rank 0 reported last. training_version: that the next step trains with.
    expected_version: that a sample pushed now is trained with if samples go in order of arrival.
    All three None before any was reported. remaining: samples, or groups where steps are counted
    in these, that the soft caps still let in; 0 while pushes wait.
    """

    policy_version: int | None
    training_version: int | None
    expected_version: int | None
    remaining: int

    def staleness(self, oldest: int | None) -> int | None:
        """Of samples of which this is the oldest version, were they trained on now."""
        if self.training_version is None or oldest is None:
            return None
        return max(0, self.training_version - oldest)


class Standings:
    """Looks at the parts of one run. batch: samples or groups of a step."""

    def __init__(
        self,
        buffer: SampleBuffer,
        held: HeldPushes,
        freshness: Freshness,
        ledger: StepLedger,
        *,
        batch: int,
    ) -> None:
        self._buffer, self._held, self._batch = buffer, held, batch
        self._freshness, self._steps = freshness, ledger.steps
        # What versions were worked out from the last time, and these: they change with steps.
        self._known: tuple[int | None, int, int, int] | None = None
        self._versions: tuple[int | None, int | None] = (None, None)
        self._told: set[str] = set()

    def now(self) -> Standing:
        """As it is."""
        buffer, steps, reported = self._buffer, self._steps, self._freshness.reported
        remaining = 0 if self._held else buffer.remaining
        if reported is None:
            return Standing(None, None, None, remaining)
        ahead = buffer.ready_units // self._batch
        known = (reported, steps.next_step, steps.num_uncommitted, ahead)
        if known != self._known:
            self._known, self._versions = known, self._work_out(ahead)
        return Standing(reported, *self._versions, remaining)

    def ahead(self, push: Push) -> list[Effect]:
        """Tell its producer, once a connection, that the trainer can have no such weights yet."""
        version, producer = self.now().training_version, push.producer
        if version is None or producer in self._told:
            return []
        newest = max((sample.judged_version or 0 for sample in push.samples), default=0)
        if newest <= version + MOST_AHEAD:
            return []
        self._told.add(producer)
        return [Advised(AHEAD.format(newest, version), producer)]

    def forget(self, producer: str) -> None:
        """Its connection is gone."""
        self._told.discard(producer)

    def _work_out(self, ahead: int) -> tuple[int | None, int | None]:
        """What the next step trains with, and the one that comes so many steps behind it."""
        at = self._steps.next
        behind = NextStep(at.number + ahead, at.committed)
        version = self._freshness.training_version
        return version(at), version(behind)
