"""The trainer's progress as a producer knows it, and the samples that were dropped.

All of it is unknown from a dispatcher that does not send it, and then no producer waits.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollout_dispatcher.protocol import messages as m

#: Dropped samples that are kept until `take_dropped`; of more the newest.
DROPPED_KEPT = 16_384


@dataclass(frozen=True, slots=True)
class Feedback:
    """The dispatcher's last report; None where a value is unknown.

    policy_version: of the trainer, as its DP rank 0 reported it last.
    expected_version: that a sample pushed now will be trained with, if samples go in order of
        arrival: later than `policy_version` by the steps that are under way and those that the
        buffer holds.
    max_staleness: policy versions that a sample may be older than what trains on it; None without a
        limit too.
    staleness: of the latest answered push, if it had a version: policy versions from its oldest
        sample to the one that the next step trains with.
    remaining: samples (groups, where steps are counted in these) that may come in before producers
        wait.
    num_dropped: samples of this producer that were accepted and then dropped, as far as it was
        connected when that happened; `dropped()` names them.
    """

    policy_version: int | None = None
    expected_version: int | None = None
    max_staleness: int | None = None
    staleness: int | None = None
    remaining: int | None = None
    num_dropped: int = 0

    @property
    def is_too_stale(self) -> bool:
        """Whether the latest push was too old to be trained on by the time it came."""
        limit = self.max_staleness
        return limit is not None and self.staleness is not None and self.staleness > limit

    def expected_staleness(self, policy_version: int) -> int | None:
        """Of a sample of these weights that is pushed now, when it is trained on."""
        expected = self.expected_version
        return None if expected is None else max(0, expected - policy_version)

    def would_expire(self, policy_version: int) -> bool:
        """Whether such a sample would be too stale by then; False where that is not known."""
        expected, limit = self.expected_staleness(policy_version), self.max_staleness
        return expected is not None and limit is not None and expected > limit


@dataclass(frozen=True, slots=True)
class DroppedSample:
    """An accepted sample that will never be trained on.

    sample_id: the id that it was pushed with; one of the client's making if it had none.
    reason: `stale`, `incomplete-group`, `schema` or another label of `samples_dropped_total`.
    """

    sample_id: str
    group_id: str | None
    reason: str


class FlowControlState:
    """Keeps the last report to one producer."""

    def __init__(self) -> None:
        self._known = Feedback()
        self._dropped: deque[DroppedSample] = deque(maxlen=DROPPED_KEPT)

    def feedback(self) -> Feedback:
        """The last report."""
        return self._known

    def take_dropped(self) -> list[DroppedSample]:
        """Samples dropped since the last call, oldest first; from any thread."""
        return list(self._take_dropped())

    def _take_dropped(self) -> Iterator[DroppedSample]:
        while self._dropped:
            try:
                yield self._dropped.popleft()
            except IndexError:  # another thread was faster
                return

    def welcomed(self, welcome: m.WelcomeProducer) -> None:
        """A connection begins, maybe to another run: the trainer's progress follows at once."""
        self._known = Feedback(
            max_staleness=welcome.max_staleness, num_dropped=self._known.num_dropped
        )

    def update(self, message: m.HasFeedback | m.Dropped) -> None:
        """Take the values of a message; others stay as they are."""
        if isinstance(message, m.Dropped):
            groups = message.group_ids or [None] * len(message.sample_ids)
            self._dropped.extend(
                DroppedSample(sample_id, group_id, message.reason)
                for sample_id, group_id in zip(message.sample_ids, groups, strict=True)
            )
            news = {"num_dropped": self._known.num_dropped + len(groups)}
        else:
            names = ("policy_version", "expected_version", "remaining", "staleness")
            values = {name: getattr(message, name, None) for name in names}
            news = {name: value for name, value in values.items() if value is not None}
        if news:
            self._known = replace(self._known, **news)
