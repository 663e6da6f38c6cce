"""The table of DP ranks: what is told of each, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from rollout_dispatcher.cli.top.history import History
from rollout_dispatcher.cli.top.reading import Reading

#: A rank that needs a tenth more than the median is named, as in docs/measured.md.
SLOW = 1.1


class Presence(IntEnum):
    """Whether a rank is there; what is worse comes first."""

    MISSING = 0
    ABSENT = 1
    LEFT = 2
    HUNG = 3
    CONNECTED = 4


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank. step: that it trains, or has trained last. data, others, compute: shares of the
    time of late in which it waited for a step, and, of that of the last steps, waited for slower
    ranks, and computed; None where nothing is told. seen: seconds since it was heard of.
    """

    dp_rank: int
    presence: Presence
    step: int | None
    data: float | None
    others: float | None
    compute: float | None
    slowness: float | None
    seen: float | None

    @property
    def is_slow(self) -> bool:
        """Whether it is named as slow."""
        return self.slowness is not None and self.slowness >= SLOW


def rank_rows(history: History) -> list[RankRow]:
    """Every rank of the run, in order."""
    at = history.last
    waited = history.shares("rank_wait_seconds_total").items()
    data = {rank: share for rank, share in waited if str(rank) in at.status["ranks"]}
    others = history.shares_of_steps("rank_straggler_wait_seconds_total")
    compute = history.shares_of_steps("rank_compute_seconds_total")
    slowness = at.by_rank("rank_slowness_ratio") or _last_told(at)
    seen = at.by_rank("rank_last_seen_timestamp_seconds")
    absent = frozenset(at.status["absent_ranks"])
    return [
        RankRow(
            rank, _presence(at, rank, absent), _step(at, rank),
            data.get(rank), others.get(rank), compute.get(rank), slowness.get(rank),
            max(0.0, at.time - seen[rank]) if rank in seen else None,
        )
        for rank in range(at.status["dp_size"])
    ]  # fmt: skip


def worst_first(rows: Sequence[RankRow]) -> list[RankRow]:
    """Who is not there, then the slowest; where no speed is told, who waits least for data."""
    return sorted(
        rows, key=lambda row: (row.presence, -(row.slowness or 0.0), row.data or 0.0, row.dp_rank)
    )


def _last_told(at: Reading) -> dict[int, float]:
    """Where metrics of single ranks are off, /statusz has the last step that was measured."""
    last = at.status["measured"]["last_step"] or {"ranks": []}
    told = {rank["dp_rank"]: rank["slowness"] for rank in last["ranks"]}
    return {rank: slowness for rank, slowness in told.items() if slowness is not None}


def _presence(at: Reading, rank: int, absent: frozenset[int]) -> Presence:
    said = at.status["ranks"].get(str(rank))
    if said is None:
        return Presence.MISSING
    if rank in at.status["hung_ranks"]:
        return Presence.HUNG
    if said["connected"]:
        return Presence.CONNECTED
    return Presence.ABSENT if rank in absent else Presence.LEFT


def _step(at: Reading, rank: int) -> int | None:
    said = at.status["ranks"].get(str(rank))
    return None if said is None or said["taken"] < 0 else int(said["taken"])
