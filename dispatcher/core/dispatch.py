"""The dispatcher's brain: events in, effects out, time as an argument.

It ties the parts together and adds nothing of its own: admission lets samples into the buffer,
planning makes steps of them when the trigger says so, the ledger follows the steps through the
ranks, checkpoints take it back, the ending lets everybody go. Invariant, at every return:
accepted = buffered + in flight + (committed - rewound) + dropped.
"""

from dispatcher.core.admission import Admission, Push
from dispatcher.core.buffer import SampleBuffer
from dispatcher.core.checkpoints import Checkpoints
from dispatcher.core.config import DispatchConfig
from dispatcher.core.dropping import Dropping
from dispatcher.core.ending import Ending
from dispatcher.core.events import DropReason, Effect, PlanWanted, ReplanWanted
from dispatcher.core.facts import (
    Fact,
    GenerationBegan,
    PhaseEnded,
    Remembered,
    RunBegan,
    StreamEnded,
    VersionReported,
)
from dispatcher.core.freshness import Freshness, before_phase
from dispatcher.core.ledger import StepLedger
from dispatcher.core.losses import Losses
from dispatcher.core.planning import Planning
from dispatcher.core.retained import Position
from dispatcher.core.standing import RankHello
from dispatcher.core.statistics import Statistics
from dispatcher.core.totals import Totals
from dispatcher.plan import Plan

STREAM_ENDED = "the stream has ended: a producer called end_stream"


class Dispatch:
    """One run: from pushed samples to committed steps.

    run_id: its name if it begins here; one that goes on keeps its own.
    """

    def __init__(self, config: DispatchConfig, run_id: str = "run") -> None:
        self.config = config
        self.run_id = run_id
        self._facts: list[Fact] = []
        self.buffer = SampleBuffer(config.limits, groups_matter=config.groups_matter)
        self.totals = Totals()
        note = self._note if config.durable else None  # a fact a sample: not built for nobody
        self.admission = Admission(
            self.buffer, self.totals, config.producer_credits, config.id_horizon, note
        )
        self.ledger = StepLedger(config.dp_size, config.max_open_steps, config.check_size)
        self.checkpoints = Checkpoints(self.ledger, self.totals, self._note, retain=config.retain)
        self.freshness = Freshness(config.max_staleness, config.staleness_policy)
        self._dropping = Dropping(self.buffer, self.totals, self._note)
        self._ending = Ending(
            self.buffer,
            self.ledger,
            self._dropping,
            batch=config.trigger.batch,
            flush_partial=config.flush_partial,
        )
        self._planning = Planning(
            config,
            self.buffer,
            self.ledger,
            admission=self.admission,
            freshness=self.freshness,
            dropping=self._dropping,
            ending=self._ending,
            totals=self.totals,
            note=self._note,
        )

    # -- what outlives the process ------------------------------------------------------------

    def restore(self, memory: Remembered) -> None:
        """Go on where an earlier process stopped; to be called before anything else."""
        self.totals.restore(memory.totals)
        self.buffer.restore(memory.entries, memory.next_ticket)
        self.checkpoints.restore(memory)
        if memory.run_id:
            self.run_id = memory.run_id
        else:
            self._note(RunBegan(self.run_id))
        self.admission.memory.restore(memory.producers, memory.given_ids)
        if memory.policy_version is not None:
            self.freshness.report(memory.policy_version)
        for version in memory.phases:
            self._end_phase(version)
        if memory.ended:
            self._ending.ended = True
            self.admission.close(STREAM_ENDED)

    def take_facts(self) -> list[Fact]:
        """What has to be durable before the effects that came with it are performed."""
        facts, self._facts = self._facts, []
        return facts

    def _note(self, fact: Fact) -> None:
        if self.config.durable:
            self._facts.append(fact)

    # -- producers --------------------------------------------------------------------------

    def push(self, push: Push, now: float, *, may_hold: bool = True) -> list[Effect]:
        """Samples arrived. With `may_hold=False` what finds no room is answered `full`."""
        return self.admission.push(push, now, may_hold=may_hold) + self._consider(now)

    def producer_gone(self, producer: str) -> None:
        """A producer's connection is lost."""
        self.admission.producer_gone(producer)

    def close_group(self, group_id: str, now: float) -> list[Effect]:
        """No further member will come: an incomplete group is dropped whole."""
        self._dropping.group(group_id)
        return self._after_room(now)

    def end_phase(self, version: int, now: float) -> list[Effect]:
        """Samples older than `version` go before anything newer is planned."""
        self._end_phase(version)
        self._note(PhaseEnded(version))
        self._dropping.open_groups(before_phase(version))
        return self._after_room(now)

    def _end_phase(self, version: int) -> None:
        self.admission.oldest_version = max(self.admission.oldest_version, version)
        self.freshness.end_phase(version)

    def end_stream(self, now: float) -> list[Effect]:
        """No producer will push again: flush what is buffered, then end the ranks' streams."""
        self._note(StreamEnded())
        return self._end(STREAM_ENDED, now)

    def drain(self, now: float) -> list[Effect]:
        """Shut down in order: accept nothing more, dispatch what is here, end the ranks."""
        self._ending.draining = True
        self._dropping.losses = self._dropping.losses or Losses()
        effects = self._end("the dispatcher is shutting down", now)
        if not self.ledger.ranks:
            self._dropping.everything(DropReason.SHUTDOWN)
            effects += self._finish()
        return effects

    def _end(self, why: str, now: float) -> list[Effect]:
        self._ending.ended = True
        effects = self.admission.close(why)
        self._dropping.open_groups()
        return effects + self._consider(now)

    # -- ranks ------------------------------------------------------------------------------

    def join(self, hello: RankHello, now: float) -> list[Effect]:
        """A DP rank connected, or has loaded a checkpoint since.

        Raises RankRefused, GenerationFenced, ProtocolError for what cannot be, or CheckpointRefused
        for a checkpoint that does not fit this run; one that does not fit the other ranks' fails
        the generation. All or nothing: nothing has changed where it raises.
        """
        generation = self.ledger.generation
        hello = self.ledger.check(hello)
        if hello.dp_rank == 0:
            self.checkpoints.check_saved(hello.saved)
        if hello.generation is not None and (error := generation.disagreement(hello)) is not None:
            return [*generation.fail(error, hello.client_id)]
        if hello.resume is not None:
            self.checkpoints.check_position(hello.resume, self.run_id)
        effects: list[Effect] = []
        if hello.resume is not None and generation.resumed is None:
            effects += self._resume(hello.resume, now)
        effects += self.ledger.join(hello, now)
        self._ending.untold(hello.client_id)
        if hello.generation is None:
            self._note(GenerationBegan(generation.number, generation.dp_size))
        rank = self.ledger.ranks[hello.dp_rank]
        effects += self._commit(hello.dp_rank, rank.committed, now)
        self.checkpoint_saved(hello.dp_rank, hello.saved)
        effects += self.ledger.release_ready()
        return effects + self._consider(now)

    def leave(
        self, dp_rank: int, client_id: str, now: float, *, for_good: bool = False
    ) -> list[Effect]:
        """A DP rank's connection is gone, `for_good` if it said goodbye."""
        self.ledger.leave(dp_rank, client_id, for_good=for_good)
        self._ending.untold(client_id)
        return self._consider(now)

    def seen(self, dp_rank: int, now: float) -> None:
        """A DP rank gave a sign of life."""
        self.ledger.ranks[dp_rank].last_seen = now

    def demand(self, dp_rank: int, taken: int, now: float, *, hungry: bool) -> list[Effect]:
        """A rank's training loop has begun step `taken`, and waits for the next or not."""
        return self.ledger.demand(dp_rank, taken, hungry=hungry) + self._consider(now)

    def prepared(self, dp_rank: int, step: int, digest: str, now: float) -> list[Effect]:
        """A rank holds a step's header."""
        return self.ledger.prepared(dp_rank, step, digest) + self._consider(now)

    def commit(self, dp_rank: int, step: int, now: float) -> list[Effect]:
        """A rank has applied every step up to `step`."""
        return self._commit(dp_rank, step, now) + self._consider(now)

    def set_policy_version(self, version: int, now: float) -> list[Effect]:
        """DP rank 0 trains these weights now."""
        self.freshness.report(version)
        self._note(VersionReported(version))
        return self._after_room(now)

    def checkpoint_saved(self, dp_rank: int, step: int) -> None:
        """A checkpoint taken after `step` is durable; DP rank 0 speaks for all.

        Raises ProtocolError for a step that was never planned.
        """
        if dp_rank == 0:
            self.checkpoints.saved(step)

    def _commit(self, dp_rank: int, step: int, now: float) -> list[Effect]:
        return [*self.checkpoints.committed(self.ledger.commit(dp_rank, step), now)]

    def _resume(self, position: Position, now: float) -> list[Effect]:
        """The generation's first rank has loaded a checkpoint."""
        committed, rewound = self.checkpoints.resume(position, self.run_id, now)
        if rewound.steps:
            self.freshness.reported = None  # the weights are older ones again
        self._ending.drained = False
        return [*committed, rewound]

    # -- time and plans ---------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Do what has become due; call it at `next_deadline`."""
        due = now - self.config.group_timeout
        self._dropping.open_groups(lambda entry: entry.arrived <= due)
        return self._after_room(now)

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; None if nothing is waited for."""
        group = next((opened for _, opened, _ in self.buffer.open_groups()), None)
        timeout = None if group is None else group + self.config.group_timeout
        return min((at for at in (timeout, self._planning.wake_at) if at is not None), default=None)

    def planned(self, wanted: PlanWanted, plan: Plan, now: float) -> list[Effect]:
        """The planner's answer: becomes the next step, unless it was a trial that missed."""
        effects = self._planning.planned(wanted, plan, now)
        return effects + (self._after_room(now) if effects else self._consider(now))

    def replanned(self, wanted: ReplanWanted, plan: Plan, now: float) -> list[Effect]:
        """The planner's answer for an open step that was planned for other ranks."""
        return self._planning.replanned(wanted, plan) + self._consider(now)

    def _after_room(self, now: float) -> list[Effect]:
        """Room may have been made: admit who waits, then see whether a step can be planned."""
        return self.admission.retry(now) + self._consider(now)

    def _consider(self, now: float) -> list[Effect]:
        """Something has changed: see whether a step can be planned, or the run is at its end."""
        return self._planning.consider(now) + self._finish()

    def _finish(self) -> list[Effect]:
        if self._planning.busy:
            return []
        return self._ending.finish(flushing=self.freshness.flushing)

    # -- looking ----------------------------------------------------------------------------

    @property
    def losses(self) -> Losses:
        """Accepted samples that the shutdown has dropped so far."""
        return self._dropping.losses or Losses()

    @property
    def drained(self) -> bool:
        """Whether the stream has ended and everything is committed."""
        return self._ending.drained

    @property
    def deserted(self) -> bool:
        """Whether no rank is left that may come back.

        After a restart with steps that no saved checkpoint covers, ranks are still to come.
        """
        awaited = not self.ledger.ranks and len(self.checkpoints.retained) > 0
        return self.ledger.generation.deserted and not awaited

    def statistics(self) -> Statistics:
        """A frozen snapshot."""
        return Statistics.of(
            self.buffer,
            self.totals,
            self.ledger,
            retained=self.checkpoints.retained,
            pushes_held=self.admission.num_held,
            policy_version=self.freshness.reported,
            run_id=self.run_id,
            phase=self._ending.phase,
        )
