"""What a shutdown costs: accepted samples that nobody will train on, counted and the first named.

Reasons that the settings ask for, such as `--last-batch drop`, are no losses.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.steps.open_steps import OpenSteps
from rollout_dispatcher.sample import Sample

#: What a shutdown brings about: nobody is there to train, or a group's other members are refused.
BY_SHUTDOWN = frozenset({DropReason.SHUTDOWN, DropReason.INCOMPLETE_GROUP})
#: Samples that are named; ids have a few hundred characters at most, and a log line its end.
NAMED = 8


@dataclass(slots=True)
class Losses:
    """Samples lost by reason, and the names of the first few of them."""

    reasons: Counter[DropReason] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def note(self, reason: DropReason, entries: Sequence[Entry]) -> None:
        """These are dropped."""
        self.reasons[reason] += len(entries)
        left = NAMED - len(self.first)
        self.first += [_name(entry.sample) for entry in entries[:left]]

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.reasons.total()

    @property
    def named(self) -> str:
        """The first few of them."""
        return _listed(self.first, self.samples)

    def __str__(self) -> str:
        """For the log: how many, why, and which."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.reasons.items()))
        are = "sample is" if self.samples == 1 else "samples are"
        return (
            f"{self.samples} accepted {are} lost, dropped by the shutdown ({reasons}): {self.named}"
        )


def name_undone(steps: OpenSteps, buffer: SampleBuffer) -> str:
    """The first of the samples that are in open steps or ready, oldest first, for the log."""
    undone = [entry for step in steps.uncommitted() for entry in step.entries()]
    undone.sort(key=lambda entry: entry.ticket)
    undone += buffer.ready(NAMED)
    names = [_name(entry.sample) for entry in undone[:NAMED]]
    return _listed(names, steps.in_flight + len(buffer))


def _listed(names: list[str], count: int) -> str:
    """The names of the first few of `count` samples."""
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _name(sample: Sample) -> str:
    """Its id, with its group."""
    return sample.sample_id + ("" if sample.group_id is None else f" (group {sample.group_id})")
