"""Which DP ranks hang: those that are behind the others while none of them gets on.

Training ranks are in lockstep, so where one hangs the others soon stand still as well, in a
collective or in `next()`, and heartbeats go on everywhere. What tells them apart is how far each
has got (`Position`): steps, micro-batches handed out, collectives begun. Ranks that all stand at
the same position are paused (evaluation, weight sync), or hang where nothing tells them apart.

Invariant: no rank is named while any rank gets on, while ranks are away (which is said otherwise),
or while no rank holds a step.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from rollout_dispatcher.core.ranks.rank_state import Position
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import OpenStep

#: Ranks stand still once none has got on for so many times what a step usually takes, from the
#: first rank's taking it to the last one's commit: steps of one run differ by less.
USUAL_STEPS = 3
#: But for at least so long: a checkpoint or a garbage collection is no hang.
LEAST_SECONDS = 60.0
#: Before a step of this generation was committed, as its first one compiles; torch's own default
#: for collectives that hang.
FIRST_SECONDS = 600.0
#: Steps that the usual one is the median of.
REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Standstill:
    """No DP rank gets on. hung: those that are behind all others; empty where all stand alike.

    since: when a rank got on last. usual: seconds that a step usually takes; None if not known.
    positions: of every rank.
    """

    hung: tuple[int, ...]
    since: float
    usual: float | None
    positions: Mapping[int, Position]

    @property
    def where(self) -> str:
        """In words, what the others have done, and those that hang have not."""
        behind = min(self.positions.values())
        ahead = max(self.positions.values())
        if not self.hung:
            return f"at the same place of step {ahead.taken}"
        if behind.committed < ahead.committed:
            return f"before the commit of step {behind.committed + 1}"
        if behind.taken < ahead.taken:
            return f"before step {behind.taken + 1}"
        if behind.handed_out < ahead.handed_out:
            first = f"{behind.handed_out} of its micro-batches handed out"
            return f"in step {behind.taken}, {first}, and {ahead.handed_out} on others"
        return f"in step {behind.taken}, before a collective that others have begun"


class Lockstep:
    """Watches how far the DP ranks of the current generation get."""

    def __init__(self, ledger: StepLedger) -> None:
        self._ledger = ledger
        self._generation = 0
        self._positions: dict[int, Position] = {}
        self._got_on = 0.0
        self._taken: dict[int, float] = {}  # by step, when the first rank took it
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def joined(self, dp_rank: int, now: float) -> None:
        """A rank is there, maybe again."""
        self._positions.pop(dp_rank, None)
        self.heard(dp_rank, now)

    def heard(self, dp_rank: int, now: float) -> None:
        """A rank has said how far it is."""
        generation = self._ledger.generation
        if generation.number != self._generation:
            self._generation = generation.number
            for known in (self._positions, self._taken, self._took):
                known.clear()
        rank = generation.ranks.get(dp_rank)
        if rank is None or self._positions.get(dp_rank) == rank.position:
            return
        self._positions[dp_rank], self._got_on = rank.position, now
        if rank.taken > rank.committed:
            self._taken.setdefault(rank.taken, now)

    def committed(self, steps: Iterable[OpenStep], now: float) -> None:
        """Every rank has applied these steps."""
        for step in steps:
            if (began := self._taken.pop(step.number, None)) is not None:
                self._took.append(now - began)

    def standstill(self, now: float) -> Standstill | None:
        """Why nothing gets on; None while anything does, or waits for samples."""
        ledger, ranks = self._ledger, self._ledger.ranks
        usual = median(self._took) if self._took else None
        patience = FIRST_SECONDS if usual is None else max(LEAST_SECONDS, USUAL_STEPS * usual)
        if (
            now - self._got_on < patience
            or ledger.generation.failed is not None
            or len(ranks) < ledger.generation.dp_size
            or not all(rank.connected for rank in ranks.values())
            or not any(rank.taken > rank.committed for rank in ranks.values())
            or (ledger.wanted and ledger.hungry)
        ):
            return None
        positions = {dp_rank: rank.position for dp_rank, rank in sorted(ranks.items())}
        last, first = min(positions.values()), max(positions.values())
        hung = [at for at, position in positions.items() if position == last < first]
        return Standstill(tuple(hung), self._got_on, usual, positions)
