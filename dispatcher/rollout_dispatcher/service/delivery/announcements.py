"""What DP ranks are told of a step beside its samples; made once a step, for all of them.

Ranks with the capability `group-totals` are told about groups, those with `expected-loss` about the
loss tokens to expect; others would not know the keys.
"""

from collections import defaultdict
from dataclasses import dataclass

from rollout_dispatcher.core.steps.step import GroupTotals, OpenStep
from rollout_dispatcher.protocol.assemble import step_header
from rollout_dispatcher.protocol.versions import EXPECTED_LOSS, GROUP_TOTALS, Terms


@dataclass(frozen=True, slots=True)
class Announcement:
    """Of one plan. header: its frame. groups: None where there are none, or they are not told.

    ragged: the names of the fields that only ranks with that capability can read.
    """

    digest: str
    header: bytes
    groups: GroupTotals | None
    ragged: tuple[str, ...]


class Announcements:
    """By step, until it is committed."""

    def __init__(self) -> None:
        #: By the capabilities that they heed, then by step.
        self._made: defaultdict[frozenset[str], dict[int, Announcement]] = defaultdict(dict)

    def of(self, step: OpenStep, terms: Terms) -> Announcement:
        """What a rank is told with which these terms were agreed."""
        told = terms.capabilities & {GROUP_TOTALS, EXPECTED_LOSS}
        made = self._made[told]
        found = made.get(step.number)
        if found is None or found.digest != step.digest:
            found = made[step.number] = _announcement(step, told)
        return found

    def forget(self, step: int) -> None:
        """Nobody has to be told of it any more."""
        for made in self._made.values():
            made.pop(step, None)


def _announcement(step: OpenStep, told: frozenset[str]) -> Announcement:
    groups = GroupTotals.of(step.micro_batches) if GROUP_TOTALS in told else None
    samples = step.samples()
    header = step_header(
        step.number, step.digest, len(step.micro_batches[0]), samples,
        group_loss_tokens=None if groups is None else groups.loss_tokens,
        expected_loss_tokens=step.expected_loss_tokens if EXPECTED_LOSS in told else None,
        attempt=step.attempt,
    )  # fmt: skip
    return Announcement(step.digest, header, groups, samples[0].schema.ragged)
