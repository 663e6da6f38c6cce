"""DP ranks that take no further step, and what the others are told of that.

    connected --goodbye--> left
    connected --loss--> away --rank_timeout--> lost
    missing after a restart ---rank_timeout--> lost
    connected --finish()--> finished, once every DP rank has: see finishing.py
    left, away, lost --hello--> connected

The last step that such a rank has taken is the last one that any rank may take: others are told to
stop there, so that none trains a step alone that was released to all. Who has begun one before it
hears that (no more than the rank that left prefetches) is told at its next; it is never committed.
Invariant: whoever asks for more, or waits for others to finish, gets an error that names the rank;
who does not, hears nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rollout_dispatcher.core.effects import Effect, LimitSteps
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.ranks.rank_state import RankState
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.errors import DispatcherError, PeerLost, StepContractError


@dataclass(frozen=True, slots=True, order=True)
class Departure:
    """A DP rank that takes no step after `last`. since: when it left."""

    last: int
    since: float
    dp_rank: int


class Departures:
    """Follows who leaves. timeout: seconds after which a rank without a connection is lost."""

    def __init__(self, ledger: StepLedger, lifecycle: Lifecycle, timeout: float) -> None:
        self._ledger, self._lifecycle, self._timeout = ledger, lifecycle, timeout
        self._generation = ledger.generation
        self._of_generation = 0
        self._away: dict[int, float] = {}  # since when, in that order
        self._departed, self._finished = self._generation.census(), self._generation.census()
        #: When an earlier process's generation began to be waited for, while it is.
        self._restored_at: float | None = None
        self._is_late = False
        self._told: dict[str, int] = {}  # by client id

    def restore(self, now: float) -> None:
        """Ranks of an earlier process's generation have so long to come back."""
        if self._generation.number:
            self._of_generation, self._restored_at = self._generation.number, now

    # -- ranks come and go ------------------------------------------------------------------

    def joined(self, dp_rank: int, client_id: str) -> None:
        """A DP rank has its place, on a connection that was told nothing."""
        if self._of_generation != self._generation.number:  # earlier ones' ranks are void
            self._of_generation = self._generation.number
            self._restored_at, self._is_late = None, False
            self._away.clear()
            self._told.clear()
        self._away.pop(dp_rank, None)
        self._told.pop(client_id, None)

    def left(self, dp_rank: int, client_id: str, now: float) -> None:
        """A DP rank's connection is gone, as the ledger knows."""
        rank = self._ledger.ranks.get(dp_rank)
        if rank is not None and rank.client_id == client_id:
            rank.away_since = now
            self._told.pop(client_id, None)
            if not rank.gone:
                self._away[dp_rank] = now

    def tick(self, now: float) -> None:
        """See who has been away for too long."""
        for dp_rank, since in list(self._away.items()):
            if since + self._timeout > now:
                break
            del self._away[dp_rank]
            self._ledger.ranks[dp_rank].lost = True
            self._generation.changed(dp_rank)
        if self._restored_at is not None and self._restored_at + self._timeout <= now:
            self._restored_at, self._is_late = None, True

    def next_deadline(self) -> float | None:
        """When somebody has been away for too long."""
        since = list(self._away.values())[:1]
        if self._restored_at is not None:
            since.append(self._restored_at)
        return min(since) + self._timeout if since else None

    # -- what follows -----------------------------------------------------------------------

    @property
    def deserted(self) -> bool:
        """Whether there was a trainer, and no rank of it will train anything more."""
        if self._generation.number == 0:
            return False
        ranks = self._ledger.ranks.values()
        over = self._generation.failed is not None
        return all(not rank.connected and (over or rank.gone or rank.lost) for rank in ranks) and (
            len(ranks) > 0 or self._is_late
        )

    def look(self) -> list[Effect]:
        """Tell ranks where to stop, and those who ask for more, why there is none."""
        if self._generation.failed is not None:
            return []
        gone, ended = min(self._departures(), default=None), min(self._finishes(), default=None)
        if gone is None and ended is None and not self._told:
            return []
        effects = self._limit(min((each.last for each in (gone, ended) if each), default=None))
        for dp_rank, rank in sorted(self._ledger.ranks.items()):
            if gone is not None and (self._asks(rank, gone) or self._waits_in_vain(rank)):
                effects.append(self._generation.refuse(dp_rank, self._explain(gone)))
            elif ended is not None and (self._asks(rank, ended) or rank.taken > ended.last):
                differs = self._goes_on(ended.dp_rank, dp_rank, rank)
                return [*effects, *self._generation.fail(differs)]
        return effects

    def _departures(self) -> Iterator[Departure]:
        """Ranks that left, or are lost, and have not finished."""
        number, ranks = self._generation.number, self._ledger.ranks
        for dp_rank in self._departed.find(number, lambda rank: rank.departed):
            yield Departure(ranks[dp_rank].taken, ranks[dp_rank].away_since, dp_rank)
        if self._is_late:
            for dp_rank in self._generation.missing:
                yield Departure(self._ledger.steps.committed, 0.0, dp_rank)

    def _finishes(self) -> Iterator[Departure]:
        """Ranks that have finished, while others have not."""
        number, ranks = self._generation.number, self._ledger.ranks
        if not self._lifecycle.finished:
            for dp_rank in self._finished.find(number, lambda rank: rank.finished is not None):
                yield Departure(ranks[dp_rank].taken, 0.0, dp_rank)

    def _limit(self, last: int | None) -> list[Effect]:
        """Tell connected ranks of their last step, as far as they do not know."""
        untold = []
        for dp_rank, rank in sorted(self._ledger.ranks.items()):
            if (
                rank.connected
                and not self._is_done(rank)
                and self._told.get(rank.client_id) != last
            ):
                untold.append(dp_rank)
                if last is None:
                    del self._told[rank.client_id]
                else:
                    self._told[rank.client_id] = last
        return [LimitSteps(tuple(untold), last)] if untold else []

    def _asks(self, rank: RankState, gone: Departure) -> bool:
        """Whether a rank asks for a step after another's last one."""
        return rank.hungry and rank.taken >= gone.last and not self._is_done(rank)

    def _waits_in_vain(self, rank: RankState) -> bool:
        """Whether a rank waits for all to finish, one of which is gone."""
        waits = rank.connected and rank.finished is not None
        return waits and not self._lifecycle.finished and not self._is_done(rank)

    def _is_done(self, rank: RankState) -> bool:
        """Whether it has begun all that there will be, and was told so."""
        return self._lifecycle.has_told(rank.client_id) and rank.taken >= self._ledger.steps.last

    def _explain(self, gone: Departure) -> DispatcherError:
        rank = self._ledger.ranks.get(gone.dp_rank)
        last = "before its first step" if gone.last < 0 else f"after step {gone.last}"
        if rank is None:
            what = (
                f"has not come back within {self._timeout:g} s (--rank-timeout) of the "
                "dispatcher's restart"
            )
        elif rank.gone:
            what = f"closed its stream {last}"
        else:
            what = f"was lost {last}: it has had no connection for {self._timeout:g} s "
            what += "(--rank-timeout)"
        return PeerLost(
            f"DP rank {gone.dp_rank} {what}, and others go on; every DP rank takes the same steps, "
            "and then calls finish() or close(): look at what ended it, and start the trainer again"
        )

    def _goes_on(self, ended: int, dp_rank: int, rank: RankState) -> DispatcherError:
        last = self._ledger.ranks[ended].finished
        return StepContractError(
            f"DP rank {ended} finished the run after step {last}, and DP rank {dp_rank} goes on "
            f"after step {rank.taken}; call stream.finish() on every rank after the same step, "
            "with the same arguments"
        )
