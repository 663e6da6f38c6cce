"""The step ledger: what follows for open steps from what the DP ranks of a generation say.

Invariants: a step is released only when every DP rank holds it and has said where it goes on; it is
committed only when every DP rank has said so in one generation; a step that is delivered again is
identical, unless it has lost samples (`attempts`), or a generation brought another number of DP
ranks: then steps are planned again one by one, in order, and from the first that is not yet (the
*unplanned* one) on nothing is delivered. After a rewind, steps are opened one by one as ranks have
room for them.

`Attempts`: what DP ranks cannot get of a step is dropped, and the step is planned again.

    a rank says Unresolved        what becomes of it (so too where the journal cannot read for it)
    of an earlier attempt         nothing: the step is planned again already
    of a step that is released    the generation fails: others may train it already
    otherwise                     its samples are dropped, groups whole; what is left of the step,
                                  filled up, is planned as the next attempt
    and nothing is left           it takes over the samples of the step after it, and so on; the
                                  last step is withdrawn, until samples for it come

It is acted on once every rank is there and has said where it goes on: after a restart only ranks
know which steps were released, and a checkpoint may commit or rewind them. Invariant: whatever is
lost, ranks are told of an attempt once it is a fact, and no attempt has two plans.
"""

from collections.abc import Iterable, Iterator, Mapping

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
from rollout_dispatcher.core.facts import DropReason, Note, Withdrawn
from rollout_dispatcher.core.steps.generation import Generation, SizeCheck
from rollout_dispatcher.core.steps.rank_state import RankHello, RankState, Unresolved
from rollout_dispatcher.core.steps.step import (
    MicroBatches,
    OpenStep,
    OpenSteps,
    StepEvent,
    StepState,
    planned,
)
from rollout_dispatcher.errors import GenerationFenced, ProtocolError
from rollout_dispatcher.payload import Reference
from rollout_planner.types import Plan


class StepLedger:
    """Brings the open steps and the ranks of the current generation together."""

    def __init__(
        self, dp_size: int, max_open_steps: int, check_size: SizeCheck | None = None
    ) -> None:
        self.generation = Generation(dp_size, check_size)
        self.steps = OpenSteps()
        self.max_open_steps = max_open_steps
        #: Whether no step is opened any more.
        self.over = False

    @property
    def ranks(self) -> Mapping[int, RankState]:
        """The DP ranks of the current generation, as far as they have joined."""
        return self.generation.ranks

    # -- ranks come and go ------------------------------------------------------------------

    def check(self, hello: RankHello) -> RankHello:
        """What of this hello is to be believed.

        Raises RankRefused or GenerationFenced for a rank that may not join, and ProtocolError for
        one that says what cannot be.
        """
        self.generation.check(hello)
        hello.check(self.steps.next_step - 1, self.steps.announced)
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
        """A rank that may join asks for a new generation: the one before is fenced."""
        fenced = self.generation.begin(hello)
        self.steps.start_over()
        again = (
            Redelivered(at, "new-generation" if step.dp_size == hello.dp_size else "new-size")
            for at, step in self.steps.items()
        )
        return [*fenced, *again]

    def join(self, hello: RankHello, now: float) -> list[Effect]:
        """Give a rank that may join its place; returns its deliveries.

        hello: as `check` believed it.
        """
        known = self.ranks.get(hello.dp_rank)
        if known is not None and hello.resume is not None and not known.begun:
            known = None  # it has loaded a checkpoint since, and let go of what it was given
        effects: list[Effect] = []
        if known is None and hello.begun:
            effects += self._open_through(max(hello.prepared, hello.committed))
        withdrawn = dict.fromkeys(self.steps.withdrawn, -1)
        hello = hello.of_attempts(self.steps.attempts | withdrawn)
        received = hello.received
        if known is None:
            rank = RankState.introduced(
                hello, now, committed=self.steps.committed, ready=self._last_ready
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
        for number in self._ready_after(rank.committed):
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

    def _open_through(self, told: int) -> list[Effect]:
        """Open what a rank speaks of that has outlived the dispatcher that opened it."""
        effects: list[Effect] = []
        while self.steps.waiting and self.steps.last < told:
            effects += self.open_waiting()
        return effects

    # -- ranks speak ------------------------------------------------------------------------

    def demand(self, dp_rank: int, taken: int, *, hungry: bool) -> list[Effect]:
        """A rank's training loop has begun `taken` and waits for the next step, or not.

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
        """A rank can train step `number`; releases it if that was the last one missing.

        A digest that is not ours fails the generation: no rank may train what others do not.
        """
        rank = self.active_rank(dp_rank)
        step = self.steps.find(number)
        if self.is_void(rank, number, attempt) or number in rank.unresolved:
            return []
        if step is not None and number > rank.prepared + 1:
            return []  # one before it is planned again, behind which this one is delivered again
        if step is None or number > self._last_ready:
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
        """Whether what this rank says of a step is of a plan that is none any more."""
        if not self.generation.agrees(rank):
            return True  # of a step that was open before the rewind
        step, withdrawn = self.steps.find(number), self.steps.withdrawn.get(number, -1)
        return attempt <= withdrawn if step is None else attempt < step.attempt

    def release_ready(self) -> list[Effect]:
        """Release every step that all DP ranks hold, while all are connected and have begun.

        A step that all had prepared may be held no more by one whose process was replaced since.
        """
        effects: list[Effect] = []
        for step in self.steps.unreleased():
            if not self.generation.has_prepared(step.number):
                break
            if step.state is StepState.PLANNED:
                step.move(StepEvent.ALL_PREPARED)
            if step.state is StepState.PREPARED and self.generation.ready:
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
        while through < self.steps.last and self.generation.has_committed(through + 1):
            through += 1
        return self.steps.commit(through)

    def active_rank(self, dp_rank: int) -> RankState:
        """Who says something. Raises what its generation has failed with: it is over then."""
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
        dp_size = self.generation.dp_size
        step = self.steps.add(
            _lay_out(plan, entries), dp_size, now, plan.cost,
            usual_loss=usual_loss, slowness=plan.slowness,
        )  # fmt: skip
        return self._deliver_after(step.number - 1)

    def replan(self, number: int, plan: Plan, entries: tuple[Entry, ...]) -> list[Effect]:
        """Give an unplanned step a plan; returns the delivery of what it held back."""
        dp_size = self.generation.dp_size
        self.steps.replace(number, _lay_out(plan, entries), dp_size, plan.cost, plan.slowness)
        return self._deliver_after(number - 1)

    def open_waiting(self) -> list[Effect]:
        """Open the next step of those that a rewind has made wait; returns its delivery."""
        step = self.steps.open_waiting()
        return [Redelivered(step.number, "rewind"), *self._deliver_after(step.number - 1)]

    def resume(self, after: int, rewound: Iterable[OpenStep]) -> None:
        """This generation goes on after that step: with `rewound`, then with what was open."""
        self.steps.rewind(rewound)
        self.generation.resumed = after

    def _deliver_after(self, number: int) -> list[Effect]:
        """Deliver what comes after that step to every rank that may have it."""
        return [
            Deliver(dp_rank, ready, attempt=self.steps[ready].attempt)
            for ready in self._ready_after(number)
            for dp_rank, rank in sorted(self.ranks.items())
            if self.generation.agrees(rank)
        ]

    def _ready_after(self, number: int) -> list[int]:
        last = self._last_ready
        return [*range(max(number, self.steps.committed) + 1, last + 1)]

    @property
    def _last_ready(self) -> int:
        """The last step that ranks may hear of."""
        unplanned = self.unplanned
        return self.steps.last if unplanned is None else unplanned.number - 1

    # -- steps are wanted -------------------------------------------------------------------

    @property
    def unplanned(self) -> OpenStep | None:
        """The first step that has no plan for as many DP ranks as there are now."""
        return self.steps.unplanned(self.generation.dp_size)

    @property
    def wanted(self) -> bool:
        """Whether every DP rank has room for one more step."""
        if self.over or len(self.steps) >= self.max_open_steps:
            return False
        return self.generation.takes_after(self.steps.last)

    @property
    def hungry(self) -> bool:
        """Whether some DP rank waits for a step that is not planned yet."""
        return self.generation.waits_after(self.steps.last)


def _lay_out(plan: Plan, entries: tuple[Entry, ...]) -> MicroBatches:
    return plan.laid_out(tuple([entries[at] for at in plan.chosen.tolist()]))


class Attempts:
    """Hears what ranks cannot get, and acts on it."""

    def __init__(self, ledger: StepLedger, dropping: Dropping, note: Note) -> None:
        self._ledger, self._dropping, self._note = ledger, dropping, note
        self._waiting = False

    def unresolved(self, dp_rank: int, said: Unresolved) -> list[Effect]:
        """A rank cannot get samples of a step; see `claim`."""
        return self.claim(dp_rank, said) or self.settle()

    def claim(self, dp_rank: int, said: Unresolved) -> list[Effect]:
        """The same, to be acted on by `settle`; the rank is not prepared for that step till then.

        Raises ProtocolError for a step that is not open, an attempt that is not known, or samples
        that are not in it or in no payload store. Fails the generation if the step is released.
        """
        ledger = self._ledger
        rank, step = ledger.active_rank(dp_rank), ledger.steps.get(said.step)
        if ledger.is_void(rank, said.step, said.attempt):
            return []
        if step is None or not step.digest:
            raise ProtocolError(
                f"DP rank {dp_rank} cannot get samples of step {said.step}, which is not open"
            )
        step.check_attempt(said.attempt, begun=False)
        if said.reason is DropReason.UNRESOLVED:
            _check_samples(dp_rank, step, said)
        if self._may_be_trained(step):
            return [*ledger.generation.fail(_too_late(dp_rank, said))]
        rank.unresolved[said.step], self._waiting = said, True
        rank.lost_plan(said.step)
        ledger.generation.changed(dp_rank)
        ledger.steps.hold_back(said.step)
        return []

    def settle(self) -> list[Effect]:
        """Act on what ranks have said, if they may be heard."""
        if not self._waiting or not self._ledger.generation.ready:
            return []
        claims, self._waiting = list(self._claims()), False
        for dp_rank, said in claims:
            step = self._ledger.steps.get(said.step)
            if step is not None and self._may_be_trained(step):
                return [*self._ledger.generation.fail(_too_late(dp_rank, said))]
        lost = [effect for claim in claims for effect in self._lose(*claim)]
        return [*lost, *self._close_up()] if lost else []

    def _claims(self) -> Iterator[tuple[int, Unresolved]]:
        """What ranks have said, but for what is void by now; it is heard once."""
        for dp_rank, rank in sorted(self._ledger.ranks.items()):
            for said in rank.unresolved.values():
                if not self._ledger.is_void(rank, said.step, said.attempt):
                    yield dp_rank, said
            rank.unresolved.clear()

    def _may_be_trained(self, step: OpenStep) -> bool:
        last = max(max(rank.taken, rank.released) for rank in self._ledger.ranks.values())
        return step.state is StepState.RELEASED or last >= step.number

    # -- samples are lost -------------------------------------------------------------------

    def _lose(self, dp_rank: int, said: Unresolved) -> list[Effect]:
        """The samples are dropped, if another rank's word has not dropped all of them just now."""
        steps = self._ledger.steps
        lost = _with_groups(steps[said.step], said.sample_ids)
        if not lost:
            return []
        left = steps.lose(said.step, lost)
        for at, rank in self._ledger.ranks.items():
            rank.lost_plan(said.step)
            self._ledger.generation.changed(at)
        self._dropping.planned(said.reason, lost)
        self._note(planned(left))
        first = lost[0].sample.sample_id
        found = SamplesUnresolved(dp_rank, said.step, len(lost), first, said.why, said.reason)
        again = [Redelivered(number, "unresolved") for number in steps if number >= said.step]
        return [found, *again]

    def _close_up(self) -> list[Effect]:
        """Where a step has nothing left, those after it move up."""
        steps, effects = self._ledger.steps, list[Effect]()
        while (empty := next((at for at, one in steps.items() if not one.num_samples), -1)) >= 0:
            for step in steps.renumber(empty):
                self._note(planned(step))
            number = steps.next_step
            self._note(Withdrawn(number, steps.withdrawn[number]))
            effects.append(WithdrawStep(tuple(sorted(self._ledger.ranks)), number))
        return effects


def _check_samples(dp_rank: int, step: OpenStep, said: Unresolved) -> None:
    """Raise ProtocolError if a rank names samples that it cannot have been told to fetch."""
    stored = {
        sample.sample_id for sample in step.samples() if isinstance(sample.payload, Reference)
    }
    if strange := set(said.sample_ids) - stored:
        raise ProtocolError(
            f"DP rank {dp_rank} cannot get sample {min(strange)} of step {said.step}, which is in "
            "no payload store, or not of that step"
        )


def _with_groups(step: OpenStep, sample_ids: tuple[str, ...]) -> list[Entry]:
    """The entries of these samples, as far as they are there, with their groups; oldest first."""
    named = [entry for entry in step.entries() if entry.sample.sample_id in set(sample_ids)]
    groups, tickets = {entry.group for entry in named} - {-1}, {entry.ticket for entry in named}
    found = (e for e in step.entries() if e.ticket in tickets or e.group in groups)
    return sorted(found, key=lambda entry: entry.ticket)


def _too_late(dp_rank: int, said: Unresolved) -> GenerationFenced:
    why = f" ({said.why})" if said.why else ""
    return GenerationFenced(
        f"DP rank {dp_rank} cannot get sample {said.sample_ids[0]} of step {said.step}{why}, and "
        "other DP ranks may train that step already; restart all ranks: it is planned again "
        "without what is gone"
    )
