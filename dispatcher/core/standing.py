"""A DP rank as the ledger knows it: how it introduces itself, and what it has said since."""

from dataclasses import dataclass, field

from dispatcher.core.retained import Position


@dataclass(slots=True)
class RankStanding:
    """What one DP rank of the current generation has said; -1 for no step yet.

    begun: it has said where it goes on, by loading a checkpoint or by asking for a step.
    """

    client_id: str
    prefetch_steps: int
    last_seen: float
    connected: bool = True
    gone: bool = False
    taken: int = -1
    prepared: int = -1
    committed: int = -1
    hungry: bool = False
    begun: bool = False


@dataclass(frozen=True, slots=True)
class RankHello:
    """How a DP rank introduces itself; `generation=None` asks for a new one.

    resume: the checkpoint that it has loaded. saved: the last step of a checkpoint that it has
    reported saved.
    """

    client_id: str
    dp_rank: int
    dp_size: int
    generation: int | None
    prefetch_steps: int = 1
    taken: int = -1
    committed: int = -1
    hungry: bool = False
    received: dict[int, int] = field(default_factory=dict)
    resume: Position | None = None
    saved: int = -1

    @property
    def begun(self) -> bool:
        """Whether it says where it goes on."""
        return self.resume is not None or self.hungry or max(self.taken, self.committed) >= 0
