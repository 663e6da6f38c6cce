"""How a run ends: producers end the stream, DP ranks finish, or the service shuts down.

    running --end_stream--> ended --nothing left to plan or commit--> drained
       |                      |                                         |
       +--------drain---------+--> draining --the same--> drained       +--a rewind--> as before
       |                      |
       +--DP ranks finish-----+--> drained at once: buffered samples are not planned any more

After the end the core accepts no sample. Invariant: each rank is sent the end once on each
connection, when no sample is left to plan; the run is drained when every step is committed.

`Joining`: handles the hello of a DP rank. Effects, in order: commits and rewinds by its checkpoint,
the ranks that its new generation fences, its welcome, its deliveries. No rank is sent anything of a
generation before its welcome. Invariant: a hello that is refused by raising changes nothing.

`RankDepartures`: DP ranks that take no further step, and how the others are stopped.

    connected --goodbye--> left
    connected --loss--> away --rank_timeout--> lost
    missing after a restart ---rank_timeout--> lost
    connected --finish()--> finished, once every DP rank has: see below
    left, away, lost --hello--> connected

No rank may go past the last step that the departed rank took (its *stop point*), so that no rank
trains a step alone that was released to all. A rank that had already begun a later step (at most as
many as a rank prefetches) learns of the limit when it asks for the next one; that step is never
committed. Invariant: a rank that asks for a further step, or waits for others to finish, gets an
error that names the departed rank; other ranks get none.

`Finishing`: the run is finished once every DP rank has sent Finish after the same step.

    running --Finish of every DP rank--> finished --sent to all--> over
                                             |
                                             +--kill -9, restart--> finished

The finish is sent to every producer, blocked or not; no step is planned any more. Unused samples
stay in the journal for the next process; without a journal, or if the ranks ask for it (`discard`),
they are dropped. Invariant: the finish is a fact before it is sent to any peer, and stands until it
was sent to every peer; a later start on the journal continues with the unused samples.
"""

from collections.abc import Iterable, Iterator
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
    """The state of the run: running, ended, draining or drained."""

    def __init__(self, parts: "Parts", config: DispatchConfig) -> None:
        self._buffer, self._ledger, self._dropping = parts.buffer, parts.ledger, parts.dropping
        self._batch, self._flush_partial = config.trigger.batch, config.flush_partial
        #: Whether nothing more is accepted, and why.
        self.ended = False
        self.reason = EndReason.ENDED
        #: Whether the service is to stop.
        self.draining = False
        #: Whether the run is over: the stream has ended and every step is committed, or the ranks
        #: have finished.
        self.drained = False
        self._not_notified = self._ledger.generation.filtered(
            lambda rank: rank.connected and not rank.end_sent
        )

    @property
    def state(self) -> str:
        """running, ended, draining or drained."""
        if self.drained:
            return "drained"
        return "draining" if self.draining else "ended" if self.ended else "running"

    @property
    def finished(self) -> bool:
        """Whether the DP ranks have finished the run."""
        return self.ended and self.reason is EndReason.FINISHED

    def end(self, reason: EndReason) -> None:
        """Accept nothing more. FINISHED overrides an earlier reason."""
        if reason is EndReason.FINISHED:  # replaces another end that ranks were sent
            for dp_rank, rank in self._ledger.ranks.items():
                rank.end_sent = False
                self._ledger.generation.changed(dp_rank)
        elif self.ended:
            return
        self.ended, self.reason = True, reason

    def should_flush(self, ready: int) -> bool:
        """Whether a step of `ready` samples is planned although it may be smaller than a batch."""
        return self.ended and self._can_plan_partial(ready)

    def end_if_done(self, *, flushing: bool) -> list[Effect]:
        """End the ranks' streams if no sample is left to plan, and the run if every step is
        committed. To be called while no plan is requested.

        flushing: an ended phase still has samples.
        """
        if self.finished:
            return [*self._end_ranks(), *self._end()]
        if not self.ended or self._ledger.steps.waiting:
            return []
        if not flushing and not self._can_plan_partial(self._buffer.ready_units):
            self._dropping.everything(DropReason.LAST_BATCH)
        if len(self._buffer):
            return []
        return [*self._end_ranks(), *self._end()]

    def _can_plan_partial(self, ready: int) -> bool:
        return self._flush_partial or ready >= self._batch

    def _end_ranks(self) -> list[Effect]:
        dp_ranks = sorted(self._not_notified.find())
        for dp_rank in dp_ranks:
            self._ledger.ranks[dp_rank].end_sent = True
            self._ledger.generation.changed(dp_rank)
        return [EndRanks(tuple(dp_ranks), self.reason)] if dp_ranks else []

    def _end(self) -> list[Effect]:
        if self.drained or (self._ledger.steps and not self.finished):
            return []
        self.drained = True
        if self.finished:
            return [Drained("finished")]
        return [Drained("drained" if self.draining else "done")]


class Joining:
    """Admits DP ranks to the generation."""

    def __init__(self, parts: "Parts") -> None:
        self._ledger, self._checkpoints = parts.ledger, parts.checkpoints
        self._rank_time = parts.rank_time
        self._freshness, self._lifecycle, self._append = (
            parts.freshness,
            parts.lifecycle,
            parts.append_fact,
        )

    def join(self, hello: RankHello, run_id: str, now: float) -> list[Effect]:
        """Welcome a DP rank, or refuse it by raising; see `DispatcherCore.join`."""
        check_run(hello, run_id)
        generation = self._ledger.generation
        hello = self._ledger.check(hello)
        if hello.dp_rank == 0:
            self._checkpoints.check_saved(hello.saved)
        if hello.generation is not None and (error := generation.disagreement(hello)) is not None:
            self._rank_time.charge(now)
            return [*generation.fail(error), RefuseRank(hello.client_id, error)]
        if hello.resume is not None:
            self._checkpoints.check_position(hello.resume, run_id)
        self._rank_time.charge(now)  # only now: one that is refused by raising changes nothing
        return self._admit(hello, run_id, now)

    def _admit(self, hello: RankHello, run_id: str, now: float) -> list[Effect]:
        ledger, generation = self._ledger, self._ledger.generation
        effects: list[Effect] = []
        if hello.resume is not None and generation.resumed is None:
            effects += self._resume(hello.resume, run_id, now)
        if hello.generation is None:
            effects += ledger.begin(hello)
            self._append(GenerationBegan(generation.number, generation.dp_size))
        deliveries = ledger.join(hello, now)
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
class StopPoint:
    """A DP rank that departed or finished takes no step after `last`. since: when it left."""

    last: int
    since: float
    dp_rank: int


class RankDepartures:
    """Stops the other ranks when one has departed.

    timeout: seconds after which a rank without a connection is lost.
    """

    def __init__(self, parts: "Parts", timeout: float) -> None:
        self._ledger, self._lifecycle, self._timeout = parts.ledger, parts.lifecycle, timeout
        self._generation = parts.ledger.generation
        self._of_generation = 0
        self._away: dict[int, float] = {}  # since when, in that order
        self._stopped = self._generation.filtered(
            lambda rank: rank.gone or rank.lost or rank.finished is not None
        )
        #: When this process began to wait for the ranks of an earlier one's generation.
        self._restored_at: float | None = None
        self._is_late = False
        self._limited = self._generation.filtered(lambda rank: rank.limit_sent is not None)

    def restore(self, now: float) -> None:
        """Wait `timeout` seconds for the ranks of an earlier process's generation."""
        if self._generation.number:
            self._of_generation, self._restored_at = self._generation.number, now

    # -- ranks come and go ------------------------------------------------------------------

    def joined(self, dp_rank: int) -> None:
        """A DP rank joined, on a new connection."""
        if self._of_generation != self._generation.number:  # earlier ones' ranks are void
            self._of_generation = self._generation.number
            self._restored_at, self._is_late = None, False
            self._away.clear()
        self._away.pop(dp_rank, None)

    def left(self, dp_rank: int, client_id: str, now: float) -> None:
        """A DP rank's connection is gone. To be called after `StepLedger.leave`."""
        rank = self._ledger.ranks.get(dp_rank)
        if rank is not None and rank.client_id == client_id:
            rank.away_since = now
            if not rank.gone:
                self._away[dp_rank] = now

    def tick(self, now: float) -> None:
        """Count ranks as lost that have been away for `timeout` seconds."""
        for dp_rank, since in list(self._away.items()):
            if since + self._timeout > now:
                break
            del self._away[dp_rank]
            self._ledger.ranks[dp_rank].lost = True
            self._generation.changed(dp_rank)
        if self._restored_at is not None and self._restored_at + self._timeout <= now:
            self._restored_at, self._is_late = None, True

    def next_deadline(self) -> float | None:
        """When the next rank has been away for `timeout` seconds; None if none is away."""
        since = list(self._away.values())[:1]
        if self._restored_at is not None:
            since.append(self._restored_at)
        return min(since) + self._timeout if since else None

    # -- what follows -----------------------------------------------------------------------

    @property
    def deserted(self) -> bool:
        """Whether the trainer is gone: every rank that had joined has left or is lost, or its
        generation failed.
        """
        if self._generation.number == 0:
            return False
        ranks = self._ledger.ranks.values()
        over = self._generation.failed is not None
        return all(not rank.connected and (over or rank.gone or rank.lost) for rank in ranks) and (
            len(ranks) > 0 or self._is_late
        )

    def stop_others(self) -> list[Effect]:
        """Limit connected ranks to the stop point, and refuse those that ask for a step after
        it.
        """
        if self._generation.failed is not None:
            return []
        stopped = self._stopped.find()
        if not (stopped or self._is_late or self._limited.find()):
            return []
        departed = min(self._stops_of_departed(stopped), default=None)
        finished = min(self._stops_of_finished(stopped), default=None)
        if departed is None and finished is None and not self._limited.find():
            return []
        effects = self._limit(
            min((each.last for each in (departed, finished) if each), default=None)
        )
        for dp_rank, rank in sorted(self._ledger.ranks.items()):
            if departed is not None and (
                self._wants_step_after(rank, departed) or self._waits_for_departed(rank)
            ):
                effects.append(self._generation.refuse(dp_rank, self._explain(departed)))
            elif finished is not None and (
                self._wants_step_after(rank, finished) or rank.taken > finished.last
            ):
                differs = self._mismatch_error(finished.dp_rank, dp_rank, rank)
                return [*effects, *self._generation.fail(differs)]
        return effects

    def _stops_of_departed(self, stopped: Iterable[int]) -> Iterator[StopPoint]:
        """Stop points of ranks that left, or are lost, and have not finished."""
        for dp_rank in stopped:
            rank = self._ledger.ranks[dp_rank]
            if rank.departed:
                yield StopPoint(rank.taken, rank.away_since, dp_rank)
        if self._is_late:
            for dp_rank in self._generation.missing:
                yield StopPoint(self._ledger.steps.committed, 0.0, dp_rank)

    def _stops_of_finished(self, stopped: Iterable[int]) -> Iterator[StopPoint]:
        """Stop points of ranks that have finished, while others have not."""
        if not self._lifecycle.finished:
            for dp_rank in stopped:
                rank = self._ledger.ranks[dp_rank]
                if rank.finished is not None:
                    yield StopPoint(rank.taken, 0.0, dp_rank)

    def _limit(self, last: int | None) -> list[Effect]:
        """Send the last step to connected ranks that were not sent this one."""
        changed = []
        for dp_rank, rank in sorted(self._ledger.ranks.items()):
            if rank.connected and not self._is_done(rank) and rank.limit_sent != last:
                rank.limit_sent = last
                self._generation.changed(dp_rank)
                changed.append(dp_rank)
        return [LimitSteps(tuple(changed), last)] if changed else []

    def _wants_step_after(self, rank: RankState, gone: StopPoint) -> bool:
        """Whether a rank waits for a step after the stop point."""
        return rank.hungry and rank.taken >= gone.last and not self._is_done(rank)

    def _waits_for_departed(self, rank: RankState) -> bool:
        """Whether a rank has finished and waits for the others, one of which has departed."""
        waits = rank.connected and rank.finished is not None
        return waits and not self._lifecycle.finished and not self._is_done(rank)

    def _is_done(self, rank: RankState) -> bool:
        """Whether a rank was sent the end and has taken the last step."""
        return rank.end_sent and rank.taken >= self._ledger.steps.last_opened

    def _explain(self, gone: StopPoint) -> DispatcherError:
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

    def _mismatch_error(self, ended: int, dp_rank: int, rank: RankState) -> DispatcherError:
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
    """Finishes the run once every DP rank has. keeps: unused samples stay in a journal."""

    def __init__(self, parts: "Parts", *, keeps: bool) -> None:
        self._ledger, self._lifecycle = parts.ledger, parts.lifecycle
        self._admission, self._dropping = parts.admission, parts.dropping
        self._append, self._keeps = parts.append_fact, keeps

    def restore(self, memory: RecoveredState) -> None:
        """End the run again if an earlier process had not sent the finish to every peer."""
        if memory.finished:
            self._end()

    def finish(self, dp_rank: int, step: int, *, discard: bool) -> None:
        """A DP rank has finished after this step; call `end_if_all_finished` next.

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

    def end_if_all_finished(self) -> list[Effect]:
        """End the run if every DP rank has finished; fail the generation if their steps differ."""
        generation = self._ledger.generation
        ends = {
            at: (rank.finished, rank.discards)
            for at, rank in sorted(generation.ranks.items())
            if rank.finished is not None
        }
        if not ends or self._lifecycle.drained or generation.failed is not None:
            return []
        (first, mine), *others = ends.items()
        other = next((each for each in others if each[1] != mine), None)
        if other is not None:
            return [*generation.fail(_difference((first, mine), other))]
        return self._finish_run(discard=mine[1]) if len(ends) == generation.dp_size else []

    def refuse(self) -> list[Effect]:
        """End the connected producers' streams if the run is finished; some of them may be new."""
        return [EndProducers(RunFinished(RUN_FINISHED))] if self._lifecycle.finished else []

    def carried_out(self) -> None:
        """The finish was sent to every connected peer: the next process continues the run."""
        if self._lifecycle.finished:
            self._append(Finished(pending=False))

    def _finish_run(self, *, discard: bool) -> list[Effect]:
        self._append(Finished(pending=True))
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
            self._append(Withdrawn(step.number, step.attempt))
        self._dropping.everything(DropReason.UNUSED)


def _difference(*ends: tuple[int, tuple[int | None, bool]]) -> StepContractError:
    parts = [
        f"DP rank {dp_rank} finished the run after step {step} with discard={discard}"
        for dp_rank, (step, discard) in ends
    ]
    return StepContractError(
        f"{', and '.join(parts)}; call stream.finish() on every rank after the same step, with the "
        "same arguments"
    )
