"""The dispatcher's brain: events in, effects out, time as an argument.

It ties the parts together and adds nothing of its own: admission lets samples into the buffer,
planning makes steps of them when the trigger says so, the ledger follows the steps through the
ranks, checkpoints take it back, the ending lets everybody go. Invariant, at every return:
accepted = buffered + in flight + (committed - rewound) + dropped.
"""

from collections.abc import Callable, Iterable, Sequence

from rollout_dispatcher.core.buffer.admission import Admission
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.freshness import Freshness
from rollout_dispatcher.core.buffer.losses import Losses, name_undone
from rollout_dispatcher.core.buffer.open_groups import OpenGroups
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.decision import NO_TOTALS, Decision
from rollout_dispatcher.core.effects import (
    DropReason,
    Effect,
    PayloadsToJournal,
    PlanWanted,
    ReplanWanted,
    WelcomeProducer,
)
from rollout_dispatcher.core.facts import (
    Fact,
    Remembered,
    RunBegan,
    VersionReported,
)
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.planning.planning import Planning
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.producers.intake import Intake
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.core.ranks.joining import Joining
from rollout_dispatcher.core.ranks.rank_state import RankHello
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.core.steps.checkpoints import Checkpoints
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.core.waiting import Waiting
from rollout_dispatcher.plan import Plan
from rollout_dispatcher.sample import Sample


class Dispatch:
    """One run: from pushed samples to committed steps.

    run_id: its name if it begins here; one that goes on keeps its own.

    Whoever is told something decides: each such call returns a `Decision`, to be carried out before
    the next call. To look inside there is `statistics()`, a frozen snapshot of everything. It walks
    all ranks and steps, so what is asked for more often has a look-up of its own:

        for each frame or effect    `generation`, `client_of`, `step` (whose payloads no snapshot
                                    holds), `next_deadline`, `drained`, `deserted`
        several times a second      `hungry_since`, `waits_for`
        for each simulated sample   `is_expected`

    and so do the words of a few (`stream_waits`, `phase_waits`, `losses`, `name_undone`).
    """

    def __init__(self, config: DispatchConfig, run_id: str = "run") -> None:
        self.config = config
        self.run_id = run_id
        self._facts: list[Fact] = []
        self._producers = Producers(config.producer_timeout)
        groups = OpenGroups(self._producers.__contains__, config.group_timeout)
        self._buffer = SampleBuffer(
            config.limits,
            groups,
            groups_matter=config.groups_matter,
            by_groups=config.by_groups,
        )
        self._totals = Totals()
        self._ledger = StepLedger(config.dp_size, config.max_open_steps, config.check_size)
        self._checkpoints = Checkpoints(
            self._ledger, self._totals, self._note, retain=config.retain
        )
        self._freshness = Freshness(
            config.max_staleness, config.staleness_policy, config.steps_per_version
        )
        closed_groups = ClosedGroups(config.group_timeout)
        memory = DuplicateMemory(config.id_horizon)
        self._dropping = Dropping(
            self._buffer,
            self._totals,
            closed_groups,
            memory,
            self._note,
            keep=config.keep_incomplete,
        )
        self._admission = Admission(
            self._buffer,
            self._totals,
            self._producers,
            closed_groups,
            memory,
            credits_=config.producer_credits,
            lacking=self._lacking,
            lost=self._dropping.lost_member,
            note=self._note if config.durable else None,  # a fact a sample: not built for nobody
        )
        self._lifecycle = Lifecycle(
            self._buffer,
            self._ledger,
            self._dropping,
            batch=config.trigger.batch,
            flush_partial=config.flush_partial,
        )
        self._joining = Joining(
            self._ledger, self._checkpoints, self._freshness, self._lifecycle, self._note
        )
        self._planning = Planning(
            config,
            self._buffer,
            self._ledger,
            admission=self._admission,
            freshness=self._freshness,
            dropping=self._dropping,
            lifecycle=self._lifecycle,
            totals=self._totals,
            note=self._note,
        )
        self._intake = Intake(
            self._producers,
            self._buffer,
            admission=self._admission,
            closed_groups=closed_groups,
            dropping=self._dropping,
            freshness=self._freshness,
            lifecycle=self._lifecycle,
            note=self._note,
        )
        self._waiting = Waiting(
            config.trigger.batch,
            ledger=self._ledger,
            buffer=self._buffer,
            admission=self._admission,
            freshness=self._freshness,
            agreement=self._intake.agreement,
        )
        self._departures = 0

    # -- what outlives the process ------------------------------------------------------------

    def restore(self, memory: Remembered, now: float = 0.0) -> Decision:
        """Go on where an earlier process stopped; to be called before anything else."""
        self._totals.restore(memory.totals)
        if memory.run_id:
            self.run_id = memory.run_id
        else:
            self._note(RunBegan(self.run_id))
        if memory.policy_version is not None:
            self._freshness.report(memory.policy_version, memory.policy_step or 0)
        self._intake.restore(memory, now)
        self._checkpoints.restore(memory)
        return self._decide([])

    def _decide(self, effects: list[Effect]) -> Decision:
        """Whatever is decided leaves here, with what was noted since the decision before."""
        if not self._facts:
            return Decision(effects, (), NO_TOTALS)
        self._admission.noted()
        facts, self._facts = self._facts, []
        return Decision(effects, facts, self._totals.as_json())

    def _note(self, fact: Fact) -> None:
        if self.config.durable:
            self._facts.append(fact)

    # -- producers --------------------------------------------------------------------------

    def push(self, push: Push, now: float, *, may_hold: bool = True) -> Decision:
        """Samples arrived. With `may_hold=False` what finds no room is answered `full`."""
        return self._decide(
            self._admission.push(push, now, may_hold=may_hold) + self._consider(now)
        )

    def producer_connected(self, producer: str) -> Decision:
        """A producer is there, maybe again."""
        self._producers.connected(producer)
        return self._decide([WelcomeProducer(producer, self.config.producer_credits)])

    def producer_lost(self, producer: str, now: float, *, for_good: bool = False) -> Decision:
        """A producer's connection is lost, `for_good` if it said goodbye."""
        self._intake.lost(producer, now, for_good=for_good)
        self._departures = -1  # others may have waited for what it had to say
        return self._decide(self._after_room(now))

    def close_group(
        self,
        group_id: str,
        now: float,
        *,
        size: int | None = None,
        keep: bool | None = None,
        said: tuple[str, int] | None = None,
    ) -> Decision:
        """No member of a group beyond `size` will come, or none at all; see `Intake`.

        said: by which producer, and the number that it gave to this: it is heard once.
        """
        if said is None or self._admission.memory.hears_close(*said):
            self._intake.close_group(group_id, size, keep, now, numbered=said is not None)
        self._departures = -1  # who was held back may belong to a group that has begun now
        return self._decide(self._after_room(now))

    def withdraw(
        self, group_id: str, size: int | None, producer: str, numbers: Iterable[int], now: float
    ) -> Decision:
        """A producer gives up samples of a group, which has `size` members if that was told."""
        self._intake.withdraw(group_id, size, producer, numbers, now)
        return self._decide(self._after_room(now))

    def end_phase(
        self, version: int, now: float, producer: str = "", *, force: bool = False
    ) -> Decision:
        """A producer will push nothing older than `version`; with `force` nobody will.

        When all who contributed have said so, what is older goes before anything newer is planned.
        """
        self._intake.end_phase(version, producer, force=force)
        return self._decide(self._after_room(now))

    def end_stream(self, now: float, producer: str = "", *, force: bool = False) -> Decision:
        """A producer will push nothing more; with `force` nobody will.

        When all who contributed have said so, what is buffered is flushed and the ranks' streams
        end.
        """
        self._intake.end_stream(producer, force=force)
        return self._decide(self._after_room(now))

    def drain(self, now: float) -> Decision:
        """Shut down in order: accept nothing more, dispatch what is here, end the ranks."""
        self._lifecycle.draining = True
        self._dropping.losses = self._dropping.losses or Losses()
        effects = self._admission.close("the dispatcher is shutting down")
        self._intake.stream_over()
        effects += self._consider(now)
        if not self._ledger.ranks:
            self._dropping.everything(DropReason.SHUTDOWN)
            effects += self._finish()
        return self._decide(effects)

    # -- ranks ------------------------------------------------------------------------------

    def join(self, hello: RankHello, now: float) -> Decision:
        """A DP rank connected, or has loaded a checkpoint since: it is welcomed.

        Raises RankRefused, GenerationFenced, ProtocolError for what cannot be, or CheckpointRefused
        for a checkpoint that does not fit this run; one that does not fit the other ranks' fails
        the generation, this rank with it. All or nothing: nothing has changed where it raises.
        """
        effects = self._joining.join(hello, self.run_id, now)
        return self._decide(effects + self._consider(now))

    def leave(
        self, dp_rank: int, client_id: str, now: float, *, for_good: bool = False
    ) -> Decision:
        """A DP rank's connection is gone, `for_good` if it said goodbye."""
        self._ledger.leave(dp_rank, client_id, for_good=for_good)
        self._lifecycle.untold(client_id)
        return self._decide(self._consider(now))

    def seen(self, dp_rank: int, now: float) -> None:
        """A DP rank gave a sign of life."""
        self._ledger.ranks[dp_rank].last_seen = now

    def demand(self, dp_rank: int, taken: int, now: float, *, hungry: bool) -> Decision:
        """A rank's training loop has begun step `taken`, and waits for the next or not."""
        return self._decide(
            self._ledger.demand(dp_rank, taken, hungry=hungry) + self._consider(now)
        )

    def prepared(self, dp_rank: int, step: int, digest: str, now: float) -> Decision:
        """A rank holds a step's header."""
        return self._decide(self._ledger.prepared(dp_rank, step, digest) + self._consider(now))

    def commit(self, dp_rank: int, step: int, now: float) -> Decision:
        """A rank has applied every step up to `step`."""
        return self._decide(self._commit(dp_rank, step, now) + self._consider(now))

    def set_policy_version(self, version: int, now: float, first_step: int) -> Decision:
        """DP rank 0 trains these weights from step `first_step` on."""
        if self._freshness.report(version, first_step):
            self._note(VersionReported(version, first_step))
        return self._decide(self._after_room(now))

    def checkpoint_saved(self, dp_rank: int, step: int) -> Decision:
        """A checkpoint taken after `step` is durable; DP rank 0 speaks for all.

        Raises ProtocolError for a step that was never planned.
        """
        if dp_rank == 0:
            self._checkpoints.saved(step)
        return self._decide([])

    def _commit(self, dp_rank: int, step: int, now: float) -> list[Effect]:
        return [*self._checkpoints.committed(self._ledger.commit(dp_rank, step), now)]

    # -- time and plans ---------------------------------------------------------------------

    def tick(self, now: float) -> Decision:
        """Do what has become due; call it at `next_deadline`."""
        self._intake.tick(now)
        if self._admission.held.give_up_late(now):
            self._departures = -1
        return self._decide(self._after_room(now))

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; None if nothing is waited for."""
        late = self._admission.held.next_deadline()
        deadlines = (self._intake.next_deadline(), self._planning.wake_at, late)
        return min((at for at in deadlines if at is not None), default=None)

    def planned(self, wanted: PlanWanted, plan: Plan, now: float) -> Decision:
        """The planner's answer: becomes the next step, unless it was a trial that missed."""
        return self._decide(self._planning.planned(wanted, plan, now) + self._after_room(now))

    def replanned(self, wanted: ReplanWanted, plan: Plan, now: float) -> Decision:
        """The planner's answer for an open step that was planned for other ranks."""
        return self._decide(self._planning.replanned(wanted, plan) + self._consider(now))

    def payloads_durable(self, entries: Sequence[Entry], now: float) -> Decision:
        """The journal has these payloads: they need no memory until their step."""
        self._planning.helped_since = None
        self._buffer.let_go(entries)
        return self._decide(self._after_room(now))

    def heed_journal(self, has_room: Callable[[int, int], bool]) -> None:
        """Let in only what the journal has room for: so many samples, of so many payload bytes."""
        self._admission.journal_has_room = has_room

    def journal_has_room(self, now: float) -> Decision:
        """The journal takes samples again: let in who was held back for it."""
        self._departures = -1
        return self._decide(self._after_room(now))

    def _after_room(self, now: float) -> list[Effect]:
        """Room may have been made: admit who waits, then see whether a step can be planned."""
        return self._let_in(now) + self._consider(now)

    def _let_in(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._departures != self._buffer.departures:
            self._departures = self._buffer.departures
            effects += self._admission.retry(now)
        return effects

    def _consider(self, now: float) -> list[Effect]:
        """Something has changed: see whether a step can be planned, or the run is at its end."""
        self._intake.settle(now)
        effects = self._let_in(now) + self._help(now)
        effects += self._planning.consider(now)
        effects += self._let_in(now)
        return effects + self._finish()

    def _help(self, now: float) -> list[Effect]:
        """Beginnings of groups fill the memory: the journal takes their payloads, if there is one.

        They come back for their step.
        """
        pressed, planning = self._admission.pressed, self._planning
        if not self.config.durable or planning.helped_since is not None or pressed is None:
            return []
        if pressed.cap != "bytes" or self._lacking() <= 0:
            return []
        entries = tuple(
            entry
            for group in self._buffer.groups
            for entry in group.entries
            if entry.sample.is_here
        )
        if not entries:
            return []
        planning.helped_since = now
        return [PayloadsToJournal(entries)]

    def _lacking(self) -> int:
        return self._freshness.lacking(self._buffer, self.config.trigger.batch)

    def _finish(self) -> list[Effect]:
        if self._planning.busy:
            return []
        return self._lifecycle.finish(flushing=self._freshness.flushing)

    # -- looking ----------------------------------------------------------------------------

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
        return self._ledger.steps.get(number)

    def is_expected(self, sample: Sample) -> bool:
        """Whether an open group waits for this sample: it may pass by others that are held."""
        return self._buffer.is_expected(sample)

    @property
    def hungry_since(self) -> float | None:
        """Since when a DP rank waits for a step that is not planned; None if none does."""
        return self._planning.hungry_since

    @property
    def drained(self) -> bool:
        """Whether the stream has ended and everything is committed."""
        return self._lifecycle.drained

    @property
    def deserted(self) -> bool:
        """Whether no rank is left that may come back.

        After a restart with steps that no saved checkpoint covers, ranks are still to come.
        """
        awaited = not self._ledger.ranks and len(self._checkpoints.retained) > 0
        return self._ledger.generation.deserted and not awaited

    def waits_for(self, now: float) -> str:
        """In words, whom the next step waits for, or the end of a phase or of the stream."""
        return self._waiting.explain(now)

    def stream_waits(self) -> list[str]:
        """Producers whose word the end of the stream still waits for."""
        return self._intake.agreement.pending_waits(None)

    def phase_waits(self, version: int) -> list[str]:
        """Producers whose word the end of the phase before this version still waits for."""
        return self._intake.agreement.pending_waits(version)

    @property
    def losses(self) -> Losses:
        """Accepted samples that the shutdown has dropped so far."""
        return self._dropping.losses or Losses()

    def name_undone(self) -> str:
        """The first of the samples that are in open steps or ready, oldest first, for the log."""
        return name_undone(self._ledger.steps, self._buffer)

    def statistics(self) -> Statistics:
        """A frozen snapshot."""
        return Statistics.of(
            self._buffer,
            self._totals,
            self._ledger,
            retained=self._checkpoints.retained,
            pushes_held=self._admission.num_held,
            pushes_held_bytes=self._admission.held.nbytes,
            backpressure=self._admission.pressed is not None,
            policy_version=self._freshness.reported,
            run_id=self.run_id,
            run_state=self._lifecycle.state,
        )
