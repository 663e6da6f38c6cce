"""Admissions on their own: a buffer, and a batch that a step needs."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_dispatcher.core.buffer.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.limits import BufferLimits
from rollout_dispatcher.core.buffer.open_groups import OpenGroups
from rollout_dispatcher.core.facts import Note
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.totals import Totals


@dataclass
class Lobby:
    """An admission and what it lets into. lost: groups that lack a member, once for each."""

    limits: BufferLimits
    batch: int = 1
    credits_: int = 2
    id_horizon: int = 100
    note: Note | None = None
    kind: Callable[..., Admission] = Admission
    lost: list[str] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.producers = Producers(60.0)
        groups = OpenGroups(self.producers.__contains__, 60.0)
        self.buffer = SampleBuffer(self.limits, groups)
        self.closed_groups = ClosedGroups(60.0)
        self.admission = self.kind(
            self.buffer,
            self.totals,
            self.producers,
            self.closed_groups,
            DuplicateMemory(self.id_horizon),
            credits_=self.credits_,
            lacking=lambda: self.batch - self.buffer.ready_units,
            lost=self._lose,
            note=self.note,
        )

    def _lose(self, group_id: str, size: int | None, why: str, now: float) -> None:  # noqa: ARG002
        self.lost.append(group_id)
