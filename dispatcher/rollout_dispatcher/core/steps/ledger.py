"""The step ledger: delivers, releases and commits open steps, as the DP ranks report.

Invariants: a step is released only when every DP rank holds it and has begun; it is committed only
when every DP rank of one generation has committed it; a step that is delivered again is identical,
unless it has lost samples (`Attempts`) or a generation has another number of DP ranks: then steps
are planned again in order, and none is delivered from the first *unplanned* one on. After a rewind,
steps are opened one by one as ranks have room for them.

`Attempts`: samples that a DP rank cannot fetch are dropped, and their step is planned again.

    a rank sends Unresolved       effect (the same where the journal cannot read for it)
    of an earlier attempt         none: the step is planned again already
    of a step that is released    the generation fails: others may train it already
        otherwise                 its samples are dropped, groups whole; the rest of the step,
                                  filled up, is planned as the next attempt
    no sample of it remains       it takes over the samples of the step after it, and so on; the
                                  last step is withdrawn until its number is planned again

Reports take effect once every rank is connected and has begun: after a restart only ranks know
which steps were released, and a checkpoint may commit or rewind them. Invariant: an attempt is a
fact before it is delivered, and no attempt has two plans.
"""

from collections.abc import Iterator, Mapping, Sequence

from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.effects import (
    Deliver,
    Effect,
    Redelivered,
    Release,
    SamplesUnresolved,
    WithdrawStep,
)
from rollout_dispatcher.core.facts import AppendFact, DropReason, Withdrawn
from rollout_dispatcher.core.steps.generation import Generation, SizeCheck
from rollout_dispatcher.core.steps.rank_state import RankHello, RankState, Unresolved
from rollout_dispatcher.core.steps.step import OpenStep, OpenSteps, StepEvent, StepState, planned
from rollout_dispatcher.errors import GenerationFenced, ProtocolError
from rollout_dispatcher.payload import Reference
from rollout_planner.types import Plan


class StepLedger:
    """Open steps and the ranks of the current generation."""

    def __init__(
        self, dp_size: int, max_open_steps: int, check_size: SizeCheck | None = None
    ) -> None:
        self.generation = Generation(dp_size, check_size)
        #: The DP ranks of the current generation, as far as they have joined.
        self.ranks: Mapping[int, RankState] = self.generation.ranks
        self.steps = OpenSteps()
        self.max_open_steps = max_open_steps
        #: Whether no step is opened any more.
        self.over = False

    # -- ranks come and go ------------------------------------------------------------------

    def check(self, hello: RankHello) -> RankHello:
        """Validate the hello; returns it without claims that cannot be true.

        Raises RankRefused or GenerationFenced for a rank that may not join, and ProtocolError for
        an impossible claim.
        """
        self.generation.check(hello)
        hello.check(self.steps.next_number - 1, self.steps.last_announced)
        for number, count in hello.received.items():
            step = self.steps.find(number)
            if step is None:
                continue
            attempt = hello.attempts.get(number, 0)
            step.check_attempt(attempt, begun=number <= hello.taken)
            if attempt == step.attempt and step.fits(hello.dp_size):
                step.check_received(count)
        return self.generation.validated(hello)

    def begin(self, hello: RankHello) -> list[Effect]:
        """Begin a new generation, and fence the one before."""
        fenced = self.generation.begin(hello)
        self.steps.start_over()
        again = (
            Redelivered(at, "new-generation" if step.dp_size == hello.dp_size else "new-size")
            for at, step in self.steps.items()
        )
        return [*fenced, *again]

    def join(self, hello: RankHello, now: float) -> list[Effect]:
        """Join a rank; returns its deliveries.

        hello: as `check` returned it.
        """
        known = self.ranks.get(hello.dp_rank)
        if known is not None and hello.resume is not None and not known.begun:
            known = None  # it has loaded a checkpoint, and dropped its steps
        effects: list[Effect] = []
        if known is None and hello.begun:
            effects += self._reopen_through(max(hello.prepared, hello.committed))
        withdrawn = dict.fromkeys(self.steps.withdrawn, -1)
        hello = hello.of_attempts(self.steps.attempts | withdrawn)
        received = hello.received
        if known is None:
            rank = RankState.from_hello(
                hello, now, committed=self.steps.committed, ready=self._last_deliverable
            )
        elif known.client_id == hello.client_id:
            rank = known
            rank.reconnected(hello, now)
        else:
            rank, received = known.succeeded_by(hello, now), {}
        self.generation.assign(hello.dp_rank, rank)
        if not self.generation.agrees(rank):
            return effects
        effects += [WithdrawStep((hello.dp_rank,), number) for number in sorted(withdrawn)]
        for number in self._deliverable_after(rank.committed):
            first, attempt = received.get(number, 0), self.steps[number].attempt
            effects.append(Deliver(hello.dp_rank, number, first, attempt))
            if known is not None:
                effects.append(Redelivered(number, "reconnect"))
        return effects

    def leave(self, dp_rank: int, client_id: str, *, for_good: bool = False) -> None:
        """A connection is gone; its steps stay open."""
        rank = self.ranks.get(dp_rank)
        if rank is not None and rank.client_id == client_id:
            rank.disconnected(for_good=for_good)
            self.generation.changed(dp_rank)

    def _reopen_through(self, last: int) -> list[Effect]:
        """Open waiting steps up to `last`, which a rank holds since before the dispatcher's
        restart.
        """
        effects: list[Effect] = []
        while self.steps.waiting and self.steps.last_opened < last:
            effects += self.open_waiting()
        return effects

    # -- reports of ranks -------------------------------------------------------------------

    def demand(self, dp_rank: int, taken: int, *, hungry: bool) -> list[Effect]:
        """A rank's training loop has begun step `taken`. hungry: it waits for the next step.

        Raises ProtocolError for a step that this rank cannot have. Fails the generation if others
        have loaded a checkpoint and this rank has not.
        """
        rank = self.active_rank(dp_rank)
        if taken > rank.prepared:
            raise ProtocolError(f"DP rank {dp_rank} took step {taken} before it was prepared")
        if not self.generation.agrees(rank):
            refused = self.generation.disagreement_after(dp_rank, None)
            return [*self.generation.fail(refused)]
        first, rank.begun = not rank.begun, True
        rank.taken = max(rank.taken, taken)
        rank.hungry = hungry
        self.generation.changed(dp_rank)
        return self.release_ready() if first else []

    def prepared(self, dp_rank: int, number: int, digest: str, attempt: int = 0) -> list[Effect]:
        """A rank can train step `number`; releases the step if all others can.

        Another digest fails the generation: all ranks have to train the same plan.
        """
        rank = self.active_rank(dp_rank)
        step = self.steps.find(number)
        if self.is_void(rank, number, attempt) or number in rank.unresolved:
            return []
        if step is not None and number > rank.prepared + 1:
            return []  # an earlier step is planned again, and this one is delivered after it
        if step is None or number > self._last_deliverable:
            raise ProtocolError(f"DP rank {dp_rank} prepared step {number}, which is not open")
        step.check_attempt(attempt, begun=False)
        if digest != step.digest:
            fenced = GenerationFenced(
                f"DP rank {dp_rank} holds another plan of step {number} (digest {digest}, not "
                f"{step.digest}); all ranks must restart"
            )
            return [*self.generation.fail(fenced)]
        rank.prepared = max(rank.prepared, number)
        self.generation.changed(dp_rank)
        if step.state is StepState.RELEASED:
            return [Release((dp_rank,), number)]
        return self.release_ready()

    def is_void(self, rank: RankState, number: int, attempt: int) -> bool:
        """Whether a rank's report of a step refers to a superseded plan."""
        if not self.generation.agrees(rank):
            return True  # it refers to a step that was open before the rewind
        step, withdrawn = self.steps.find(number), self.steps.withdrawn.get(number, -1)
        return attempt <= withdrawn if step is None else attempt < step.attempt

    def release_ready(self) -> list[Effect]:
        """Release every step that all DP ranks hold, while all are connected and have begun.

        A rank whose process was replaced no longer holds a PREPARED step.
        """
        effects: list[Effect] = []
        for step in self.steps.unreleased():
            if not self.generation.has_prepared(step.number):
                break
            if step.state is StepState.PLANNED:
                step.move(StepEvent.ALL_PREPARED)
            if step.state is StepState.PREPARED and self.generation.all_connected:
                step.move(StepEvent.ALL_CONNECTED)
                effects.append(Release(tuple(sorted(self.ranks)), step.number))
        return effects

    def commit(self, dp_rank: int, number: int) -> list[OpenStep]:
        """A rank has applied every step up to `number`; returns the steps now committed.

        Raises ProtocolError for a step that this rank was never given.
        """
        rank = self.active_rank(dp_rank)
        if number > rank.prepared:
            raise ProtocolError(f"DP rank {dp_rank} committed step {number} before it was prepared")
        rank.committed = max(rank.committed, number)
        self.generation.changed(dp_rank)
        through = self.steps.committed
        while through < self.steps.last_opened and self.generation.has_committed(through + 1):
            through += 1
        return self.steps.commit(through)

    def active_rank(self, dp_rank: int) -> RankState:
        """The rank; raises the error that its generation has failed with."""
        if self.generation.failed is not None:
            raise self.generation.failed
        return self.ranks[dp_rank]

    # -- steps are opened -------------------------------------------------------------------

    def open(
        self, plan: Plan, entries: tuple[Entry, ...], now: float, usual_loss: float
    ) -> list[Effect]:
        """Add the next step; returns its first delivery to every rank, if none comes before it.

        usual_loss: loss tokens of the mean arrival.
        """
        step = self.steps.add(plan, entries, self.generation.dp_size, now, usual_loss)
        return self._deliver_after(step.number - 1)

    def replan(self, number: int, plan: Plan, entries: tuple[Entry, ...]) -> list[Effect]:
        """Give an unplanned step a plan; returns its delivery, and of the steps that waited for
        it.
        """
        self.steps.replan(number, plan, entries, self.generation.dp_size)
        return self._deliver_after(number - 1)

    def open_waiting(self) -> list[Effect]:
        """Open the next waiting step; returns its delivery."""
        step = self.steps.open_waiting()
        return [Redelivered(step.number, "rewind"), *self._deliver_after(step.number - 1)]

    def resume(self, after: int, rewound: Sequence[OpenStep]) -> None:
        """Resume the generation after step `after`: with the `rewound` steps, then with the open
        ones.
        """
        self.steps.rewind(rewound)
        self.generation.resumed = after

    def _deliver_after(self, number: int) -> list[Effect]:
        """Deliver the steps after this one to every rank that may have them."""
        return [
            Deliver(dp_rank, ready, attempt=self.steps[ready].attempt)
            for ready in self._deliverable_after(number)
            for dp_rank, rank in sorted(self.ranks.items())
            if self.generation.agrees(rank)
        ]

    def _deliverable_after(self, number: int) -> list[int]:
        last = self._last_deliverable
        return [*range(max(number, self.steps.committed) + 1, last + 1)]

    @property
    def _last_deliverable(self) -> int:
        """The last step that may be delivered: no unplanned one is before it."""
        unplanned = self.unplanned
        return self.steps.last_opened if unplanned is None else unplanned.number - 1

    # -- requests for steps -----------------------------------------------------------------

    @property
    def unplanned(self) -> OpenStep | None:
        """The first step that has no plan for as many DP ranks as there are now."""
        return self.steps.unplanned(self.generation.dp_size)

    @property
    def has_room(self) -> bool:
        """Whether every DP rank has room for one more step."""
        if self.over or len(self.steps) >= self.max_open_steps:
            return False
        return self.generation.takes_after(self.steps.last_opened)

    @property
    def hungry(self) -> bool:
        """Whether some DP rank waits for a step that is not planned yet (is *hungry*)."""
        return self.generation.waits_after(self.steps.last_opened)


class Attempts:
    """Drops samples that ranks cannot fetch, and has their steps planned again."""

    def __init__(self, ledger: StepLedger, dropping: Dropping, append_fact: AppendFact) -> None:
        self._ledger, self._dropping, self._append = ledger, dropping, append_fact
        self._waiting = False

    def unresolved(self, dp_rank: int, missing: Unresolved) -> list[Effect]:
        """A rank cannot get samples of a step; see `report_missing`."""
        return self.report_missing(dp_rank, missing) or self.drop_unresolved()

    def report_missing(self, dp_rank: int, missing: Unresolved) -> list[Effect]:
        """Keep a report of missing samples until `drop_unresolved`; the rank is not prepared for
        their step any more.

        Raises ProtocolError for a step that is not open, an attempt that is not known, or samples
        that are not in it or in no payload store. Fails the generation if the step is released.
        """
        ledger = self._ledger
        rank, step = ledger.active_rank(dp_rank), ledger.steps.get(missing.step)
        if ledger.is_void(rank, missing.step, missing.attempt):
            return []
        if step is None or not step.digest:
            raise ProtocolError(
                f"DP rank {dp_rank} cannot get samples of step {missing.step}, which is not open"
            )
        step.check_attempt(missing.attempt, begun=False)
        if missing.reason is DropReason.UNRESOLVED:
            _check_samples(dp_rank, step, missing)
        if self._may_be_trained(step):
            return [*ledger.generation.fail(_too_late(dp_rank, missing))]
        rank.unresolved[missing.step], self._waiting = missing, True
        rank.lost_plan(missing.step)
        ledger.generation.changed(dp_rank)
        ledger.steps.withhold(missing.step)
        return []

    def drop_unresolved(self) -> list[Effect]:
        """Drop all reported samples, once every rank is connected."""
        if not self._waiting or not self._ledger.generation.all_connected:
            return []
        reports, self._waiting = list(self._reports()), False
        for dp_rank, missing in reports:
            step = self._ledger.steps.get(missing.step)
            if step is not None and self._may_be_trained(step):
                return [*self._ledger.generation.fail(_too_late(dp_rank, missing))]
        lost = [effect for report in reports for effect in self._remove_samples(*report)]
        return [*lost, *self._compact_steps()] if lost else []

    def _reports(self) -> Iterator[tuple[int, Unresolved]]:
        """Take all reports; yields those that are not void."""
        for dp_rank, rank in sorted(self._ledger.ranks.items()):
            for missing in rank.unresolved.values():
                if not self._ledger.is_void(rank, missing.step, missing.attempt):
                    yield dp_rank, missing
            rank.unresolved.clear()

    def _may_be_trained(self, step: OpenStep) -> bool:
        last = max(max(rank.taken, rank.released) for rank in self._ledger.ranks.values())
        return step.state is StepState.RELEASED or last >= step.number

    # -- samples are lost -------------------------------------------------------------------

    def _remove_samples(self, dp_rank: int, missing: Unresolved) -> list[Effect]:
        """Drop the samples of one report that are still in the step."""
        steps = self._ledger.steps
        lost = _with_groups(steps[missing.step], missing.sample_ids)
        if not lost:
            return []
        left = steps.remove_samples(missing.step, lost)
        for at, rank in self._ledger.ranks.items():
            rank.lost_plan(missing.step)
            self._ledger.generation.changed(at)
        self._dropping.planned(missing.reason, lost)
        self._append(planned(left))
        first = lost[0].sample.sample_id
        found = SamplesUnresolved(
            dp_rank, missing.step, len(lost), first, missing.why, missing.reason
        )
        again = [Redelivered(number, "unresolved") for number in steps if number >= missing.step]
        return [found, *again]

    def _compact_steps(self) -> list[Effect]:
        """Move later steps up where a step has no samples left."""
        steps, effects = self._ledger.steps, list[Effect]()
        while (empty := next((at for at, one in steps.items() if not one.num_samples), -1)) >= 0:
            for step in steps.renumber(empty):
                self._append(planned(step))
            number = steps.next_number
            self._append(Withdrawn(number, steps.withdrawn[number]))
            effects.append(WithdrawStep(tuple(sorted(self._ledger.ranks)), number))
        return effects


def _check_samples(dp_rank: int, step: OpenStep, lost: Unresolved) -> None:
    """Raise ProtocolError if a rank names samples that it cannot have been sent to fetch."""
    stored = {
        sample.sample_id for sample in step.samples() if isinstance(sample.payload, Reference)
    }
    if strange := set(lost.sample_ids) - stored:
        raise ProtocolError(
            f"DP rank {dp_rank} cannot get sample {min(strange)} of step {lost.step}, which is in "
            "no payload store, or not of that step"
        )


def _with_groups(step: OpenStep, sample_ids: tuple[str, ...]) -> list[Entry]:
    """The step's entries of these samples, with their groups; oldest first."""
    named = [entry for entry in step.entries() if entry.sample.sample_id in set(sample_ids)]
    groups, tickets = {entry.group for entry in named} - {-1}, {entry.ticket for entry in named}
    found = (e for e in step.entries() if e.ticket in tickets or e.group in groups)
    return sorted(found, key=lambda entry: entry.ticket)


def _too_late(dp_rank: int, lost: Unresolved) -> GenerationFenced:
    why = f" ({lost.why})" if lost.why else ""
    return GenerationFenced(
        f"DP rank {dp_rank} cannot get sample {lost.sample_ids[0]} of step {lost.step}{why}, and "
        "other DP ranks may train that step already; restart all ranks: it is planned again "
        "without what is gone"
    )
