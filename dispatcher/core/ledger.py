"""The step ledger: which steps are open, which DP ranks stand where, and what follows from it.

A rank's standing is a few watermarks over step numbers, since it prepares, takes and commits
steps in order. Invariants: a step is released only when every DP rank holds it and has said where
it goes on; it is committed only when every DP rank has said so in one generation; a step that is
delivered again is identical, unless a generation brought another number of DP ranks: then open
steps are planned again one by one, in order, from the same samples, and from the first that is not
yet on nothing is delivered. Steps that a rewind has made uncommitted wait in `again` and are opened
one by one, as ranks have room for them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from dispatcher.core.buffer import Entry
from dispatcher.core.config import SizeCheck
from dispatcher.core.events import Deliver, Effect, FailRanks, Redelivered, Release
from dispatcher.core.standing import (
    Everyone,
    RankHello,
    RankStanding,
    committed,
    has_room,
    is_ready,
    prepared,
)
from dispatcher.core.step import MicroBatches, OpenStep, StepEvent, StepState, step_digest
from dispatcher.errors import (
    CheckpointRefused,
    ConfigError,
    DispatcherError,
    GenerationFenced,
    ProtocolError,
    RankRefused,
)
from dispatcher.plan import Plan


class StepLedger:
    """Owns open steps and rank standings of the current generation."""

    def __init__(
        self, dp_size: int, max_open_steps: int, check_size: SizeCheck | None = None
    ) -> None:
        #: DP ranks of the current generation; of the first one, before it has begun.
        self.dp_size = dp_size
        self._check_size = check_size
        self.max_open_steps = max_open_steps
        self.generation = 0
        self.next_step = 0
        self.steps: dict[int, OpenStep] = {}
        #: Planned steps that come after the open ones, in order.
        self.again: deque[OpenStep] = deque()
        #: The step after which this generation goes on, if its ranks have loaded a checkpoint.
        self.resumed: int | None = None
        self.ranks: dict[int, RankStanding] = {}
        self.failed: DispatcherError | None = None
        self._prepared, self._committed = Everyone(self.ranks), Everyone(self.ranks)
        self._with_room = Everyone(self.ranks)

    # -- ranks come and go ------------------------------------------------------------------

    def join(self, hello: RankHello, now: float) -> list[Effect]:
        """Admit a DP rank, fencing an older generation if it brings a new one.

        Raises RankRefused or GenerationFenced; nothing has changed then.
        """
        self.check(hello)
        effects: list[Effect] = []
        if hello.generation is None:
            self.dp_size = hello.dp_size
            effects += self._begin_generation(hello.client_id)
        return effects + self._seat(hello, now)

    def leave(self, dp_rank: int, client_id: str, *, for_good: bool = False) -> None:
        """A connection is gone; its steps stay open."""
        rank = self.ranks.get(dp_rank)
        if rank is not None and rank.client_id == client_id:
            rank.connected = rank.hungry = False
            rank.gone = for_good

    def check(self, hello: RankHello) -> None:
        """Raise RankRefused or GenerationFenced for a rank that may not join."""
        self._check_hello(hello)
        if hello.generation is None and hello.resume is not None:
            raise RankRefused("a checkpoint is loaded in a generation; ask for one first")

    def _check_hello(self, hello: RankHello) -> None:
        if hello.dp_rank >= hello.dp_size:
            raise RankRefused(
                f"DP rank {hello.dp_rank} is out of range, ranks are 0 to {hello.dp_size - 1}"
            )
        if hello.generation is None:
            self._check_founder(hello)
            return
        if hello.generation > self.generation:
            raise GenerationFenced(
                f"generation {hello.generation} is not known here: the dispatcher was restarted; "
                "restart the trainers"
            )
        if hello.generation < self.generation:
            raise GenerationFenced(
                f"generation {hello.generation} is over, the current one is {self.generation}; "
                "a newer process group has taken its place"
            )
        if hello.dp_size != self.dp_size:
            raise RankRefused(
                f"DP rank {hello.dp_rank} says there are {hello.dp_size} DP ranks, generation "
                f"{self.generation} has {self.dp_size}; another number of ranks is another process "
                "group, whose DP rank 0 asks for a new generation"
            )
        if self.failed is not None:
            raise self.failed
        for dp_rank, rank in self.ranks.items():
            if dp_rank != hello.dp_rank and rank.client_id == hello.client_id:
                raise RankRefused(
                    f"client {hello.client_id} is DP rank {dp_rank} of generation "
                    f"{self.generation} and cannot be DP rank {hello.dp_rank} too; give every rank "
                    "a client_id of its own"
                )
        seated = self.ranks.get(hello.dp_rank)
        if seated is not None and seated.connected and seated.client_id != hello.client_id:
            raise RankRefused(
                f"DP rank {hello.dp_rank} of generation {self.generation} is taken by a connected "
                "client; two processes claim one rank"
            )

    def _check_founder(self, hello: RankHello) -> None:
        if hello.dp_rank != 0:
            raise RankRefused(
                f"DP rank {hello.dp_rank} asked for a new generation; only DP rank 0 may, and "
                "shares the number with the others"
            )
        if hello.dp_size == self.dp_size:
            return
        if self._check_size is None:
            raise RankRefused(
                f"DP rank 0 says there are {hello.dp_size} DP ranks, this dispatcher serves "
                f"{self.dp_size}; start it with --dp-size {hello.dp_size}, or with --elastic"
            )
        try:
            self._check_size(hello.dp_size)
        except ConfigError as error:
            raise RankRefused(f"no steps for {hello.dp_size} DP ranks: {error}") from error

    def _begin_generation(self, asked_by: str) -> list[Effect]:
        # Whoever asks may have asked before, and lost its connection before it heard the answer.
        fenced = tuple(rank.client_id for rank in self.ranks.values() if rank.client_id != asked_by)
        self.generation += 1
        self.failed = self.resumed = None
        self.ranks.clear()
        effects: list[Effect] = []
        if fenced:
            error = GenerationFenced(
                f"generation {self.generation} has begun: a newer process group took over"
            )
            effects.append(FailRanks(fenced, error))
        for step in self.steps.values():
            step.move(StepEvent.NEW_GENERATION)
            fits = step.dp_size == self.dp_size
            effects.append(Redelivered(step.number, "new-generation" if fits else "new-size"))
        return effects

    def _seat(self, hello: RankHello, now: float) -> list[Effect]:
        known = self.ranks.get(hello.dp_rank)
        if known is not None and hello.resume is not None and not known.begun:
            known = None  # it has loaded a checkpoint since, and let go of what it was given
        same_client = known is not None and known.client_id == hello.client_id
        effects: list[Effect] = []
        rank = RankStanding(hello.client_id, hello.prefetch_steps, now)
        if known is not None and same_client:
            rank = known
            rank.connected, rank.gone = True, False
            rank.last_seen = now
            rank.committed = max(rank.committed, min(hello.committed, rank.prepared))
            rank.taken = max(rank.taken, min(hello.taken, rank.prepared))
        elif known is not None:
            rank.taken = rank.committed = known.committed
            rank.prepared = known.committed
        else:
            # New here; or it outlived the dispatcher that knew it, and says itself where it stands.
            told = max(hello.taken, hello.committed, *hello.received, -1) if hello.begun else -1
            while self.again and self.again[0].number <= told:
                effects += self.open_again()
            begun, last = self.committed, self.last_ready
            rank.committed = min(max(begun, hello.committed), last)
            rank.taken = min(max(begun, hello.taken), last)
            rank.prepared = min(max(begun, hello.taken, *hello.received, -1), last)
        rank.hungry = hello.hungry
        rank.begun = hello.begun or (known is not None and known.begun)
        self.ranks[hello.dp_rank] = rank
        if not self._agrees(rank):
            return effects
        for number in self._ready_after(rank.committed):
            first = hello.received.get(number, 0) if known is None or same_client else 0
            effects.append(Deliver(hello.dp_rank, number, first))
            if known is not None:
                effects.append(Redelivered(number, "reconnect"))
        return effects

    # -- ranks speak ------------------------------------------------------------------------

    def demand(self, dp_rank: int, taken: int, *, hungry: bool) -> list[Effect]:
        """A rank's training loop has begun `taken` and waits for the next step, or not.

        Raises ProtocolError for a step that this rank cannot have. Fails the generation if others
        have loaded a checkpoint and this rank has not.
        """
        rank = self.ranks[dp_rank]
        if taken > rank.prepared:
            raise ProtocolError(f"DP rank {dp_rank} took step {taken} before it was prepared")
        if not self._agrees(rank):
            return self.fail(_disagreement(dp_rank, None, self.resumed))
        first, rank.begun = not rank.begun, True
        rank.taken = max(rank.taken, taken)
        rank.hungry = hungry
        return self.release_ready() if first else []

    def prepared(self, dp_rank: int, number: int, digest: str) -> list[Effect]:
        """A rank holds the header of step `number`; releases it if that was the last one missing.

        A digest that is not ours fails the generation: no rank may train what others do not.
        """
        rank = self.ranks[dp_rank]
        if not self._agrees(rank):
            return []  # of a step that was open before the others went back
        step = self.steps.get(number)
        if step is None or number > self.last_ready:
            raise ProtocolError(f"DP rank {dp_rank} prepared step {number}, which is not open")
        if digest != step.digest:
            return self.fail(
                GenerationFenced(
                    f"DP rank {dp_rank} holds another plan of step {number} (digest {digest}, not "
                    f"{step.digest}); all ranks must restart"
                )
            )
        rank.prepared = max(rank.prepared, number)
        if step.state is StepState.RELEASED:
            return [Release((dp_rank,), number)]
        return self.release_ready()

    def release_ready(self) -> list[Effect]:
        """Release every step that all DP ranks hold, while all are connected and have begun."""
        effects: list[Effect] = []
        for step in self.steps.values():
            if step.state is StepState.PLANNED:
                if not self._prepared.all(self.dp_size, prepared(step.number)):
                    break
                step.move(StepEvent.ALL_PREPARED)
            if step.state is StepState.PREPARED and self._all(is_ready):
                step.move(StepEvent.ALL_CONNECTED)
                effects.append(Release(tuple(sorted(self.ranks)), step.number))
        return effects

    def commit(self, dp_rank: int, number: int) -> list[OpenStep]:
        """A rank has applied every step up to `number`; returns the steps now committed.

        Raises ProtocolError for a step that this rank was never given.
        """
        rank = self.ranks[dp_rank]
        if number > rank.prepared:
            raise ProtocolError(f"DP rank {dp_rank} committed step {number} before it was prepared")
        rank.committed = max(rank.committed, number)
        done: list[OpenStep] = []
        for step in list(self.steps.values()):
            if not self._committed.all(self.dp_size, committed(step.number)):
                break
            step.move(StepEvent.ALL_COMMITTED)
            done.append(self.steps.pop(step.number))
        return done

    def fail(self, error: DispatcherError, *also: str) -> list[Effect]:
        """End the current generation with one error on all of its ranks, and on clients `also`."""
        self.failed = error
        clients = dict.fromkeys([*(rank.client_id for rank in self.ranks.values()), *also])
        return [FailRanks(tuple(clients), error)]

    # -- a checkpoint is loaded ---------------------------------------------------------------

    def disagreement(self, hello: RankHello) -> CheckpointRefused | None:
        """Why this rank cannot go on where it says, beside what other ranks have said."""
        after = None if hello.resume is None else hello.resume.step
        known = self.ranks.get(hello.dp_rank)
        if after is None and (not hello.begun or (known is not None and known.begun)):
            return None
        others = self.resumed is not None or max(hello.taken, hello.committed) >= 0
        others = others or any(rank.begun for rank in self.ranks.values())
        if after == self.resumed or (after is not None and not others):
            return None
        return _disagreement(hello.dp_rank, after, self.resumed)

    def pass_over(self, through: int) -> list[OpenStep]:
        """A checkpoint covers the steps up to there; returns those that are committed with it."""
        done = [step for step in self.uncommitted() if step.number <= through]
        for step in done:
            step.move(StepEvent.ALL_COMMITTED)
        self.steps = {number: step for number, step in self.steps.items() if number > through}
        self.again = deque(step for step in self.again if step.number > through)
        return done

    def go_back(self, after: int, steps: Iterable[OpenStep]) -> None:
        """This generation goes on after that step: with `steps`, then with what was open."""
        back = [*steps, *self.steps.values()]
        for step in back:
            step.move(StepEvent.WENT_BACK)
        self.again.extendleft(reversed(back))
        self.steps = {}
        self.resumed = after

    def open_again(self) -> list[Effect]:
        """Open the next step of those that wait; returns its delivery."""
        step = self.again.popleft()
        self.steps[step.number] = step
        effects = self._deliver(step.number) if step.number <= self.last_ready else []
        return [Redelivered(step.number, "rewind"), *effects]

    def uncommitted(self) -> list[OpenStep]:
        """Every step that is planned and not committed, by number."""
        return [*self.steps.values(), *self.again]

    def _agrees(self, rank: RankStanding) -> bool:
        """Whether the rank goes on where its generation does, as far as it has said."""
        return self.resumed is None or rank.begun

    def _deliver(self, number: int) -> list[Effect]:
        return [
            Deliver(dp_rank, number)
            for dp_rank, rank in sorted(self.ranks.items())
            if self._agrees(rank)
        ]

    def _all(self, holds: Callable[[RankStanding], bool]) -> bool:
        """Whether every DP rank is there and this holds for it."""
        return len(self.ranks) == self.dp_size and all(map(holds, self.ranks.values()))

    # -- after a restart ---------------------------------------------------------------------

    def restore(
        self,
        steps: Iterable[OpenStep],
        next_step: int,
        generation: int,
        dp_size: int | None,
        *,
        again: Iterable[OpenStep] = (),
        resumed: int | None = None,
    ) -> None:
        """Start from what an earlier process left open; no rank is seated yet.

        dp_size: of that generation. It stays, unless the settings no longer allow it: then its
        ranks cannot come back, and open steps wait for the next generation.
        """
        self.steps = {step.number: step for step in steps}
        self.again = deque(again)
        self.next_step, self.generation, self.resumed = next_step, generation, resumed
        if dp_size is not None and self._check_size is not None:
            with suppress(ConfigError):
                self._check_size(dp_size)
                self.dp_size = dp_size

    # -- steps ------------------------------------------------------------------------------

    def open(self, plan: Plan, entries: tuple[Entry, ...], now: float) -> list[Effect]:
        """Add the next step; returns its first delivery to every rank, if none comes before it."""
        number = self.next_step
        self.next_step += 1
        micro_batches = _lay_out(plan, entries)
        digest = step_digest(number, micro_batches)
        step = OpenStep(number, micro_batches, digest, now, dp_size=self.dp_size)
        if self.again:  # it was being planned when the ranks went back
            self.again.append(step)
            return []
        self.steps[number] = step
        return self._deliver(number)

    def replan(self, number: int, plan: Plan, entries: tuple[Entry, ...]) -> list[Effect]:
        """Replace an outgrown step's plan; returns the delivery of what it held back."""
        micro_batches = _lay_out(plan, entries)
        digest, planned_at = step_digest(number, micro_batches), self.steps[number].planned_at
        step = OpenStep(number, micro_batches, digest, planned_at, dp_size=self.dp_size)
        self.steps[number] = step
        return [
            effect for ready in self._ready_after(number - 1) for effect in self._deliver(ready)
        ]

    @property
    def outgrown(self) -> OpenStep | None:
        """The first step that was planned for another number of DP ranks than there are now."""
        steps = self.steps.values()
        return next((step for step in steps if step.dp_size != self.dp_size), None)

    @property
    def last_ready(self) -> int:
        """The last step that ranks may hear of."""
        outgrown = self.outgrown
        return self.last if outgrown is None else outgrown.number - 1

    def _ready_after(self, number: int) -> list[int]:
        last = self.last_ready
        return [step for step in self.steps if number < step <= last]

    @property
    def in_flight(self) -> int:
        """Samples of all uncommitted steps."""
        return sum(step.num_samples for step in self.uncommitted())

    @property
    def committed(self) -> int:
        """The last committed step, -1 for none."""
        return next((step.number for step in self.uncommitted()), self.next_step) - 1

    @property
    def last(self) -> int:
        """The last step that was opened, -1 for none."""
        return (self.again[0].number if self.again else self.next_step) - 1

    @property
    def complete(self) -> bool:
        """Whether every DP rank of a live generation is connected."""
        return self.failed is None and self._all(lambda r: r.connected and self._agrees(r))

    @property
    def absent(self) -> list[int]:
        """DP ranks that lost their connection and have not come back, without a goodbye."""
        return sorted(
            dp_rank for dp_rank, rank in self.ranks.items() if not (rank.connected or rank.gone)
        )

    @property
    def deserted(self) -> bool:
        """Whether every DP rank that joined has said goodbye."""
        return all(rank.gone for rank in self.ranks.values())

    @property
    def wanted(self) -> bool:
        """Whether every DP rank has room for one more step."""
        if self.failed is not None or len(self.steps) >= self.max_open_steps:
            return False
        room = has_room(self.last)
        return self._with_room.all(self.dp_size, lambda r: room(r) and self._agrees(r))

    @property
    def hungry(self) -> bool:
        """Whether some DP rank waits for a step that is not planned yet."""
        last = self.last
        return any(rank.hungry and rank.taken == last for rank in self.ranks.values())


def _disagreement(dp_rank: int, after: int | None, others: int | None) -> CheckpointRefused:
    def told(step: int | None) -> str:
        return "no checkpoint" if step is None else f"a checkpoint taken after step {step}"

    return CheckpointRefused(
        f"DP rank {dp_rank} has loaded {told(after)}, other DP ranks {told(others)}; every rank "
        "must load the same checkpoint, before its first step: restart all ranks"
    )


def _lay_out(plan: Plan, entries: tuple[Entry, ...]) -> MicroBatches:
    return tuple(
        tuple(tuple(entries[int(at)] for at in part) for part in rank)
        for rank in plan.micro_batches
    )
