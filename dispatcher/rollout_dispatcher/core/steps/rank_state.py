"""State of a DP rank in the ledger: its hello, and its reports since.

A rank prepares, takes and commits steps in order, so its state is a few watermarks over step
numbers. Invariant: no watermark is above the last step that the rank can have received, whatever
it claims; within a generation none falls, unless the rank loads a checkpoint, another process takes
its place, or a step that it is prepared for loses samples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.errors import ProtocolError


class Position(NamedTuple):
    """Position of a training loop; see `RankState`. A rank that is behind has a lesser one."""

    committed: int
    taken: int
    handed_out: int
    collectives: int


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    """Where a checkpoint was taken: after `step` (-1: before the first) of this run.

    allow_lost_steps: resume although steps that were trained after it cannot be delivered again.
    """

    run_id: str
    step: int
    allow_lost_steps: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Samples of an attempt at a step that a DP rank cannot get. why: the error.

    reason: UNRESOLVED if the rank reports it, of a payload store; UNREADABLE if the journal cannot
    read them.
    """

    step: int
    attempt: int
    sample_ids: tuple[str, ...]
    why: str = ""
    reason: DropReason = DropReason.UNRESOLVED


@dataclass(frozen=True, slots=True)
class RankHello:
    """The hello of a DP rank; `generation=None` asks for a new generation.

    received: by open step that it is prepared for, number of micro-batches that it has.
    attempts: at those, if not the first. released: the last step that it may train.
    run_id: of the run that welcomed it last, None for none. resume: the checkpoint that it loaded.
    saved: the last step of a checkpoint that it reported saved. finished: the step after which it
    finished the run, None before; discards: whether unused samples are dropped then.
    training: options that shape its gradients, by name.
    """

    client_id: str
    dp_rank: int
    dp_size: int
    generation: int | None
    prefetch_steps: int = 1
    taken: int = -1
    committed: int = -1
    hungry: bool = False
    received: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    released: int = -1
    resume: CheckpointPosition | None = None
    saved: int = -1
    run_id: str | None = None
    training: Mapping[str, str] = field(default_factory=dict)
    finished: int | None = None
    discards: bool = False

    @property
    def begun(self) -> bool:
        """Whether it has reported where it resumes."""
        return self.resume is not None or self.hungry or max(self.taken, self.committed) >= 0

    @property
    def prepared(self) -> int:
        """The last step that it has taken or holds, -1 for none."""
        return max(self.taken, *self.received, -1)

    def check(self, planned: int, announced: int) -> None:
        """Raise ProtocolError for watermarks that no rank can have.

        planned: the last planned step, -1 for none; announced: the last one ever planned.
        """
        # A rank that has finished may have begun a step that was withdrawn since.
        begun = planned if self.finished is None else announced
        claims = (
            ("taken", self.taken, begun), ("committed", self.committed, planned),
            ("got", max(self.received, default=-1), announced),
        )  # fmt: skip
        for what, step, last in claims:
            if step > last:
                raise ProtocolError(
                    f"DP rank {self.dp_rank} says that it has {what} step {step}, and the last one "
                    f"that this dispatcher knows of is {planned}: the rank is of another run, or "
                    "the journal is an older copy; restart all ranks, or start the dispatcher with "
                    "the journal that has those steps"
                )
        if self.committed > self.taken:
            raise ProtocolError(
                f"DP rank {self.dp_rank} says that it has committed step {self.committed}, and the "
                f"last one that it has taken is {self.taken}"
            )

    def without_steps(self) -> "RankHello":
        """The same of a rank that never received a step."""
        return replace(self, taken=-1, committed=-1, received={}, attempts={}, released=-1)

    def of_attempts(self, attempts: Mapping[int, int]) -> "RankHello":
        """The same without steps from the first one on whose attempt is not that of `attempts`."""
        mine = {step: self.attempts.get(step, 0) for step in self.received}
        void = [step for step, attempt in mine.items() if attempts.get(step, attempt) != attempt]
        if not void:
            return self
        kept = {step: count for step, count in self.received.items() if step < min(void)}
        return replace(self, received=kept, released=min(self.released, min(void) - 1))


@dataclass(slots=True)
class RankState:
    """The reports of one DP rank of the current generation; -1 for no step yet.

    training, released: as in its hello.
    begun: it has reported where it resumes, by loading a checkpoint or by asking for a step.
    handed_out: micro-batches of its open steps that its training loop received, in all passes.
    collectives: begun in process groups of all DP ranks. unresolved: its reports of missing samples
    that did not take effect yet, by step. away_since: when its connection was lost or it sent Bye
    (`gone`); infinite for a rank that was refused. lost: it has been away for too long. finished:
    the step after which it has finished the run; discards: unused samples are dropped then.
    end_sent: the end of the run was sent on its present connection; limit_sent: likewise the last
    step that it may begin, None for no limit.
    """

    client_id: str
    prefetch_steps: int
    last_seen: float
    connected: bool = True
    gone: bool = False
    taken: int = -1
    released: int = -1
    prepared: int = -1
    committed: int = -1
    hungry: bool = False
    begun: bool = False
    handed_out: int = 0
    collectives: int = 0
    away_since: float = math.inf
    lost: bool = False
    finished: int | None = None
    discards: bool = False
    end_sent: bool = False
    limit_sent: int | None = None
    unresolved: dict[int, Unresolved] = field(default_factory=dict)
    training: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_hello(cls, hello: RankHello, now: float, *, committed: int, ready: int) -> Self:
        """A rank that is not known; an earlier dispatcher may have known it.

        Its watermarks are as it claims, between the last committed and the last deliverable step.
        """

        def within(claimed: int) -> int:
            return min(max(committed, claimed), ready)

        return cls(
            hello.client_id,
            hello.prefetch_steps,
            now,
            taken=within(hello.taken),
            released=within(hello.released),
            prepared=within(hello.prepared),
            committed=within(hello.committed),
            hungry=hello.hungry,
            begun=hello.begun,
            training=hello.training,
            finished=hello.finished,
            discards=hello.discards,
        )

    def succeeded_by(self, hello: RankHello, now: float) -> "RankState":
        """Another process of the same generation takes this rank's place; it holds no step."""
        hello, last = replace(hello.without_steps(), finished=None, discards=False), self.committed
        rank = RankState.from_hello(hello, now, committed=last, ready=last)
        rank.begun = rank.begun or self.begun
        return rank

    def reconnected(self, hello: RankHello, now: float) -> None:
        """The same process has a new connection, on which it repeats its reports."""
        self.unresolved.clear()
        self.connected, self.gone, self.lost = True, False, False
        self.end_sent, self.limit_sent = False, None
        self.last_seen, self.away_since = now, math.inf
        if hello.finished is not None:
            self.finished, self.discards = hello.finished, hello.discards
        self.committed = max(self.committed, min(hello.committed, self.prepared))
        self.taken = max(self.taken, min(hello.taken, self.prepared))
        self.released = max(self.released, min(hello.released, self.prepared))
        self.hungry = hello.hungry
        self.begun = hello.begun or self.begun

    def lost_plan(self, step: int) -> None:
        """This step is planned again: the rank is not prepared for it any more."""
        self.prepared = min(self.prepared, step - 1)

    def disconnected(self, *, for_good: bool) -> None:
        """Its connection is gone, `for_good` if it sent Bye."""
        self.connected = self.hungry = False
        self.gone = for_good

    @property
    def position(self) -> Position:
        """Position of its training loop; ranks in lockstep have the same ones."""
        return Position(self.committed, self.taken, self.handed_out, self.collectives)

    @property
    def departed(self) -> bool:
        """Whether it has left, or is lost, without having finished the run."""
        return (self.gone or self.lost) and self.finished is None

    @property
    def ready(self) -> bool:
        """Whether it is connected and has begun."""
        return self.connected and self.begun

    def waits_after(self, last: int) -> bool:
        """Whether it waits for the step after `last`."""
        return self.hungry and self.taken == last

    def takes_after(self, last: int, resumed: bool) -> bool:
        """Whether it is connected and takes a step after `last`, ahead of its training loop or for
        it. resumed: others have loaded a checkpoint, which it has to do before.
        """
        if not self.connected or self.finished is not None or (resumed and not self.begun):
            return False
        return last - self.taken < self.prefetch_steps or self.waits_after(last)
