"""A DP rank as the ledger knows it: how it introduces itself, and what it has said since."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

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


class Everyone:
    """Asks whether something holds for every DP rank, once for every word that a rank says.

    Most of the time it does not, so the rank that was found wanting last is asked first, and the
    search goes on from there. What comes true for one rank after the other thus costs one look at
    each of them, instead of one at all of them for each.
    """

    def __init__(self, ranks: Mapping[int, RankStanding]) -> None:
        self._ranks = ranks
        self._asked = 0

    def all(self, dp_size: int, holds: Callable[[RankStanding], bool]) -> bool:
        """Whether all of `dp_size` ranks are there and `holds` is true for each."""
        for dp_rank in chain(range(self._asked, dp_size), range(min(self._asked, dp_size))):
            rank = self._ranks.get(dp_rank)
            if rank is None or not holds(rank):
                self._asked = dp_rank
                return False
        return True


def prepared(step: int) -> Callable[[RankStanding], bool]:
    """Whether a rank holds the header of this step."""
    return lambda rank: rank.prepared >= step


def committed(step: int) -> Callable[[RankStanding], bool]:
    """Whether a rank has applied this step."""
    return lambda rank: rank.committed >= step


def has_room(last: int) -> Callable[[RankStanding], bool]:
    """Whether a rank is there and has room for one step more than `last`."""

    def holds(rank: RankStanding) -> bool:
        ahead = last - rank.taken
        return rank.connected and (ahead < rank.prefetch_steps or (rank.hungry and not ahead))

    return holds


def is_ready(rank: RankStanding) -> bool:
    """Whether a rank is there and has said where it goes on."""
    return rank.connected and rank.begun
