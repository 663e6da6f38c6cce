"""Admissions on their own: a buffer, and a batch that a step needs."""

from dataclasses import dataclass, field

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.capacity import Capacity
from rollout_dispatcher.core.admission.deciding import Deciding
from rollout_dispatcher.core.admission.eligibility import Eligibility
from rollout_dispatcher.core.admission.held_pushes import HeldPushes
from rollout_dispatcher.core.admission.outcomes import Outcomes
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.limits import BufferLimits
from rollout_dispatcher.core.buffer.open_groups import OpenGroups
from rollout_dispatcher.core.facts import Note
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.references.objects import Objects
from rollout_dispatcher.core.totals import Totals


@dataclass
class Lobby:
    """An admission and what it lets into. lost: groups that lack a member, once for each."""

    limits: BufferLimits
    batch: int = 1
    credits_: int = 2
    id_horizon: int = 100
    note: Note | None = None
    kind: type[Deciding] = Deciding
    admits: type[Admission] = Admission
    lost: list[str] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.producers = Producers(60.0)
        groups = OpenGroups(self.producers.__contains__, 60.0)
        self.buffer = SampleBuffer(self.limits, groups)
        self.closed_groups = ClosedGroups(60.0)
        memory = DuplicateMemory(self.id_horizon)
        self.capacity = Capacity(self.buffer, lambda: self.batch - self.buffer.ready_units)
        eligibility = Eligibility(self.buffer, self.producers, self.closed_groups, memory)
        outcomes = Outcomes(
            self.buffer, self.totals, self.producers, memory, self.note,
            objects=Objects(self.limits.stores),
        )  # fmt: skip
        held = HeldPushes(self.limits.held_bytes)
        groups.on_change = self.closed_groups.on_change = held.regroup
        deciding = self.kind(
            self.buffer, eligibility, self.capacity, outcomes, held=held, lost=self._lose
        )
        self.admission = self.admits(
            deciding, eligibility, self.capacity, held, self.note, credits_=self.credits_
        )

    def _lose(self, group_id: str, size: int | None, why: str, now: float) -> None:  # noqa: ARG002
        self.lost.append(group_id)
