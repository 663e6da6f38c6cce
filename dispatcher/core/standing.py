"""A DP rank as the ledger knows it: how it introduces itself, and what it has said since."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RankStanding:
    """What one DP rank of the current generation has said; -1 for no step yet."""

    client_id: str
    prefetch_steps: int
    last_seen: float
    connected: bool = True
    gone: bool = False
    taken: int = -1
    prepared: int = -1
    committed: int = -1
    hungry: bool = False


@dataclass(frozen=True, slots=True)
class RankHello:
    """How a DP rank introduces itself; `generation=None` asks for a new one."""

    client_id: str
    dp_rank: int
    dp_size: int
    generation: int | None
    prefetch_steps: int = 1
    taken: int = -1
    committed: int = -1
    hungry: bool = False
    received: dict[int, int] = field(default_factory=dict)
