"""The step ledger: which steps are open, which DP ranks stand where, and what follows from it.

A rank's standing is a few watermarks over step numbers, since it prepares, takes and commits
steps in order. Invariants: a step is released only when every DP rank holds it; it is committed
only when every DP rank has said so in one generation; a step that is delivered again is identical,
unless a generation brought another number of DP ranks: then open steps are planned again one by
one, in order, from the same samples, and from the first that is not yet on nothing is delivered.
"""

from collections.abc import Iterable
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
    prepared,
)
from dispatcher.core.step import MicroBatches, OpenStep, StepEvent, StepState, step_digest
from dispatcher.errors import (
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
        self.ranks: dict[int, RankStanding] = {}
        self.failed: DispatcherError | None = None
        self._prepared, self._committed = Everyone(self.ranks), Everyone(self.ranks)
        self._with_room = Everyone(self.ranks)

    # -- ranks come and go ------------------------------------------------------------------

    def join(self, hello: RankHello, now: float) -> list[Effect]:
        """Admit a DP rank, fencing an older generation if it brings a new one.

        Raises RankRefused or GenerationFenced; nothing has changed then.
        """
        self._check_hello(hello)
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
        self.failed = None
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
        same_client = known is not None and known.client_id == hello.client_id
        begun = min(self.steps, default=self.next_step) - 1
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
            last = self.last_ready
            rank.committed = min(max(begun, hello.committed), last)
            rank.taken = min(max(begun, hello.taken), last)
            rank.prepared = min(max(begun, hello.taken, *hello.received, -1), last)
        rank.hungry = hello.hungry
        self.ranks[hello.dp_rank] = rank
        effects: list[Effect] = []
        for number in self._ready_after(rank.committed):
            first = hello.received.get(number, 0) if known is None or same_client else 0
            effects.append(Deliver(hello.dp_rank, number, first))
            if known is not None:
                effects.append(Redelivered(number, "reconnect"))
        return effects

    # -- ranks speak ------------------------------------------------------------------------

    def demand(self, dp_rank: int, taken: int, *, hungry: bool) -> None:
        """A rank's training loop has begun `taken` and waits for the next step, or not.

        Raises ProtocolError for a step that this rank cannot have.
        """
        rank = self.ranks[dp_rank]
        if taken > rank.prepared:
            raise ProtocolError(f"DP rank {dp_rank} took step {taken} before it was prepared")
        rank.taken = max(rank.taken, taken)
        rank.hungry = hungry

    def prepared(self, dp_rank: int, number: int, digest: str) -> list[Effect]:
        """A rank holds the header of step `number`; releases it if that was the last one missing.

        A digest that is not ours fails the generation: no rank may train what others do not.
        """
        rank = self.ranks[dp_rank]
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
        """Release every step that all DP ranks hold, while all of them are connected."""
        effects: list[Effect] = []
        for step in self.steps.values():
            if step.state is StepState.PLANNED:
                if not self._prepared.all(self.dp_size, prepared(step.number)):
                    break
                step.move(StepEvent.ALL_PREPARED)
            if step.state is StepState.PREPARED and self._all_connected():
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

    def fail(self, error: DispatcherError) -> list[Effect]:
        """End the current generation with one error on all of its ranks."""
        self.failed = error
        return [FailRanks(tuple(rank.client_id for rank in self.ranks.values()), error)]

    def _all_connected(self) -> bool:
        return len(self.ranks) == self.dp_size and all(r.connected for r in self.ranks.values())

    # -- after a restart ---------------------------------------------------------------------

    def restore(
        self, steps: Iterable[OpenStep], next_step: int, generation: int, dp_size: int | None
    ) -> None:
        """Start from what an earlier process left open; no rank is seated yet.

        dp_size: of that generation. It stays, unless the settings no longer allow it: then its
        ranks cannot come back, and open steps wait for the next generation.
        """
        self.steps = {step.number: step for step in steps}
        self.next_step, self.generation = next_step, generation
        if dp_size is not None and self._check_size is not None:
            with suppress(ConfigError):
                self._check_size(dp_size)
                self.dp_size = dp_size

    # -- steps ------------------------------------------------------------------------------

    def open(self, plan: Plan, entries: tuple[Entry, ...], now: float) -> list[Effect]:
        """Add the next step; returns its first delivery to every rank."""
        number = self.next_step
        self.next_step += 1
        micro_batches = _lay_out(plan, entries)
        digest = step_digest(number, micro_batches)
        self.steps[number] = OpenStep(number, micro_batches, digest, now, dp_size=self.dp_size)
        return [Deliver(dp_rank, number) for dp_rank in sorted(self.ranks)]

    def replan(self, number: int, plan: Plan, entries: tuple[Entry, ...]) -> list[Effect]:
        """Replace an outgrown step's plan; returns the delivery of what it held back."""
        micro_batches = _lay_out(plan, entries)
        digest, planned_at = step_digest(number, micro_batches), self.steps[number].planned_at
        step = OpenStep(number, micro_batches, digest, planned_at, dp_size=self.dp_size)
        self.steps[number] = step
        ready = self._ready_after(number - 1)
        return [Deliver(dp_rank, step) for step in ready for dp_rank in sorted(self.ranks)]

    @property
    def outgrown(self) -> OpenStep | None:
        """The first step that was planned for another number of DP ranks than there are now."""
        steps = self.steps.values()
        return next((step for step in steps if step.dp_size != self.dp_size), None)

    @property
    def last_ready(self) -> int:
        """The last step that ranks may hear of."""
        outgrown = self.outgrown
        return (self.next_step if outgrown is None else outgrown.number) - 1

    def _ready_after(self, number: int) -> list[int]:
        last = self.last_ready
        return [step for step in self.steps if number < step <= last]

    @property
    def in_flight(self) -> int:
        """Samples of all open steps."""
        return sum(step.num_samples for step in self.steps.values())

    @property
    def complete(self) -> bool:
        """Whether every DP rank of a live generation is connected."""
        return self.failed is None and self._all_connected()

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
        return self._with_room.all(self.dp_size, has_room(self.next_step - 1))

    @property
    def hungry(self) -> bool:
        """Whether some DP rank waits for a step that is not planned yet."""
        last = self.next_step - 1
        return any(rank.hungry and rank.taken == last for rank in self.ranks.values())


def _lay_out(plan: Plan, entries: tuple[Entry, ...]) -> MicroBatches:
    return tuple(
        tuple(tuple(entries[int(at)] for at in part) for part in rank)
        for rank in plan.micro_batches
    )
