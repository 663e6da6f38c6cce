"""The dispatcher's pure core: events in, decisions out, time as an argument.

`DispatcherCore` passes each event to its parts (parts.py): admission accepts samples into the
buffer, planning makes steps of them when the trigger fires, the ledger tracks each step over the
ranks, checkpoints rewind it, the lifecycle ends the run. Invariant, at every return: accepted =
buffered + in flight + (committed - rewound) + dropped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.dropping import DropCounts, name_unfinished
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.config import DispatchConfig, Tuning
from rollout_dispatcher.core.effects import (
    NO_TOTALS,
    NOTHING,
    AcceptedUnknown,
    Advised,
    Decision,
    Effect,
    PlanRequested,
    PolicyReported,
    ReplanRequested,
    SamplesAccepted,
    SamplesDropped,
    StepMeasured,
    WelcomeProducer,
)
from rollout_dispatcher.core.facts import (
    DropReason,
    Fact,
    ProducerKeyed,
    ProducerLeft,
    RecoveredState,
    RunBegan,
    VersionReported,
)
from rollout_dispatcher.core.measuring.measuring import MeasuredStatistics
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.parts import Parts
from rollout_dispatcher.core.rank_time import TimeCause
from rollout_dispatcher.core.references import WorkerEvent
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.core.steps.rank_state import RankHello, Unresolved
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.core.totals import StepMix
from rollout_dispatcher.core.waiting import Reason, Stall, TrainerProgress
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import Unauthorized
from rollout_dispatcher.sample import Schema
from rollout_planner.types import Plan


class DispatcherCore:
    """One run: from pushed samples to committed steps.

    run_id: name of a new run; a restored run keeps its own.

    Every event method returns a `Decision`, to be carried out before the next call. `statistics()`
    returns a frozen snapshot of everything; it walks all ranks and steps, so frequent queries have
    accessors of their own:

        for each frame or effect    `generation`, `client_of`, `step` (whose payloads no snapshot
                                    holds), `next_deadline`, `drained`, `deserted`
        for each answer to a push   `trainer_progress`
        for each HTTP request       `schema`
        for each scrape             `measured`, `ranks_seen`
        to find stragglers          `entries`, of which no snapshot has the payloads either
        several times a second      `hungry_since`, `waits_for`, `reasons`, `next_step`,
                                    `stall`, `rank_time`
        for each simulated group    `is_open`

    A few log texts have accessors too: `end_waits`, `shutdown_drops`, `name_unfinished`.
    """

    def __init__(self, config: DispatchConfig, run_id: str = "run") -> None:
        self.config = config
        self.run_id = run_id
        self._facts: list[Fact] = []
        self._parts = parts = Parts(config, self._append)
        self._admission, self._capacity = parts.admission, parts.capacity
        self._planning, self._ledger, self._ends = parts.planning, parts.ledger, parts.ends
        self._checkpoints, self._lifecycle = parts.checkpoints, parts.lifecycle
        self._rank_departures = parts.rank_departures
        self._totals, self._buffer = parts.totals, parts.buffer
        self._dropping, self._outcomes = parts.dropping, parts.outcomes
        self._references, self._rank_time = parts.references, parts.rank_time

    # -- recovery and settings ----------------------------------------------------------------

    def restore(self, memory: RecoveredState, now: float = 0.0) -> Decision:
        """Continue the run of an earlier process; call it before any event."""
        if memory.run_id:
            self.run_id = memory.run_id
        else:
            self._append(RunBegan(self.run_id))
        self._parts.restore(memory, now)
        return self._to_decision([])

    def _to_decision(self, effects: list[Effect]) -> Decision:
        """Bundle the effects with all facts recorded since the last decision."""
        if (decided := self._outcomes.decided) is not None:  # before refusals that cite it
            self._outcomes.decided, effects = None, [decided, *effects]
        if repeated := self._outcomes.repeats.found:
            self._outcomes.repeats.found, effects = [], [*effects, *repeated]
        # before effects that plan or drop these samples
        if self._outcomes.unreported:
            effects = [SamplesAccepted(self._outcomes.unreported), *effects]
            self._outcomes.unreported = []
        if self._dropping.unreported:
            effects = [*effects, SamplesDropped(self._dropping.unreported)]
            self._dropping.unreported = {}
        self._references.pop_unneeded()
        if not self._facts:
            return Decision(effects, (), NO_TOTALS) if effects else NOTHING
        self._capacity.journaled()
        facts, self._facts = self._facts, []
        return Decision(effects, facts, self._totals.as_json())

    def _append(self, fact: Fact) -> None:
        if self.config.durable:
            self._facts.append(fact)

    def configure(self, tuning: Tuning, now: float) -> Decision:
        """Change settings, from the next plan on; open steps stay as they are."""
        self.config = self.config.tuned(tuning)
        self._parts.configure(self.config)
        return self._to_decision(self._run_to_fixpoint(now))

    # -- producers --------------------------------------------------------------------------

    def push(self, push: Push, now: float, *, may_wait: bool = True) -> Decision:
        """Samples arrived. With `may_wait=False` samples that cannot be accepted now get `full`."""
        self._rank_time.charge(now)
        self._references.objects.pushed(push)
        effects = [] if self.config.max_staleness is None else self._parts.progress.ahead(push)
        effects += self._admission.push(push, now, may_wait=may_wait)
        return self._to_decision(effects + self._run_to_fixpoint(now))

    def check_key(self, producer: str, key: str) -> None:
        """Raise Unauthorized for a producer that uses another's name. key: digest of its key."""
        if not self._parts.memory.is_ours(producer, key):
            raise Unauthorized(
                f"another client has the name {producer}, and has shown a key that goes with it; "
                "give every client a client_id of its own, or show the same key each time"
            )

    def producer_connected(
        self, producer: str, key: str = "", incarnation: str = "", accepted: int = -1
    ) -> Decision:
        """A producer connected, maybe again. key: the digest that `check_key` has passed.

        incarnation: prefix of its objects' keys; empty if it puts none. accepted: the largest
        sequence number that it knows as accepted, -1 for none. If the journal has no such sample,
        acknowledged data was lost.
        """
        newest = self._parts.memory.newest(producer)
        if self._parts.memory.bind(producer, key):
            self._append(ProducerKeyed(producer, key))
        self._parts.presence.connected(producer, incarnation)
        self._outcomes.repeats.forget(producer)
        self._references.producer_connected(producer, incarnation)
        effects: list[Effect] = [WelcomeProducer(producer, self.config.producer_credits)]
        if self.config.durable and accepted > newest:
            effects.append(AcceptedUnknown(producer, accepted, newest))
        return self._to_decision(effects + self._parts.finishing.refuse())

    def producer_leaves(self, producer: str, now: float) -> Decision:
        """A producer has left with a goodbye: nothing waits for it, also after a restart."""
        if producer in self._parts.producers:
            self._append(ProducerLeft(producer))
        self._references.producer_leaves(producer, now)
        return self._to_decision([])

    def producer_disconnected(
        self, producer: str, now: float, *, for_good: bool = False
    ) -> Decision:
        """A producer's connection is lost. for_good: after a goodbye."""
        self._rank_time.charge(now)
        self._parts.presence.disconnected(producer, now, for_good=for_good)
        self._outcomes.repeats.forget(producer)
        self._parts.progress.forget(producer)
        self._references.producer_disconnected(producer, now, for_good=for_good)
        return self._to_decision(self._run_to_fixpoint(now))

    def close_group(
        self,
        group_id: str,
        now: float,
        *,
        size: int | None = None,
        keep: bool | None = None,
        request: tuple[str, int] | None = None,
    ) -> Decision:
        """A group gets no member beyond `size`, or no further one; see `Presence.close`.

        request: producer and number of the request; a repeated one has no effect.
        """
        advised = self._parts.presence.close(group_id, size, keep, now, request=request)
        return self._to_decision(advised + self._run_to_fixpoint(now))

    def withdraw(
        self, group_id: str, size: int | None, producer: str, numbers: Iterable[int], now: float
    ) -> Decision:
        """A producer withdraws samples of a group.

        size: members of the group; None if not known. numbers: the samples' sequence numbers.
        """
        self._parts.presence.withdraw(group_id, size, producer, numbers, now)
        return self._to_decision(self._run_to_fixpoint(now))

    def end_phase(
        self, version: int, now: float, producer: str = "", *, force: bool = False
    ) -> Decision:
        """A producer will push nothing older than `version`; with `force` no producer will.

        Once every contributing producer has ended the phase, its samples are planned before newer
        ones.
        """
        self._ends.end_phase(version, producer, force=force)
        return self._to_decision(self._run_to_fixpoint(now))

    def end_stream(self, now: float, producer: str = "", *, force: bool = False) -> Decision:
        """A producer will push nothing more; with `force` no producer will.

        Once every contributing producer has ended its stream, the buffer is flushed and the ranks'
        streams end.
        """
        self._ends.end_stream(producer, force=force)
        return self._to_decision(self._run_to_fixpoint(now))

    def drain(self, now: float) -> Decision:
        """Shut down in order: accept nothing more, dispatch buffered samples, end the streams."""
        self._lifecycle.draining = True
        dropping = self._dropping
        dropping.shutdown_drops = dropping.shutdown_drops or DropCounts()
        effects = self._admission.shut_down(
            "the dispatcher is shutting down and takes no more samples; push again once it is "
            "started again, or elsewhere"
        )
        self._ends.stream_over(EndReason.DRAINED)
        effects += self._run_to_fixpoint(now)
        if not self._ledger.ranks:
            dropping.everything(DropReason.SHUTDOWN)
            effects += self._run_to_fixpoint(now)
        return self._to_decision(effects)

    # -- workers that open payload stores -----------------------------------------------------

    def on_worker_event(self, event: WorkerEvent, now: float) -> Decision:
        """A worker of payload stores connected, left or answered; `tick` returns the effects."""
        self._references.on_worker_event(event, now)
        return self._to_decision([])

    # -- ranks ------------------------------------------------------------------------------

    def join(self, hello: RankHello, now: float) -> Decision:
        """Welcome a DP rank that connected, or has loaded a checkpoint since.

        Raises RankRefused, GenerationFenced or ProtocolError for an invalid hello,
        CheckpointRefused for a checkpoint that does not fit this run; nothing has changed then. A
        checkpoint that does not fit the other ranks' fails the whole generation.
        """
        effects = self._parts.joining.join(hello, self.run_id, now)
        if hello.taken >= 0:
            self._rank_time.step_taken()
        self._parts.stall_detector.joined(hello.dp_rank, now)
        self._rank_departures.joined(hello.dp_rank)
        if hello.generation is None and (advice := self.advice):
            effects.append(Advised(advice))
        effects += self._parts.attempts.drop_unresolved()
        if hello.finished is not None:
            effects += self._parts.finishing.end_if_all_finished()
        return self._to_decision(effects + self._settle_and_limit_ranks(now))

    def leave(
        self, dp_rank: int, client_id: str, now: float, *, for_good: bool = False
    ) -> Decision:
        """A DP rank's connection is lost. for_good: after a goodbye."""
        self._rank_time.charge(now)
        self._ledger.leave(dp_rank, client_id, for_good=for_good)
        self._rank_departures.left(dp_rank, client_id, now)
        return self._to_decision(self._settle_and_limit_ranks(now))

    def seen(self, dp_rank: int, now: float) -> None:
        """A DP rank is alive."""
        self._ledger.ranks[dp_rank].last_seen = now

    def progressed(self, dp_rank: int, handed_out: int, collectives: int, now: float) -> None:
        """A DP rank's heartbeat reports the progress of its training loop; see `RankState`."""
        rank = self._ledger.ranks[dp_rank]
        rank.last_seen, rank.handed_out, rank.collectives = now, handed_out, collectives
        self._parts.stall_detector.on_progress(dp_rank, now)

    def demand(self, dp_rank: int, taken: int, now: float, *, hungry: bool) -> Decision:
        """A rank's training loop has begun step `taken`. hungry: whether it waits for the next."""
        self._rank_time.charge(now)
        begins = dp_rank == 0 and not self._ledger.active_rank(0).begun
        effects = self._ledger.demand(dp_rank, taken, hungry=hungry)
        if taken >= 0:
            self._rank_time.step_taken()
        self._parts.stall_detector.on_progress(dp_rank, now)
        if begins:
            effects += self._checkpoints.begun()
        effects += self._parts.attempts.drop_unresolved()
        return self._to_decision(effects + self._settle_and_limit_ranks(now))

    def prepared(
        self, dp_rank: int, step: int, digest: str, now: float, *, attempt: int = 0
    ) -> Decision:
        """A rank holds a step and can train it."""
        self._rank_time.charge(now)
        effects = self._ledger.prepared(dp_rank, step, digest, attempt)
        if self._ledger.generation.failed is not None:  # else no plan depends on it
            effects += self._run_to_fixpoint(now)
        return self._to_decision(effects)

    def unresolved(self, dp_rank: int, missing: Unresolved, now: float) -> Decision:
        """A rank cannot fetch samples of a step: drop them, and plan the step again."""
        effects = self._parts.attempts.unresolved(dp_rank, missing)
        return self._to_decision(effects + self._run_to_fixpoint(now))

    def unreadable(self, dp_rank: int, missing: Unresolved) -> Decision:
        """The journal cannot read samples of a step for this rank; `tick` acts on it."""
        return self._to_decision(self._parts.attempts.report_missing(dp_rank, missing))

    def commit(self, dp_rank: int, step: int, now: float) -> Decision:
        """A rank has applied every step up to `step`; it is committed once every rank has."""
        self._rank_time.charge(now)
        done = self._ledger.commit(dp_rank, step)
        self._parts.measuring.committed(done)
        self._parts.freshness.committed(len(done))
        self._parts.stall_detector.on_progress(dp_rank, now)
        self._parts.stall_detector.committed(done, now)
        if not done:
            return self._to_decision([])
        return self._to_decision(
            [*self._checkpoints.committed(done, now), *self._run_to_fixpoint(now)]
        )

    def finish(self, dp_rank: int, step: int, now: float, *, discard: bool) -> Decision:
        """A rank finishes after this step; once every rank has, the run is finished.

        discard: drop unused samples, though a journal could keep them.
        """
        self._rank_time.charge(now)
        self._parts.finishing.finish(dp_rank, step, discard=discard)
        effects = self._parts.finishing.end_if_all_finished()
        return self._to_decision(effects + self._settle_and_limit_ranks(now))

    def finish_carried_out(self) -> Decision:
        """Every peer has received the end of the run: the next process uses the other samples."""
        self._parts.finishing.carried_out()
        return self._to_decision([])

    def set_policy_version(self, version: int, now: float, first_step: int) -> Decision:
        """DP rank 0 trains these weights from step `first_step` on."""
        if not self._parts.freshness.report(version, first_step):
            return self._to_decision(self._run_to_fixpoint(now))
        self._append(VersionReported(version, first_step))
        return self._to_decision([PolicyReported(version), *self._run_to_fixpoint(now)])

    def checkpoint_saved(self, dp_rank: int, step: int) -> Decision:
        """A checkpoint taken after `step` is durable; only DP rank 0's report counts.

        Raises ProtocolError for a step that was never planned.
        """
        if dp_rank == 0:
            self._checkpoints.checkpoint_saved(step)
        return self._to_decision([])

    def retain_at_most(self, nbytes: int) -> Decision:
        """Retain at most so many payload bytes of committed steps after the last checkpoint."""
        return self._to_decision(self._checkpoints.retain_at_most(nbytes))

    def step_times(self, dp_rank: int, times: RankTimes) -> Decision:
        """A rank reports the times of a pass over a step; unusable reports are counted."""
        measured = self._parts.measuring.on_times(dp_rank, times)
        for effect in measured:
            if isinstance(effect, StepMeasured):
                self._rank_time.measured(effect)
        return self._to_decision(measured) if measured else NOTHING

    # -- time and plans ---------------------------------------------------------------------

    def watch_journal(self, is_slow: Callable[[], bool]) -> None:
        """Set the check whether the journal delays others, for the causes of ranks' waits."""
        self._rank_time.journal_is_slow = is_slow

    def tick(self, now: float) -> Decision:
        """Do what has become due; call it at `next_deadline`."""
        self._rank_time.charge(now)
        self._parts.presence.tick(now)
        self._parts.blocked.expire_resends(now)
        self._rank_departures.tick(now)
        effects = (
            self._parts.attempts.drop_unresolved()
            + self._run_to_fixpoint(now)
            + self._rank_departures.stop_others()
        )
        return self._to_decision(effects + self._references.tick(now))

    def next_deadline(self) -> float | None:
        """When `tick` is due next; None if nothing is."""
        parts = self._parts
        soonest: float | None = None
        for at in (
            parts.presence.next_deadline(), parts.blocked.next_deadline(), parts.planning.wake_at,
            parts.references.next_deadline(), parts.rank_departures.next_deadline(),
        ):  # fmt: skip
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest

    def planned(self, wanted: PlanRequested, plan: Plan, now: float) -> Decision:
        """The planner's answer: it becomes the next step, unless it was a trial that missed."""
        self._rank_time.charge(now)
        before = self.next_step
        effects = self._planning.planned(wanted, plan, now)
        if self.next_step > before:
            self._rank_time.step_planned()
        return self._to_decision(effects + self._run_to_fixpoint(now))

    def replanned(self, wanted: ReplanRequested, plan: Plan, now: float) -> Decision:
        """The planner's answer for an open step that was planned for other ranks."""
        self._rank_time.charge(now)
        return self._to_decision(
            self._planning.replanned(wanted, plan) + self._run_to_fixpoint(now)
        )

    def payloads_durable(self, entries: Sequence[Entry], now: float) -> Decision:
        """The journal has these payloads: free their memory until their step is delivered."""
        self._rank_time.charge(now)
        self._capacity.spilling_since = None
        self._buffer.drop_payloads(entries)
        return self._to_decision(self._run_to_fixpoint(now))

    def set_journal_capacity(self, takes: Callable[[int, int], bool]) -> None:
        """Accept only samples that the journal has capacity for.

        takes: whether it takes a number of samples with a number of payload bytes.
        """
        self._capacity.journal_takes = takes

    def journal_takes_more(self, now: float) -> Decision:
        """The journal has capacity again: retry pushes that it blocked."""
        self._rank_time.charge(now)
        self._planning.mark_dirty()
        return self._to_decision(self._run_to_fixpoint(now))

    def _run_to_fixpoint(self, now: float) -> list[Effect]:
        """Run to a fixed point; calling again without a new event is a no-op.

        Terminates: every round but the last removes something from the buffer or the queue of
        blocked pushes, or changes a group with blocked members.
        """
        planning = self._planning
        effects: list[Effect] = []
        while True:
            effects += self._ends.end_agreed()
            if planning.retry_is_due:
                effects += planning.retry(now)
                continue
            effects += planning.spill_open_groups(now)
            effects += planning.consider(now)
            if self._lifecycle.ended:
                effects += self._end_if_done()
            if not planning.retry_is_due:
                return effects

    def _settle_and_limit_ranks(self, now: float) -> list[Effect]:
        """Run to a fixed point, then stop the ranks that may take no further step."""
        effects = self._run_to_fixpoint(now)
        return effects + self._rank_departures.stop_others()

    def _end_if_done(self) -> list[Effect]:
        self._references.stream_over()
        if self._planning.busy:
            return []
        return self._lifecycle.end_if_done(flushing=self._parts.phases.flushing)

    # -- queries ----------------------------------------------------------------------------

    @property
    def retained_bytes(self) -> int:
        """Payload bytes of committed steps that are retained."""
        return self._checkpoints.nbytes

    @property
    def advice(self) -> str:
        """A hint for the trainer's log; empty without one."""
        return self._checkpoints.advice()

    @property
    def generation(self) -> int:
        """The number of the current generation, 0 before the first."""
        return self._ledger.generation.number

    def client_of(self, dp_rank: int) -> str:
        """The client of this DP rank in the current generation; empty if none has joined."""
        rank = self._ledger.ranks.get(dp_rank)
        return "" if rank is None else rank.client_id

    def step(self, number: int) -> OpenStep | None:
        """An open step; None if it is not open."""
        return self._ledger.steps.find(number)

    def is_open(self, group_id: str) -> bool:
        """Whether a group lacks members; they may then pass blocked pushes."""
        return self._buffer.groups.get(group_id) is not None

    @property
    def ranks_seen(self) -> tuple[int, dict[int, float]]:
        """The number of DP ranks, and when the last message of each joined one arrived.

        Ranks that have left with a goodbye are not listed.
        """
        generation = self._ledger.generation
        there = {at: rank.last_seen for at, rank in generation.ranks.items() if not rank.gone}
        return generation.dp_size, there

    @property
    def schema(self) -> tuple[Schema, str] | None:
        """The schema of all samples and its origin; None while it is not decided."""
        schema = self._buffer.schema
        return None if schema is None else (schema, self._buffer.schema_source)

    @property
    def trainer_progress(self) -> TrainerProgress:
        """Policy versions and remaining capacity, for producers."""
        return self._parts.progress.now()

    @property
    def hungry_since(self) -> float | None:
        """Time since which a DP rank waits for an unplanned step; None if none does."""
        return self._planning.hungry_since

    @property
    def drained(self) -> bool:
        """Whether the run is over: finished, or ended with all steps committed."""
        return self._lifecycle.drained

    def waits_to_finish(self, dp_rank: int) -> bool:
        """Whether a DP rank has finished the run, and others have not."""
        rank = self._ledger.ranks.get(dp_rank)
        return rank is not None and rank.finished is not None and not self._lifecycle.finished

    @property
    def finished(self) -> bool:
        """Whether the DP ranks have finished the run."""
        return self._lifecycle.finished

    @property
    def pending_store_work(self) -> int:
        """Number of objects to be freed and of producers' incarnations to be swept."""
        return self._references.num_pending

    def is_last_to_free(self, worker: str) -> bool:
        """Whether this worker, which wants to leave, is the last that can free objects."""
        return self._references.is_last_to_free(worker)

    @property
    def deserted(self) -> bool:
        """Whether no rank is left that may come back.

        After a restart with steps that no saved checkpoint covers, ranks are expected; so are those
        that may not have received the end of their run, also in a new process group.
        """
        generation, finished = self._ledger.generation, self._lifecycle.finished
        if finished and not generation.inherited and generation.missing:
            return False
        awaited = generation.inherited if finished else self._checkpoints.num_retained > 0
        return generation.deserted and not (awaited and not self._ledger.ranks)

    def waits_for(self, now: float) -> str:
        """The peers that the next step, or the end of a phase or stream, waits for, in words."""
        return self._parts.waiting.explain(now)

    def reasons(self, now: float) -> tuple[Reason, ...]:
        """The reasons that `waits_for` puts in words."""
        return tuple(self._parts.waiting.reasons(now))

    def stall(self, now: float) -> Stall | None:
        """The DP ranks that hang, or that all are paused; None while the run makes progress."""
        return self._parts.stall_detector.stall(now)

    @property
    def next_step(self) -> int:
        """Number of the next step to plan."""
        return self._ledger.steps.next_number

    def end_waits(self, version: int | None) -> list[str]:
        """Producers that have not ended this phase yet; None: the stream."""
        return self._parts.ends.pending_waits(version)

    @property
    def shutdown_drops(self) -> DropCounts:
        """Accepted samples dropped by the shutdown so far."""
        return self._dropping.shutdown_drops or DropCounts()

    def name_unfinished(self) -> str:
        """The oldest samples that are in open steps or ready, for the log."""
        return name_unfinished(self._ledger.steps, self._buffer)

    def rank_time(self, now: float) -> Mapping[TimeCause, float]:
        """Where the DP ranks' time has gone until now, in rank-seconds.

        `statistics` has it too, as of the last event or call. Without events, call it a few times a
        second.
        """
        self._rank_time.charge(now)
        return self._rank_time.seconds

    @property
    def measured(self) -> MeasuredStatistics:
        """Measured times of steps, as far as ranks report them: a frozen snapshot."""
        return self._parts.measuring.statistics()

    @property
    def step_mix(self) -> StepMix | None:
        """Whether the last steps resembled the arrivals; None before the first. Takes 1 ms."""
        return self._parts.selection_bias.mix

    def statistics(self) -> Statistics:
        """A frozen snapshot."""
        return Statistics.of(self._parts, run_id=self.run_id)
