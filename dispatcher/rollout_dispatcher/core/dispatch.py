"""The dispatcher's brain: events in, decisions out, time as an argument.

It tells each event to the parts that it is for (parts.py) and adds nothing of its own: admission
lets samples into the buffer, planning makes steps of them when the trigger says so, the ledger
follows the steps through the ranks, checkpoints take it back, the lifecycle lets everybody go.
Invariant, at every return: accepted = buffered + in flight + (committed - rewound) + dropped.
"""

from collections.abc import Callable, Iterable, Sequence

from rollout_dispatcher.core.admission.held_pushes import Push
from rollout_dispatcher.core.buffer.dropping import Losses, name_undone
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.config import DispatchConfig, Tuning
from rollout_dispatcher.core.effects import (
    NO_TOTALS,
    NOTHING,
    AcceptedUnknown,
    Advised,
    Decision,
    Effect,
    PlanWanted,
    PolicyReported,
    ReplanWanted,
    SamplesAccepted,
    SamplesDropped,
    WelcomeProducer,
)
from rollout_dispatcher.core.facts import (
    Configured,
    DropReason,
    Fact,
    PostedSetting,
    ProducerKeyed,
    ProducerLeft,
    RecoveredState,
    RunBegan,
    VersionReported,
)
from rollout_dispatcher.core.measuring.report import MeasuredStatistics
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.parts import Parts
from rollout_dispatcher.core.references import Said
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.core.steps.rank_state import RankHello, Unresolved
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.core.totals import StepMix
from rollout_dispatcher.core.waiting import Reason, Standstill, TrainerProgress
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import Unauthorized
from rollout_dispatcher.sample import Sample, Schema
from rollout_planner.types import Plan


class Dispatch:
    """One run: from pushed samples to committed steps.

    run_id: its name if it begins here; one that goes on keeps its own.

    Whoever is told something decides: each such call returns a `Decision`, to be carried out before
    the next call. To look inside there is `statistics()`, a frozen snapshot of everything. It walks
    all ranks and steps, so what is asked for more often has a look-up of its own:

        for each frame or effect    `generation`, `client_of`, `step` (whose payloads no snapshot
                                    holds), `next_deadline`, `drained`, `deserted`
        for each answer to a push   `standing`
        for each HTTP request       `schema`
        for each scrape             `measured`, `ranks_seen`
        to find stragglers          `entries`, of which no snapshot has the payloads either
        several times a second      `hungry_since`, `waits_for`, `reasons`, `next_step`,
                                    `standstill`
        for each simulated sample   `is_expected`

    and so do the words of a few (`end_waits`, `losses`, `name_undone`).
    """

    def __init__(self, config: DispatchConfig, run_id: str = "run") -> None:
        self.config = config
        self.run_id = run_id
        self._facts: list[Fact] = []
        self._parts = parts = Parts(config, self._note)
        self._admission, self._capacity = parts.admission, parts.capacity
        self._planning, self._ledger, self._ends = parts.planning, parts.ledger, parts.ends
        self._checkpoints, self._lifecycle = parts.checkpoints, parts.lifecycle
        self._departures = parts.departures
        self._totals, self._buffer = parts.totals, parts.buffer
        self._dropping, self._outcomes = parts.dropping, parts.outcomes
        self._references = parts.references

    # -- what outlives the process ------------------------------------------------------------

    def restore(self, memory: RecoveredState, now: float = 0.0) -> Decision:
        """Go on where an earlier process stopped; to be called before anything else."""
        if memory.run_id:
            self.run_id = memory.run_id
        else:
            self._note(RunBegan(self.run_id))
        self._parts.restore(memory, now)
        return self._decide([])

    def _decide(self, effects: list[Effect]) -> Decision:
        """Whatever is decided leaves here, with what was noted since the decision before."""
        if (decided := self._outcomes.decided) is not None:  # before what others are refused for
            self._outcomes.decided, effects = None, [decided, *effects]
        if repeated := self._outcomes.repeats.found:
            self._outcomes.repeats.found, effects = [], [*effects, *repeated]
        if self._outcomes.untold:  # before a plan that may have taken them, or a cap dropped them
            effects = [SamplesAccepted(*self._outcomes.tell()), *effects]
        if self._dropping.untold:
            effects = [*effects, SamplesDropped(self._dropping.untold)]
            self._dropping.untold = {}
        self._references.take_unneeded()
        if not self._facts:
            return Decision(effects, (), NO_TOTALS) if effects else NOTHING
        self._capacity.noted()
        facts, self._facts = self._facts, []
        return Decision(effects, facts, self._totals.as_json())

    def _note(self, fact: Fact) -> None:
        if self.config.durable:
            self._facts.append(fact)

    def configure(self, tuning: Tuning, posted: tuple[PostedSetting, ...], now: float) -> Decision:
        """Settings change: the next plan heeds them, and nothing that is open changes.

        posted: what of it a restart goes on with.
        """
        self.config = self.config.tuned(tuning)
        self._parts.configure(self.config)
        self._note(Configured(posted))
        return self._decide(self._settle(now))

    # -- producers --------------------------------------------------------------------------

    def push(self, push: Push, now: float, *, may_hold: bool = True) -> Decision:
        """Samples arrived. With `may_hold=False` what has to wait is answered `full`."""
        self._references.objects.pushed(push)
        effects = [] if self.config.max_staleness is None else self._parts.standings.ahead(push)
        effects += self._admission.push(push, now, may_hold=may_hold)
        return self._decide(effects + self._settle(now))

    def check_key(self, producer: str, key: str) -> None:
        """Raise Unauthorized for a producer that uses another's name; key: its key's digest."""
        if not self._parts.memory.is_ours(producer, key):
            raise Unauthorized(
                f"another client has the name {producer}, and has shown a key that goes with it; "
                "give every client a client_id of its own, or show the same key each time"
            )

    def producer_connected(
        self, producer: str, key: str = "", incarnation: str = "", accepted: int = -1
    ) -> Decision:
        """A producer is there, maybe again; key: the digest of that which `check_key` passed.

        incarnation: what its objects' keys begin with; empty if it puts none. accepted: the largest
        number of a sample that it was told is accepted, -1 for none. Where the journal lacks that
        one, it lacks what a producer was promised.
        """
        newest = self._parts.memory.newest(producer)
        if self._parts.memory.bind(producer, key):
            self._note(ProducerKeyed(producer, key))
        self._parts.presence.connected(producer, incarnation)
        self._outcomes.repeats.forget(producer)
        self._references.producer_connected(producer, incarnation)
        effects: list[Effect] = [WelcomeProducer(producer, self.config.producer_credits)]
        if self.config.durable and accepted > newest:
            effects.append(AcceptedUnknown(producer, accepted, newest))
        return self._decide(effects + self._parts.finishing.refuse())

    def producer_leaves(self, producer: str, now: float) -> Decision:
        """A producer says goodbye, and is not waited for any more, whatever ends this process."""
        if producer in self._parts.producers:
            self._note(ProducerLeft(producer))
        self._references.producer_leaves(producer, now)
        return self._decide([])

    def producer_lost(self, producer: str, now: float, *, for_good: bool = False) -> Decision:
        """A producer's connection is lost, `for_good` if it said goodbye."""
        self._parts.presence.lost(producer, now, for_good=for_good)
        self._outcomes.repeats.forget(producer)
        self._parts.standings.forget(producer)
        self._references.producer_lost(producer, now, for_good=for_good)
        return self._decide(self._settle(now))

    def close_group(
        self,
        group_id: str,
        now: float,
        *,
        size: int | None = None,
        keep: bool | None = None,
        said: tuple[str, int] | None = None,
    ) -> Decision:
        """No member of a group beyond `size` will come, or none at all; see `Presence.close`.

        said: by which producer, and the number that it gave to this: it is heard once.
        """
        advised = self._parts.presence.close(group_id, size, keep, now, said=said)
        return self._decide(advised + self._settle(now))

    def withdraw(
        self, group_id: str, size: int | None, producer: str, numbers: Iterable[int], now: float
    ) -> Decision:
        """A producer gives up samples of a group, which has `size` members if that was told."""
        self._parts.presence.withdraw(group_id, size, producer, numbers, now)
        return self._decide(self._settle(now))

    def end_phase(
        self, version: int, now: float, producer: str = "", *, force: bool = False
    ) -> Decision:
        """A producer will push nothing older than `version`; with `force` nobody will.

        When all who contributed to the run have said so, what is older goes before what is newer.
        """
        self._ends.end_phase(version, producer, force=force)
        return self._decide(self._settle(now))

    def end_stream(self, now: float, producer: str = "", *, force: bool = False) -> Decision:
        """A producer will push nothing more; with `force` nobody will.

        When all who contributed have said so, what is buffered is flushed and the ranks' streams
        end.
        """
        self._ends.end_stream(producer, force=force)
        return self._decide(self._settle(now))

    def drain(self, now: float) -> Decision:
        """Shut down in order: accept nothing more, dispatch what is here, end the ranks."""
        self._lifecycle.draining = True
        dropping = self._dropping
        dropping.losses = dropping.losses or Losses()
        effects = self._admission.shut_down(
            "the dispatcher is shutting down and takes no more samples; push again once it is "
            "started again, or elsewhere"
        )
        self._ends.stream_over(EndReason.DRAINED)
        effects += self._settle(now)
        if not self._ledger.ranks:
            dropping.everything(DropReason.SHUTDOWN)
            effects += self._settle(now)
        return self._decide(effects)

    # -- workers that open payload stores -----------------------------------------------------

    def hear(self, said: Said, now: float) -> Decision:
        """A worker that may release objects comes, goes or answers; what follows is `tick`'s."""
        self._references.hear(said, now)
        return self._decide([])

    # -- ranks ------------------------------------------------------------------------------

    def join(self, hello: RankHello, now: float) -> Decision:
        """A DP rank connected, or has loaded a checkpoint since: it is welcomed.

        Raises RankRefused, GenerationFenced, ProtocolError for what cannot be, or CheckpointRefused
        for a checkpoint that does not fit this run; one that does not fit the other ranks' fails
        the generation, this rank with it. All or nothing: nothing has changed where it raises.
        """
        effects = self._parts.joining.join(hello, self.run_id, now)
        self._parts.lockstep.joined(hello.dp_rank, now)
        self._departures.joined(hello.dp_rank, hello.client_id)
        if hello.generation is None and (advice := self.advice):
            effects.append(Advised(advice))
        effects += self._parts.attempts.settle()
        if hello.finished is not None:
            effects += self._parts.finishing.look()
        return self._decide(effects + self._end_steps(now))

    def leave(
        self, dp_rank: int, client_id: str, now: float, *, for_good: bool = False
    ) -> Decision:
        """A DP rank's connection is gone, `for_good` if it said goodbye."""
        self._ledger.leave(dp_rank, client_id, for_good=for_good)
        self._departures.left(dp_rank, client_id, now)
        self._lifecycle.untold(client_id)
        return self._decide(self._end_steps(now))

    def seen(self, dp_rank: int, now: float) -> None:
        """A DP rank gave a sign of life."""
        self._ledger.ranks[dp_rank].last_seen = now

    def progressed(self, dp_rank: int, handed_out: int, collectives: int, now: float) -> None:
        """A DP rank's heartbeat says how far its training loop is; see `RankState`."""
        rank = self._ledger.ranks[dp_rank]
        rank.last_seen, rank.handed_out, rank.collectives = now, handed_out, collectives
        self._parts.lockstep.heard(dp_rank, now)

    def demand(self, dp_rank: int, taken: int, now: float, *, hungry: bool) -> Decision:
        """A rank's training loop has begun step `taken`, and waits for the next or not."""
        begins = dp_rank == 0 and not self._ledger.active_rank(0).begun
        effects = self._ledger.demand(dp_rank, taken, hungry=hungry)
        self._parts.lockstep.heard(dp_rank, now)
        if begins:
            effects += self._checkpoints.begun()
        effects += self._parts.attempts.settle()
        return self._decide(effects + self._end_steps(now))

    def prepared(
        self, dp_rank: int, step: int, digest: str, now: float, *, attempt: int = 0
    ) -> Decision:
        """A rank can train a step."""
        effects = self._ledger.prepared(dp_rank, step, digest, attempt)
        if self._ledger.generation.failed is not None:  # else planning has waited for none of this
            effects += self._settle(now)
        return self._decide(effects)

    def unresolved(self, dp_rank: int, said: Unresolved, now: float) -> Decision:
        """A rank cannot get samples of a step: they are dropped, and it is planned again."""
        effects = self._parts.attempts.unresolved(dp_rank, said)
        return self._decide(effects + self._settle(now))

    def unreadable(self, dp_rank: int, said: Unresolved) -> Decision:
        """The journal cannot read samples of a step back for this rank: `tick` acts on it."""
        return self._decide(self._parts.attempts.claim(dp_rank, said))

    def commit(self, dp_rank: int, step: int, now: float) -> Decision:
        """A rank has applied every step up to `step`; planning waits for the last rank to."""
        done = self._ledger.commit(dp_rank, step)
        self._parts.measuring.committed(done)
        self._parts.freshness.committed(len(done))
        self._parts.lockstep.heard(dp_rank, now)
        self._parts.lockstep.committed(done, now)
        if not done:
            return self._decide([])
        return self._decide([*self._checkpoints.committed(done, now), *self._settle(now)])

    def finish(self, dp_rank: int, step: int, now: float, *, discard: bool) -> Decision:
        """A rank has had enough after this step; once every rank has, the run is finished.

        discard: what is not used is dropped, though a journal could keep it.
        """
        self._parts.finishing.finish(dp_rank, step, discard=discard)
        effects = self._parts.finishing.look()
        return self._decide(effects + self._end_steps(now))

    def finish_carried_out(self) -> Decision:
        """Everybody has heard that the run is finished: the next process goes on with the rest."""
        self._parts.finishing.carried_out()
        return self._decide([])

    def set_policy_version(self, version: int, now: float, first_step: int) -> Decision:
        """DP rank 0 trains these weights from step `first_step` on."""
        if not self._parts.freshness.report(version, first_step):
            return self._decide(self._settle(now))
        self._note(VersionReported(version, first_step))
        return self._decide([PolicyReported(version), *self._settle(now)])

    def checkpoint_saved(self, dp_rank: int, step: int) -> Decision:
        """A checkpoint taken after `step` is durable; DP rank 0 speaks for all.

        Raises ProtocolError for a step that was never planned.
        """
        if dp_rank == 0:
            self._checkpoints.checkpoint_saved(step)
        return self._decide([])

    def retain_at_most(self, nbytes: int) -> Decision:
        """Committed steps that no saved checkpoint covers may have so many bytes of payload."""
        return self._decide(self._checkpoints.retain_at_most(nbytes))

    def step_times(self, dp_rank: int, times: RankTimes) -> Decision:
        """A rank tells what a pass over a step took; what is of no use is counted."""
        measured = self._parts.measuring.heard(dp_rank, times)
        return self._decide(measured) if measured else NOTHING

    # -- time and plans ---------------------------------------------------------------------

    def tick(self, now: float) -> Decision:
        """Do what has become due; call it at `next_deadline`."""
        self._parts.presence.tick(now)
        self._parts.held.give_up_late(now)
        self._departures.tick(now)
        effects = self._parts.attempts.settle() + self._settle(now) + self._departures.look()
        return self._decide(effects + self._references.tick(now))

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; None if nothing is waited for."""
        parts = self._parts
        soonest: float | None = None
        for at in (
            parts.presence.next_deadline(), parts.held.next_deadline(), parts.planning.wake_at,
            parts.references.next_deadline(), parts.departures.next_deadline(),
        ):  # fmt: skip
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest

    def planned(self, wanted: PlanWanted, plan: Plan, now: float) -> Decision:
        """The planner's answer: becomes the next step, unless it was a trial that missed."""
        return self._decide(self._planning.planned(wanted, plan, now) + self._settle(now))

    def replanned(self, wanted: ReplanWanted, plan: Plan, now: float) -> Decision:
        """The planner's answer for an open step that was planned for other ranks."""
        return self._decide(self._planning.replanned(wanted, plan) + self._settle(now))

    def payloads_durable(self, entries: Sequence[Entry], now: float) -> Decision:
        """The journal has these payloads: they need no memory until their step."""
        self._capacity.helped_since = None
        self._buffer.let_go(entries)
        return self._decide(self._settle(now))

    def heed_journal(self, takes: Callable[[int, int], bool]) -> None:
        """Let in only what the journal takes: so many samples, of so many payload bytes."""
        self._capacity.journal_takes = takes

    def journal_takes_more(self, now: float) -> Decision:
        """The journal takes samples again: let in who was held back for it."""
        self._planning.mark_dirty()
        return self._decide(self._settle(now))

    def _settle(self, now: float) -> list[Effect]:
        """Do all that can be done by now: telling the core nothing new would change nothing.

        Each round rests on the one before it. Another one follows while pushes that were held back
        may come in; with each round but the last of these something leaves the buffer or the line,
        or a group changes of which members wait, so there are no more rounds than samples here.
        """
        planning = self._planning
        effects: list[Effect] = []
        while True:
            effects += self._ends.settle()
            if planning.retry_is_due:
                effects += planning.retry(now)
                continue
            effects += planning.spill_open_groups(now)
            effects += planning.consider(now)
            if self._lifecycle.ended:
                effects += self._finish()
            if not planning.retry_is_due:
                return effects

    def _end_steps(self, now: float) -> list[Effect]:
        """The same, when ranks have come, gone or asked: some may take no further step."""
        effects = self._settle(now)
        return effects + self._departures.look()

    def _finish(self) -> list[Effect]:
        self._references.stream_over()
        if self._planning.busy:
            return []
        return self._lifecycle.finish(flushing=self._parts.phases.flushing)

    # -- looking ----------------------------------------------------------------------------

    @property
    def retained_bytes(self) -> int:
        """Payload bytes of committed steps that are retained."""
        return self._checkpoints.nbytes

    @property
    def advice(self) -> str:
        """What the trainer should know of itself; empty if nothing."""
        return self._checkpoints.advice()

    @property
    def generation(self) -> int:
        """The number of the current generation, 0 before the first."""
        return self._ledger.generation.number

    def client_of(self, dp_rank: int) -> str:
        """Which client is this DP rank of the current generation; empty if none has joined."""
        rank = self._ledger.ranks.get(dp_rank)
        return "" if rank is None else rank.client_id

    def step(self, number: int) -> OpenStep | None:
        """What an open step holds; None if it is not open, or not any more."""
        return self._ledger.steps.find(number)

    def is_expected(self, sample: Sample) -> bool:
        """Whether an open group waits for this sample: it may pass by others that are held."""
        return self._buffer.is_expected(sample)

    @property
    def ranks_seen(self) -> tuple[int, dict[int, float]]:
        """DP ranks that there are to be, and when each that has joined was last heard of.

        Without those that said goodbye: nobody waits for a sign of life from them.
        """
        generation = self._ledger.generation
        there = {at: rank.last_seen for at, rank in generation.ranks.items() if not rank.gone}
        return generation.dp_size, there

    @property
    def schema(self) -> tuple[Schema, str] | None:
        """The schema of all samples and who has decided on it; None while that is not decided."""
        schema = self._buffer.schema
        return None if schema is None else (schema, self._buffer.set_by)

    @property
    def standing(self) -> TrainerProgress:
        """Where the trainer is, for those who push."""
        return self._parts.standings.now()

    @property
    def hungry_since(self) -> float | None:
        """Since when a DP rank waits for a step that is not planned; None if none does."""
        return self._planning.hungry_since

    @property
    def drained(self) -> bool:
        """Whether the stream has ended and everything is committed."""
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
    def unreleased(self) -> int:
        """Objects of payload stores to be released, and producers to be swept."""
        return self._references.left

    def holds(self, worker: str) -> bool:
        """Whether nobody but this worker, which wants to leave, can do what is unreleased."""
        return self._references.holds(worker)

    @property
    def deserted(self) -> bool:
        """Whether no rank is left that may come back.

        After a restart with steps that no saved checkpoint covers, ranks are still to come; and so
        are those that may not have heard that their run is finished.
        """
        awaited = self._checkpoints.num_retained > 0
        if self._lifecycle.finished:
            awaited = self._ledger.generation.inherited
        return self._ledger.generation.deserted and not (awaited and not self._ledger.ranks)

    def waits_for(self, now: float) -> str:
        """In words, whom the next step waits for, or the end of a phase or of the stream."""
        return self._parts.waiting.explain(now)

    def reasons(self, now: float) -> tuple[Reason, ...]:
        """The same, one by one."""
        return tuple(self._parts.waiting.reasons(now))

    def standstill(self, now: float) -> Standstill | None:
        """Which DP ranks hang, or that all are paused; None while the run gets on."""
        return self._parts.lockstep.standstill(now)

    @property
    def next_step(self) -> int:
        """The number of the step that is planned next."""
        return self._ledger.steps.next_step

    def end_waits(self, version: int | None) -> list[str]:
        """Producers whose word the end of this phase still waits for; None: of the stream."""
        return self._parts.ends.pending_waits(version)

    @property
    def losses(self) -> Losses:
        """Accepted samples that the shutdown has dropped so far."""
        return self._dropping.losses or Losses()

    def name_undone(self) -> str:
        """The first of the samples that are in open steps or ready, oldest first, for the log."""
        return name_undone(self._ledger.steps, self._buffer)

    @property
    def measured(self) -> MeasuredStatistics:
        """What steps have really taken, as far as the ranks tell: a frozen snapshot."""
        return self._parts.measuring.statistics()

    @property
    def step_mix(self) -> StepMix | None:
        """Whether the last steps were like the arrivals; None before the first. Takes a ms."""
        return self._parts.selection_bias.mix

    def statistics(self) -> Statistics:
        """A frozen snapshot."""
        return Statistics.of(self._parts, run_id=self.run_id)
