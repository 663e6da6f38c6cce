"""An open step: what it holds, where it stands, and what may become of it.

PLANNED --every rank prepared--> PREPARED --every rank connected--> RELEASED
^                                |                                  |
+------- new generation ---------+----------------------------------+
|
COMMITTED <------------------- every rank committed -------------------+
    +------- the trainer rewound to a checkpoint ----> PLANNED

PLANNED, PREPARED --samples of it, or of a step before it, are lost--> PLANNED

After a restart every open step is PLANNED again, and may be committed at once: ranks tell. A step
of another number of DP ranks than there are now, or that has lost samples and so its plan, waits in
PLANNED until a new plan replaces it. Plans of one step number that ranks may have heard of are told
apart by their *attempts*; none is used twice.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rollout_dispatcher.core.buffer.entry import Entry, in_journal
from rollout_dispatcher.core.facts import Planned
from rollout_dispatcher.errors import IllegalTransition, ProtocolError
from rollout_dispatcher.sample import Sample
from rollout_planner.types import FloatArray, digest_of


class StepState(StrEnum):
    """Where a step stands."""

    PLANNED = "planned"
    PREPARED = "prepared"
    RELEASED = "released"
    COMMITTED = "committed"


class StepEvent(StrEnum):
    """What moves a step."""

    ALL_PREPARED = "all-prepared"
    ALL_CONNECTED = "all-connected"
    ALL_COMMITTED = "all-committed"
    NEW_GENERATION = "new-generation"
    REWOUND = "rewound"
    SAMPLES_LOST = "samples-lost"


NEXT: dict[tuple[StepState, StepEvent], StepState] = {
    (StepState.PLANNED, StepEvent.ALL_PREPARED): StepState.PREPARED,
    (StepState.PREPARED, StepEvent.ALL_CONNECTED): StepState.RELEASED,
    **{
        # Only a released step is trained, but a dispatcher that was restarted has forgotten that
        # it released it; ranks that say they have committed it are right.
        (state, StepEvent.ALL_COMMITTED): StepState.COMMITTED
        for state in (StepState.PLANNED, StepState.PREPARED, StepState.RELEASED)
    },
    **{
        (state, StepEvent.NEW_GENERATION): StepState.PLANNED
        for state in (StepState.PLANNED, StepState.PREPARED, StepState.RELEASED)
    },
    # Ranks say that they have loaded a checkpoint before any of them is given a step.
    **{
        (state, StepEvent.REWOUND): StepState.PLANNED
        for state in (StepState.PLANNED, StepState.PREPARED, StepState.COMMITTED)
    },
    # What is released may be trained already: samples that are lost then fail the generation.
    **{
        (state, StepEvent.SAMPLES_LOST): StepState.PLANNED
        for state in (StepState.PLANNED, StepState.PREPARED)
    },
}


#: Entries by DP rank and micro-batch; an empty micro-batch is a filler.
MicroBatches = tuple[tuple[tuple[Entry, ...], ...], ...]


@dataclass(slots=True, eq=False)
class OpenStep:
    """A step that is not committed, or may become so: micro_batches[dp rank][index] are entries.

    digest: of its plan; empty of a step that has lost its plan, and then `micro_batches` only says
    which samples it has. attempt: rises with every plan that is lost so.
    dp_size: that of the generation that it was planned for; 0: as many as `micro_batches` has. A
    simulation has one rank that speaks for all, so the two may differ.
    planned_cost: float64[R, M], what its plan estimates that each micro-batch takes its rank; None
    of a step that an earlier process planned, as the journal does not keep it. slowness: of the
    ranks in that plan; None: all are equally fast.
    usual_loss: loss tokens of a sample as they arrived when it was planned, the mean; it stays,
    whatever samples the step loses. 0 of a step that an earlier release planned.
    """

    number: int
    micro_batches: MicroBatches
    digest: str
    planned_at: float
    state: StepState = StepState.PLANNED
    dp_size: int = 0
    planned_cost: FloatArray | None = None
    slowness: tuple[float, ...] | None = None
    attempt: int = 0
    usual_loss: float = 0.0

    def __post_init__(self) -> None:
        self.dp_size = self.dp_size or len(self.micro_batches)

    def move(self, event: StepEvent) -> None:
        """Follow the table; an illegal move raises and changes nothing."""
        after = NEXT.get((self.state, event))
        if after is None:
            raise IllegalTransition(self.state, event)
        self.state = after

    def fits(self, dp_size: int) -> bool:
        """Whether it has a plan, for so many DP ranks."""
        return bool(self.digest) and self.dp_size == dp_size

    def check_attempt(self, attempt: int, *, begun: bool) -> None:
        """Raise ProtocolError for an attempt that no rank can hold, or not have begun to train."""
        if attempt > self.attempt or (begun and attempt != self.attempt):
            raise ProtocolError(
                f"a DP rank {'trains' if begun else 'holds'} attempt {attempt} at step "
                f"{self.number}, and the last one that this dispatcher knows of is {self.attempt}: "
                "the journal is an older copy; restart all ranks"
            )

    def check_received(self, count: int) -> None:
        """Raise ProtocolError if a rank cannot have so many of its micro-batches."""
        there_are = len(self.micro_batches[0])
        if count > there_are:
            raise ProtocolError(
                f"a DP rank says that it has {count} micro-batches of step {self.number}, which "
                f"has {there_are}"
            )

    def entries(self) -> Iterator[Entry]:
        """Every sample's entry, rank by rank."""
        return (entry for rank in self.micro_batches for part in rank for entry in part)

    def samples(self) -> list[Sample]:
        """Every sample of the step, rank by rank."""
        return [entry.sample for rank in self.micro_batches for part in rank for entry in part]

    def in_journal(self) -> "OpenStep":
        """The same with the payloads in the journal alone."""
        micro_batches = tuple(
            tuple(tuple(in_journal(entry) for entry in part) for part in rank)
            for rank in self.micro_batches
        )
        return replace(self, micro_batches=micro_batches)

    def without(self, lost: Collection[Entry]) -> MicroBatches:
        """Its samples but for these."""
        return tuple(
            tuple(tuple(entry for entry in part if entry not in lost) for part in rank)
            for rank in self.micro_batches
        )

    def tickets(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The tickets of its samples, in the same nesting."""
        return tuple(
            tuple(tuple(entry.ticket for entry in part) for part in rank)
            for rank in self.micro_batches
        )

    @property
    def num_samples(self) -> int:
        """Samples in the step, over all ranks."""
        return sum(len(part) for rank in self.micro_batches for part in rank)

    @property
    def expected_loss_tokens(self) -> int:
        """Loss tokens that so many samples have as a rule; those that it has if nobody knows."""
        if not self.usual_loss:
            return sum(sample.loss_tokens for sample in self.samples())
        return max(1, round(self.usual_loss * self.num_samples))

    @property
    def nbytes(self) -> int:
        """Payload bytes of its samples, wherever they are."""
        return sum(sample.nbytes for sample in self.samples())


def planned(step: OpenStep, *passed_over: int) -> Planned:
    """What is to be remembered of a step; passed_over: tickets that its plan left in the buffer."""
    return Planned(
        step.number, step.digest, step.planned_at, step.tickets(), passed_over, step.attempt,
        step.usual_loss,
    )  # fmt: skip


def step_digest(
    number: int, micro_batches: MicroBatches, attempt: int = 0, usual_loss: float = 0.0
) -> str:
    """Digest of who gets what: step number, attempt, and sample ids by DP rank and micro-batch;
    and of the loss tokens that a sample is expected to have.
    """
    counts = [[len(part) for part in rank] for rank in micro_batches]
    names = [entry.sample.sample_id for rank in micro_batches for part in rank for entry in part]
    return digest_of(number, counts, names, attempt, usual_loss)
