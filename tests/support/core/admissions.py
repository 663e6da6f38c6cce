"""Admissions on their own: a buffer, and a batch that a step needs."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_dispatcher.core.admission.admission import Admission, Deciding
from rollout_dispatcher.core.admission.eligibility import Capacity, Eligibility, Outcomes
from rollout_dispatcher.core.admission.held_pushes import HeldPushes
from rollout_dispatcher.core.admission.producers import DuplicateMemory, Producers
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.buffer.objects import Objects
from rollout_dispatcher.core.buffer.open_groups import ClosedGroups, OpenGroups
from rollout_dispatcher.core.facts import Note
from rollout_dispatcher.core.totals import Totals


def make_groups(is_there: Callable[[str], bool] = bool) -> OpenGroups:
    """Open groups on their own, and where those that have ended are remembered."""
    return OpenGroups(is_there, 60.0, ClosedGroups(100, _ignore))


def _ignore(fact: object) -> None:
    """Nobody keeps facts."""


@dataclass
class Lobby:
    """An admission and what it lets into."""

    limits: BufferLimits
    batch: int = 1
    credits_: int = 2
    id_horizon: int = 100
    note: Note | None = None
    kind: type[Deciding] = Deciding
    admits: type[Admission] = Admission
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.producers = Producers(60.0)
        groups = make_groups(self.producers.__contains__)
        self.buffer = SampleBuffer(self.limits, groups)
        self.closed_groups = groups.closed
        memory = DuplicateMemory(self.id_horizon)
        self.capacity = Capacity(self.buffer, lambda: self.batch - self.buffer.ready_units)
        eligibility = Eligibility(self.buffer, self.producers, self.closed_groups, memory)
        objects = Objects(self.limits.stores)
        outcomes = Outcomes(
            self.buffer, self.totals, self.producers, memory, self.note, objects=objects
        )
        dropping = Dropping(
            self.buffer, self.totals, self.closed_groups, memory, self.note or _ignore,
            objects=objects, keep=False,
        )  # fmt: skip
        held = HeldPushes(self.limits.held_bytes)
        groups.on_change = self.closed_groups.on_change = held.regroup
        deciding = self.kind(self.buffer, eligibility, self.capacity, outcomes, dropping=dropping)
        self.admission = self.admits(
            deciding,
            eligibility,
            self.capacity,
            held,
            self.note,
            producers=self.producers,
            credits_=self.credits_,
        )
