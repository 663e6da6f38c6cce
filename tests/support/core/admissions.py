"""Admissions on their own: a buffer, and a batch that a step needs."""

from collections.abc import Callable
from dataclasses import dataclass

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.buffer.open_groups import ClosedGroups, OpenGroups
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.facts import AppendFact
from rollout_dispatcher.core.parts import Parts
from rollout_dispatcher.core.planning.trigger import TriggerConfig


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
    note: AppendFact | None = None

    def __post_init__(self) -> None:
        config = DispatchConfig(
            1, self.limits, TriggerConfig(self.batch, self.batch, 1.0),
            durable=self.note is not None, producer_credits=self.credits_,
            id_horizon=self.id_horizon,
        )  # fmt: skip
        parts = Parts(config, self.note or _ignore)
        self.buffer, self.capacity, self.totals = parts.buffer, parts.capacity, parts.totals
        self.producers, self.closed_groups = parts.producers, parts.closed_groups
        self.admission = Admission(parts, config)
