"""How a run ends: producers end the stream, DP ranks finish, or the service is told to stop.

    running --end_stream--> ended --nothing left to plan or commit--> drained
       |                      |                                         |
       +--------drain---------+--> draining --the same--> drained       +--a rewind--> as before
       |                      |
       +--DP ranks finish-----+--> drained at once: what is left is not planned any more

After the end nothing is accepted. Invariant: a rank is told of the end when nothing is left to be
planned, once on each connection; the run is drained when every step is committed.

`Joining`: a DP rank says hello: what of the run changes with that, and what it and the others are
told.

In this order: the steps that its checkpoint commits or rewinds, the ranks that its new generation
fences, its welcome, its deliveries. Nobody is told anything of a generation before it is welcomed
in it. Invariant: where a hello is refused by raising, nothing has changed.

`Departures`: DP ranks that take no further step, and what the others are told of that.

    connected --goodbye--> left
    connected --loss--> away --rank_timeout--> lost
    missing after a restart ---rank_timeout--> lost
    connected --finish()--> finished, once every DP rank has: see below
    left, away, lost --hello--> connected

The last step that such a rank has taken is the last one that any rank may take: others are told to
stop there, so that none trains a step alone that was released to all. Who has begun one before it
hears that (no more than the rank that left prefetches) is told at its next; it is never committed.
Invariant: whoever asks for more, or waits for others to finish, gets an error that names the rank;
who does not, hears nothing.

`Finishing`: the trainer has had enough: every DP rank has said so after the same step.

    running --Finish of every DP rank--> finished --told to all--> over
                                             |
                                             +--kill -9, restart--> finished

Producers are told, whatever they wait for; nothing is planned any more. What was not used stays for
the next process if there is a journal, and is dropped otherwise, or where the ranks ask for that.
Invariant: that the run is finished is a fact before anybody hears of it, and stands until everybody
has; a start on the journal after that goes on with what is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.effects import (
    Drained,
    Effect,
    EndProducers,
    EndRanks,
    LimitSteps,
    RefuseRank,
    WelcomeRank,
)
from rollout_dispatcher.core.facts import (
    DropReason,
    Finished,
    GenerationBegan,
    RecoveredState,
    Withdrawn,
)
from rollout_dispatcher.core.steps.generation import check_run
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition, RankHello, RankState
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import (
    DispatcherError,
    PeerLost,
    ProtocolError,
    RunFinished,
    StepContractError,
)

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts


class Lifecycle:
    """Where a run stands between its beginning and its end.

    batch: samples in a whole dispatch batch. flush_partial: a last smaller one is dispatched too.
    """

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self._buffer, self._ledger, self._dropping = parts.buffer, parts.ledger, parts.dropping
        self._batch, self._flush_partial = config.trigger.batch, config.flush_partial
        #: Whether nothing more is accepted, and why.
        self.ended = False
        self.reason = EndReason.ENDED
        #: Whether the service is to stop.
        self.draining = False
        #: Whether the stream has ended and everything is committed, or the run is finished.
        self.drained = False
        self._told: set[str] = set()
        self._untold = self._ledger.generation.filtered()

    @property
    def state(self) -> str:
        """Where the run stands: running, ended, draining or drained."""
        if self.drained:
            return "drained"
        return "draining" if self.draining else "ended" if self.ended else "running"

    @property
    def finished(self) -> bool:
        """Whether the DP ranks have finished the run."""
        return self.ended and self.reason is EndReason.FINISHED

    def end(self, reason: EndReason) -> None:
        """Nothing more is accepted; that DP ranks finish counts beside any other reason."""
        if reason is EndReason.FINISHED:  # ranks that were told of another end wait for this one
            self._told.clear()
            for dp_rank in self._ledger.ranks:
                self._ledger.generation.changed(dp_rank)
        elif self.ended:
            return
        self.ended, self.reason = True, reason

    def flushes(self, ready: int) -> bool:
        """Whether so many samples go as they are, since nothing is to be waited for."""
        return self.ended and self._may_go(ready)

    def untold(self, client_id: str) -> None:
        """A rank's connection is gone or new: it may not have heard of the end."""
        self._told.discard(client_id)

    def has_told(self, client_id: str) -> bool:
        """Whether a rank was told of the end, on the connection that it has."""
        return client_id in self._told

    def finish(self, *, flushing: bool) -> list[Effect]:
        """Nothing is being planned: tell ranks if nothing is left, and the shell when all is done.

        flushing: an ended phase still has samples.
        """
        if self.finished:
            return [*self._end_ranks(), *self._end()]
        if not self.ended or self._ledger.steps.waiting:
            return []
        if not flushing and not self._may_go(self._buffer.ready_units):
            self._dropping.everything(DropReason.LAST_BATCH)
        if len(self._buffer):
            return []
        return [*self._end_ranks(), *self._end()]

    def _may_go(self, ready: int) -> bool:
        return self._flush_partial or ready >= self._batch

    def _end_ranks(self) -> list[Effect]:
        generation, told = self._ledger.generation, self._told
        untold = self._untold.find(
            generation.number, lambda rank: rank.connected and rank.client_id not in told
        )
        if not untold:
            return []
        dp_ranks = sorted(untold)
        for dp_rank in dp_ranks:
            told.add(generation.ranks[dp_rank].client_id)
            generation.changed(dp_rank)
        return [EndRanks(tuple(dp_ranks), self.reason)]

    def _end(self) -> list[Effect]:
        if self.drained or (self._ledger.steps and not self.finished):
            return []
        self.drained = True
        if self.finished:
            return [Drained("finished")]
        return [Drained("drained" if self.draining else "done")]


class Joining:
    """Gives DP ranks their places."""

    def __init__(self, parts: "Parts") -> None:
        self._ledger, self._checkpoints = parts.ledger, parts.checkpoints
        self._freshness, self._lifecycle, self._note = parts.freshness, parts.lifecycle, parts.note

    def join(self, hello: RankHello, run_id: str, now: float) -> list[Effect]:
        """Welcome a DP rank, or refuse it by raising; see `Dispatch.join`."""
        check_run(hello, run_id)
        generation = self._ledger.generation
        hello = self._ledger.check(hello)
        if hello.dp_rank == 0:
            self._checkpoints.check_saved(hello.saved)
        if hello.generation is not None and (error := generation.disagreement(hello)) is not None:
            return [*generation.fail(error), RefuseRank(hello.client_id, error)]
        if hello.resume is not None:
            self._checkpoints.check_position(hello.resume, run_id)
        return self._admit(hello, run_id, now)

    def _admit(self, hello: RankHello, run_id: str, now: float) -> list[Effect]:
        ledger, generation = self._ledger, self._ledger.generation
        effects: list[Effect] = []
        if hello.resume is not None and generation.resumed is None:
            effects += self._resume(hello.resume, run_id, now)
        if hello.generation is None:
            effects += ledger.begin(hello)
            self._note(GenerationBegan(generation.number, generation.dp_size))
        deliveries = ledger.join(hello, now)
        self._lifecycle.untold(hello.client_id)
        committed = ledger.ranks[hello.dp_rank].committed
        effects.append(
            WelcomeRank(hello.client_id, hello.dp_rank, run_id, generation.number, committed)
        )
        effects += deliveries
        effects += self._checkpoints.committed(ledger.commit(hello.dp_rank, committed), now)
        if hello.dp_rank == 0:
            self._checkpoints.checkpoint_saved(hello.saved)
        return effects + ledger.release_ready()

    def _resume(self, position: CheckpointPosition, run_id: str, now: float) -> list[Effect]:
        """The generation's first rank has loaded a checkpoint."""
        committed, rewound = self._checkpoints.resume(position, run_id, now)
        if rewound.steps:
            self._freshness.reported = None  # the weights are older ones again
        self._lifecycle.drained = False
        return [*committed, rewound]


@dataclass(frozen=True, slots=True, order=True)
class Departure:
    """A DP rank that takes no step after `last`. since: when it left."""

    last: int
    since: float
    dp_rank: int


class Departures:
    """Follows who leaves. timeout: seconds after which a rank without a connection is lost."""

    def __init__(self, parts: "Parts", timeout: float) -> None:
        self._ledger, self._lifecycle, self._timeout = parts.ledger, parts.lifecycle, timeout
        self._generation = parts.ledger.generation
        self._of_generation = 0
        self._away: dict[int, float] = {}  # since when, in that order
        self._departed = self._generation.filtered()
        self._finished = self._generation.filtered()
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


RUN_FINISHED = (
    "the trainer has finished the run and takes no more samples; stop pushing, or push to the next "
    "run"
)


class Finishing:
    """Hears that DP ranks finish. keeps: what is not used outlives the process, in a journal."""

    def __init__(self, parts: "Parts", *, keeps: bool) -> None:
        self._ledger, self._lifecycle = parts.ledger, parts.lifecycle
        self._admission, self._dropping = parts.admission, parts.dropping
        self._note, self._keeps = parts.note, keeps

    def restore(self, memory: RecoveredState) -> None:
        """An earlier process was not done with telling everybody."""
        if memory.finished:
            self._end()

    def finish(self, dp_rank: int, step: int, *, discard: bool) -> None:
        """A DP rank has finished after this step; `look` follows.

        Raises ProtocolError for a step that is not the last one that it has committed.
        """
        rank = self._ledger.active_rank(dp_rank)
        if step != rank.committed:
            raise ProtocolError(
                f"DP rank {dp_rank} finished after step {step}, and has committed step "
                f"{rank.committed}"
            )
        rank.finished, rank.discards, rank.hungry = step, discard, False
        self._ledger.generation.changed(dp_rank)

    def look(self) -> list[Effect]:
        """End the run if every DP rank has finished; fail all of them where they differ."""
        generation = self._ledger.generation
        said = {
            at: (rank.finished, rank.discards)
            for at, rank in sorted(generation.ranks.items())
            if rank.finished is not None
        }
        if not said or self._lifecycle.drained or generation.failed is not None:
            return []
        (first, mine), *others = said.items()
        other = next((each for each in others if each[1] != mine), None)
        if other is not None:
            return [*generation.fail(_difference((first, mine), other))]
        return self._decide(discard=mine[1]) if len(said) == generation.dp_size else []

    def refuse(self) -> list[Effect]:
        """Tell producers that are connected, of which some may be new."""
        return [EndProducers(RunFinished(RUN_FINISHED))] if self._lifecycle.finished else []

    def carried_out(self) -> None:
        """Everybody has been told, as far as they are there: the next process goes on."""
        if self._lifecycle.finished:
            self._note(Finished(pending=False))

    def _decide(self, *, discard: bool) -> list[Effect]:
        self._note(Finished(pending=True))
        effects = self._end()
        if discard or not self._keeps:
            self._drop_unused()
        return [*effects, *self.refuse()]

    def _end(self) -> list[Effect]:
        self._lifecycle.end(EndReason.FINISHED)
        self._ledger.over = True
        return self._admission.end(RunFinished.code, RUN_FINISHED)

    def _drop_unused(self) -> None:
        for step in self._ledger.steps.withdraw_all():
            self._dropping.planned(DropReason.UNUSED, list(step.entries()))
            self._note(Withdrawn(step.number, step.attempt))
        self._dropping.everything(DropReason.UNUSED)


def _difference(*words: tuple[int, tuple[int | None, bool]]) -> StepContractError:
    told = [
        f"DP rank {dp_rank} finished the run after step {step} with discard={discard}"
        for dp_rank, (step, discard) in words
    ]
    return StepContractError(
        f"{', and '.join(told)}; call stream.finish() on every rank after the same step, with the "
        "same arguments"
    )
