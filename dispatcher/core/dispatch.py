"""The dispatcher's brain: events in, effects out, time as an argument.

It ties the parts together and adds nothing of its own: admission lets samples into the buffer, the
trigger says when a step is planned, the ledger follows the step through the ranks. Invariant, at
every return: accepted = buffered + in flight + (committed - rewound) + dropped.
"""

from collections.abc import Callable

from dispatcher.core.admission import Admission, Push
from dispatcher.core.buffer import Entry, SampleBuffer
from dispatcher.core.checkpoints import Checkpoints
from dispatcher.core.config import DispatchConfig
from dispatcher.core.events import (
    Drained,
    DropReason,
    Effect,
    EndRanks,
    PlanWanted,
    ReplanWanted,
    StepCommitted,
)
from dispatcher.core.facts import (
    Dropped,
    Fact,
    GenerationBegan,
    PhaseEnded,
    Planned,
    Remembered,
    RunBegan,
    StreamEnded,
    VersionReported,
)
from dispatcher.core.freshness import Freshness, before_phase
from dispatcher.core.ledger import StepLedger
from dispatcher.core.planning import report_plan, request_plan, request_replan
from dispatcher.core.retained import Position
from dispatcher.core.standing import RankHello
from dispatcher.core.statistics import Statistics
from dispatcher.core.step import OpenStep
from dispatcher.core.totals import Totals
from dispatcher.core.trigger import Go, Standing, decide
from dispatcher.plan import Plan

STREAM_ENDED = "the stream has ended: a producer called end_stream"


class Dispatch:
    """One run: from pushed samples to committed steps.

    run_id: its name if it begins here; one that goes on keeps its own.
    """

    def __init__(self, config: DispatchConfig, run_id: str = "run") -> None:
        self.config = config
        self.run_id = run_id
        self.buffer = SampleBuffer(config.limits, groups_matter=config.groups_matter)
        self.totals = Totals()
        note = self._note if config.durable else None  # a fact a sample: not built for nobody
        self.admission = Admission(
            self.buffer, self.totals, config.producer_credits, config.id_horizon, note
        )
        self.ledger = StepLedger(config.dp_size, config.max_open_steps, config.check_size)
        self.checkpoints = Checkpoints(self.ledger, self.totals, self._note, retain=config.retain)
        self.freshness = Freshness(config.max_staleness, config.staleness_policy)
        self._planning: PlanWanted | ReplanWanted | None = None
        self._hungry_since: float | None = None
        self._tried: int | None = None
        self._wake_at: float | None = None
        self._draining = self._ended = False
        #: Whether the stream has ended and everything is committed.
        self.drained = False
        self._ranks_ended: set[str] = set()
        self._facts: list[Fact] = []

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
            self.admission.oldest_version = max(self.admission.oldest_version, version)
            self.freshness.end_phase(version)
        if memory.ended:
            self._ended = True
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
        self._drop(DropReason.INCOMPLETE_GROUP, self.buffer.drop_group(group_id))
        return self._after_room(now)

    def end_phase(self, version: int, now: float) -> list[Effect]:
        """Samples older than `version` go before anything newer is planned."""
        self.admission.oldest_version = max(self.admission.oldest_version, version)
        self.freshness.end_phase(version)
        self._note(PhaseEnded(version))
        self._drop_groups(before_phase(version))
        return self._after_room(now)

    def end_stream(self, now: float) -> list[Effect]:
        """No producer will push again: flush what is buffered, then end the ranks' streams."""
        self._note(StreamEnded())
        return self._end(STREAM_ENDED, now)

    def drain(self, now: float) -> list[Effect]:
        """Shut down in order: accept nothing more, dispatch what is here, end the ranks."""
        self._draining = True
        effects = self._end("the dispatcher is shutting down", now)
        if not self.ledger.ranks:
            self._drop_all(DropReason.SHUTDOWN)
            effects += self._finish()
        return effects

    # -- ranks ------------------------------------------------------------------------------

    def join(self, hello: RankHello, now: float) -> list[Effect]:
        """A DP rank connected, or has loaded a checkpoint since.

        Raises RankRefused, GenerationFenced, or CheckpointRefused for a checkpoint that does not
        fit this run; one that does not fit the other ranks' fails the generation.
        """
        self.ledger.check(hello)
        if hello.generation is not None and (error := self.ledger.disagreement(hello)) is not None:
            return self.ledger.fail(error, hello.client_id)
        effects: list[Effect] = []
        if hello.resume is not None and self.ledger.resumed is None:
            effects += self._resume(hello.resume, now)
        effects += self.ledger.join(hello, now)
        self._ranks_ended.discard(hello.client_id)  # its last connection may have swallowed the end
        if hello.generation is None:
            self._note(GenerationBegan(self.ledger.generation, self.ledger.dp_size))
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
        self._ranks_ended.discard(client_id)  # it may not have heard of the end
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
        done = self.ledger.commit(dp_rank, step)
        for one in done:
            self.checkpoints.committed(one)
        return [_report_commit(one, now) for one in done]

    def _resume(self, position: Position, now: float) -> list[Effect]:
        """The generation's first rank has loaded a checkpoint."""
        done, went = self.checkpoints.resume(position, self.run_id)
        if went.steps:
            self.freshness.reported = None  # the weights are older ones again
        self.drained = False
        return [*(_report_commit(step, now) for step in done), went]

    # -- time and plans ---------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Do what has become due; call it at `next_deadline`."""
        due = now - self.config.group_timeout
        self._drop_groups(lambda entry: entry.arrived <= due)
        return self._after_room(now)

    def next_deadline(self) -> float | None:
        """When `tick` is wanted next; None if nothing is waited for."""
        group = next((opened for _, opened, _ in self.buffer.open_groups()), None)
        timeout = None if group is None else group + self.config.group_timeout
        return min((at for at in (timeout, self._wake_at) if at is not None), default=None)

    def planned(self, wanted: PlanWanted, plan: Plan, now: float) -> list[Effect]:
        """The planner's answer: becomes the next step, unless it was a trial that missed."""
        assert wanted is self._planning
        self._planning = None
        if wanted.dp_size != self.ledger.dp_size:
            return self._consider(now)
        if wanted.trial and plan.excess > self.config.target_excess:
            self._tried = len(wanted.entries)
            return self._consider(now)
        chosen = [wanted.entries[int(at)] for at in plan.chosen]
        version = self.freshness.training_version(len(self.ledger.uncommitted()))
        report = report_plan(
            self.ledger.next_step, plan, chosen, wanted.trigger, version=version, now=now
        )
        for entry in chosen:
            self.totals.dispatched.add(entry.sample.tokens)
        self.buffer.take(chosen)
        for entry in wanted.entries:
            entry.skips += 1  # the chosen ones are gone, nobody reads theirs again
        self._tried = self._hungry_since = None
        self.totals.planned[wanted.trigger] += 1
        self.totals.small_steps += len(chosen) < self.config.trigger.batch
        effects = self.ledger.open(plan, wanted.entries, now)
        if self.config.durable:  # the fact is as large as the window: not built for nobody
            step, gone = self.ledger.uncommitted()[-1], set(chosen)
            left = tuple(entry.ticket for entry in wanted.entries if entry not in gone)
            self._note(Planned(step.number, step.digest, now, step.tickets(), left))
        return [report, *effects, *self._after_room(now)]

    def replanned(self, wanted: ReplanWanted, plan: Plan, now: float) -> list[Effect]:
        """The planner's answer for an open step that was planned for other ranks."""
        assert wanted is self._planning
        self._planning = None
        if wanted.step is not self.ledger.outgrown or wanted.dp_size != self.ledger.dp_size:
            return self._consider(now)  # the number of ranks has changed once more
        effects = self.ledger.replan(wanted.step.number, plan, wanted.entries)
        step = self.ledger.steps[wanted.step.number]
        self._note(Planned(step.number, step.digest, step.planned_at, step.tickets(), ()))
        return effects + self._consider(now)

    def _consider(self, now: float) -> list[Effect]:
        """Ask the trigger, if a step is wanted and none is being planned."""
        self._wake_at = None
        if not self.ledger.hungry:
            self._hungry_since = None
        elif self._hungry_since is None:
            self._hungry_since = now
        admitted: list[Effect] = []
        while self.ledger.again and self.ledger.wanted:
            admitted += self.ledger.open_again()
        if self._planning is None and (outgrown := self.ledger.outgrown) is not None:
            self._planning = request_replan(outgrown, self.ledger.dp_size)
            return [*admitted, self._planning]
        if self._planning is not None or not self.ledger.wanted:
            return admitted + self._finish()
        while self._drop_unwanted():
            admitted += self.admission.retry(now)
        window = self.config.trigger.window
        ready = self.freshness.count(self.buffer, window)
        decision = decide(self.config.trigger, self._standing(ready, now))
        if isinstance(decision, Go):
            entries = self.freshness.window(self.buffer, window)
            batch = self.config.trigger.batch
            due = self.freshness.must_go(entries, len(self.ledger.uncommitted()), batch)
            self._planning = request_plan(entries, due, batch, self.ledger.dp_size, decision)
            return [*admitted, self._planning]
        if decision.seconds is not None:
            self._wake_at = now + decision.seconds
        return admitted + self._finish()

    def _standing(self, ready: int, now: float) -> Standing:
        return Standing(
            ready=ready,
            full=self.buffer.pressed is not None,
            growing=self.buffer.num_open_groups > 0,
            flush=self.freshness.flushing or (self._ended and self._flushes(ready)),
            hungry_for=None if self._hungry_since is None else now - self._hungry_since,
            tried=self._tried,
        )

    # -- dropping and finishing -------------------------------------------------------------

    def _drop_unwanted(self) -> int:
        """Drop what the next step may not have; returns how many samples that were."""
        before = len(self.buffer)
        above = self.config.drop_above
        if above is not None:
            oversize = self.buffer.drop_ready(lambda entry: entry.sample.tokens > above)
            self._drop(DropReason.OVERSIZE, oversize)
        is_stale = self.freshness.stale(len(self.ledger.uncommitted()))
        if is_stale is not None:
            self._drop(DropReason.STALE, self.buffer.drop_ready(is_stale))
        return before - len(self.buffer)

    def _drop(self, reason: DropReason, entries: list[Entry]) -> None:
        if entries:
            self.totals.dropped[reason] += len(entries)
            self._note(Dropped(tuple(entry.ticket for entry in entries), reason))

    def _drop_groups(self, doomed: Callable[[Entry], bool]) -> None:
        """Drop the open groups that have a member for which `doomed` holds."""
        for group_id in [
            group_id
            for group_id, _, entries in self.buffer.open_groups()
            if any(doomed(entry) for entry in entries)
        ]:
            self._drop(DropReason.INCOMPLETE_GROUP, self.buffer.drop_group(group_id))

    def _drop_all(self, reason: DropReason) -> None:
        self._drop_groups(lambda _: True)
        self._drop(reason, self.buffer.drop_ready(lambda _: True))

    def _after_room(self, now: float) -> list[Effect]:
        """Room may have been made: admit who waits, then see whether a step can be planned."""
        return self.admission.retry(now) + self._consider(now)

    def _end(self, why: str, now: float) -> list[Effect]:
        self._ended = True
        effects = self.admission.close(why)
        self._drop_groups(lambda _: True)
        return effects + self._consider(now)

    def _flushes(self, ready: int) -> bool:
        return self.config.flush_partial or ready >= self.config.trigger.batch

    def _finish(self) -> list[Effect]:
        """After the end: tell ranks that nothing is left, and the shell when all is done."""
        if not self._ended or self._planning is not None or self.ledger.again:
            return []
        if not self.freshness.flushing and not self._flushes(self.buffer.num_ready):
            self._drop_all(DropReason.LAST_BATCH)
        if len(self.buffer):
            return []
        effects: list[Effect] = []
        ending = {
            dp_rank: rank.client_id
            for dp_rank, rank in self.ledger.ranks.items()
            if rank.connected and rank.client_id not in self._ranks_ended
        }
        if ending:
            self._ranks_ended.update(ending.values())
            effects.append(EndRanks(tuple(sorted(ending)), "the stream has ended"))
        if not self.ledger.steps and not self.drained:
            self.drained = True
            effects.append(Drained("drained" if self._draining else "done"))
        return effects

    @property
    def deserted(self) -> bool:
        """Whether no rank is left that may come back.

        After a restart with steps that no saved checkpoint covers, ranks are still to come.
        """
        awaited = not self.ledger.ranks and len(self.checkpoints.retained) > 0
        return self.ledger.deserted and not awaited

    # -- looking ----------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """A frozen snapshot."""
        ranks, totals, retained = self.ledger.ranks, self.totals, self.checkpoints.retained
        return Statistics(
            received=dict(totals.received),
            received_tokens=totals.arrived.tokens,
            received_bytes=totals.received_bytes,
            buffered=len(self.buffer),
            buffered_tokens=self.buffer.held_tokens,
            buffered_bytes=self.buffer.held_bytes,
            ready=self.buffer.num_ready,
            open_groups=self.buffer.num_open_groups,
            oldest_arrival=self.buffer.oldest_arrival(),
            pushes_held=self.admission.num_held,
            backpressure=self.buffer.pressed is not None,
            in_flight=self.ledger.in_flight,
            open_steps=len(self.ledger.uncommitted()),
            steps_planned=dict(totals.planned),
            small_steps=totals.small_steps,
            steps_committed=totals.steps_committed,
            samples_committed=totals.samples_committed,
            steps_rewound=totals.steps_rewound,
            samples_rewound=totals.samples_rewound,
            steps_not_rewound=totals.steps_not_rewound,
            steps_retained=len(retained),
            samples_retained=retained.samples,
            retained_bytes=retained.nbytes,
            dropped=dict(totals.dropped),
            run_id=self.run_id,
            generation=self.ledger.generation,
            dp_size=self.ledger.dp_size,
            policy_version=self.freshness.reported,
            ranks_connected=sum(rank.connected for rank in ranks.values()),
            last_seen={dp_rank: rank.last_seen for dp_rank, rank in sorted(ranks.items())},
            wanted=self.ledger.wanted,
            hungry=self.ledger.hungry,
            phase=self._phase(),
            selection_bias=totals.arrived.distance(totals.dispatched),
        )

    def _phase(self) -> str:
        if self.drained:
            return "drained"
        return "draining" if self._draining else "ended" if self._ended else "running"


def _report_commit(step: OpenStep, now: float) -> StepCommitted:
    return StepCommitted(step.number, step.num_samples, now - step.planned_at)
