"""An open step: its samples, its state, and the moves between states.

PLANNED --every rank prepared--> PREPARED --every rank connected--> RELEASED
^                                |                                  |
+------- new generation ---------+----------------------------------+
^                                                                   |
|                                                   every rank committed
|                                                                   v
+------- the trainer rewound to a checkpoint ------------------ COMMITTED


PLANNED, PREPARED --samples of it, or of a step before it, are lost--> PLANNED

After a restart every open step is PLANNED again, and is committed at once if the ranks report that
it was. A step that was planned for another number of DP ranks, or has lost samples and so its plan,
stays PLANNED until a new plan replaces it. Plans of one step number that ranks may have received
differ in their *attempt*; no attempt has two plans.

`GroupTotals`: numbers of a step's groups, and the loss tokens of each group over all DP ranks. A
group is in one step, but its members may be on different ranks, so no rank can count the total that
an average over the group's tokens needs. A sample without a group is a group of its own. Numbers
follow the order of the plan, so that they are the same in every delivery.

`OpenSteps`: the steps that are planned and not committed, in order of their numbers.

    open                                        waiting
    as many as ranks have room for, at most     planned, after a rewind, or as the limit was
    `max_open_steps`; ranks may hold them       larger before a restart; opened one by one

Invariant: numbers have no gap, from the first open step over the waiting ones to `next_number`, so
that "committed" and "opened" are one number each.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, pairwise, takewhile
from operator import attrgetter
from typing import Self, TypeVar

from rollout_dispatcher.core.buffer.entry import Entry, in_journal
from rollout_dispatcher.core.buffer.phases import NextStep
from rollout_dispatcher.core.facts import Planned
from rollout_dispatcher.errors import IllegalTransition, ProtocolError
from rollout_dispatcher.sample import Sample
from rollout_planner.types import FloatArray, Plan, digest_of


class StepState(StrEnum):
    """State of a step."""

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
        # Only a released step is trained, but a restarted dispatcher does not know which steps it
        # released: ranks that report one as committed are right.
        (state, StepEvent.ALL_COMMITTED): StepState.COMMITTED
        for state in (StepState.PLANNED, StepState.PREPARED, StepState.RELEASED)
    },
    **{
        (state, StepEvent.NEW_GENERATION): StepState.PLANNED
        for state in (StepState.PLANNED, StepState.PREPARED, StepState.RELEASED)
    },
    # Ranks report the checkpoint that they have loaded before any of them is given a step.
    **{
        (state, StepEvent.REWOUND): StepState.PLANNED
        for state in (StepState.PLANNED, StepState.PREPARED, StepState.COMMITTED)
    },
    # A released step may be trained already: lost samples fail the generation then.
    **{
        (state, StepEvent.SAMPLES_LOST): StepState.PLANNED
        for state in (StepState.PLANNED, StepState.PREPARED)
    },
}


T = TypeVar("T")
#: Values of samples, by DP rank and micro-batch.
Each = tuple[tuple[tuple[T, ...], ...], ...]
#: Entries by DP rank and micro-batch; an empty one is delivered as a filler (a dummy micro-batch).
MicroBatches = Each[Entry]
#: See `OpenStep.cp_sizes`.
CpSizes = tuple[tuple[int, ...], ...]


def _each(micro_batches: MicroBatches, of: Callable[[Entry], T]) -> Each[T]:
    """`of` each entry, in the same nesting."""
    return tuple(tuple(tuple(map(of, part)) for part in rank) for rank in micro_batches)


@dataclass(slots=True, eq=False)
class OpenStep:
    """An uncommitted or retained step: micro_batches[dp rank][index] are entries.

    digest: of its plan; empty after the loss of its plan, when `micro_batches` only lists its
    samples. attempt: increases with every lost plan.
    dp_size: of the generation that it was planned for; 0: that of `micro_batches`. They differ in a
    simulation, where one rank stands for all.
    planned_cost: float64[R, M], estimated time of each micro-batch; None for a step that an earlier
    process planned, as the journal does not keep it. slowness: of the ranks in that plan; None: all
    are equally fast.
    usual_loss: mean loss tokens of arrivals when the step was planned; unchanged if the step loses
    samples. 0 for a step that an earlier version of this software planned.
    cp_sizes: by DP rank and micro-batch, size of the block of ranks that trains it: 2^k, beginning
    at a multiple of 2^k; the first of them has the samples in `micro_batches`. Empty: all are 1.
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
    cp_sizes: CpSizes = ()

    def __post_init__(self) -> None:
        self.dp_size = self.dp_size or len(self.micro_batches)

    def move(self, event: StepEvent) -> None:
        """Move to the state of the table `NEXT`; an illegal move raises IllegalTransition and
        changes nothing.
        """
        after = NEXT.get((self.state, event))
        if after is None:
            raise IllegalTransition(self.state, event)
        self.state = after

    def with_plan(self, plan: Plan, entries: Sequence[Entry], dp_size: int) -> "OpenStep":
        """The same step with this plan of `entries`, for `dp_size` DP ranks."""
        micro_batches = plan.laid_out(tuple([entries[at] for at in plan.chosen.tolist()]))
        cp_sizes = () if plan.cp_sizes is None else tuple(map(tuple, plan.cp_sizes.tolist()))
        digest = step_digest(
            self.number, micro_batches, self.attempt, self.usual_loss, cp_sizes=cp_sizes
        )
        return replace(
            self, micro_batches=micro_batches, digest=digest, state=StepState.PLANNED,
            dp_size=dp_size, planned_cost=plan.cost, slowness=plan.slowness, cp_sizes=cp_sizes,
        )  # fmt: skip

    def fits(self, dp_size: int) -> bool:
        """Whether the step has a plan for `dp_size` DP ranks."""
        return bool(self.digest) and self.dp_size == dp_size

    def check_attempt(self, attempt: int, *, begun: bool) -> None:
        """Raise ProtocolError for an attempt newer than ours, or, if training began, not exactly
        ours.
        """
        if attempt > self.attempt or (begun and attempt != self.attempt):
            raise ProtocolError(
                f"a DP rank {'trains' if begun else 'holds'} attempt {attempt} at step "
                f"{self.number}, and the last one that this dispatcher knows of is {self.attempt}: "
                "the journal is an older copy; restart all ranks"
            )

    def check_received(self, count: int) -> None:
        """Raise ProtocolError if a rank claims more micro-batches than the step has."""
        there_are = len(self.micro_batches[0])
        if count > there_are:
            raise ProtocolError(
                f"a DP rank says that it has {count} micro-batches of step {self.number}, which "
                f"has {there_are}"
            )

    def block(self, dp_rank: int, index: int) -> tuple[int, int]:
        """Size of the block that trains a rank's micro-batch, and the rank's place in it."""
        size = self.cp_sizes[dp_rank][index] if self.cp_sizes else 1
        return size, dp_rank % size

    def trained_by(self, dp_rank: int, index: int) -> tuple[Entry, ...]:
        """The samples of the block that trains a rank's micro-batch."""
        _, place = self.block(dp_rank, index)
        return self.micro_batches[dp_rank - place][index]

    def entries(self) -> Iterator[Entry]:
        """Every sample's entry, rank by rank."""
        return (entry for rank in self.micro_batches for part in rank for entry in part)

    def samples(self) -> list[Sample]:
        """Every sample of the step, rank by rank."""
        return [entry.sample for rank in self.micro_batches for part in rank for entry in part]

    def in_journal(self) -> "OpenStep":
        """The same with the payloads in the journal only."""
        return replace(self, micro_batches=_each(self.micro_batches, in_journal))

    def without(self, lost: Collection[Entry]) -> MicroBatches:
        """The micro-batches without the lost samples."""
        return tuple(
            tuple(tuple(entry for entry in part if entry not in lost) for part in rank)
            for rank in self.micro_batches
        )

    def tickets(self) -> Each[int]:
        """The tickets of its samples, in the same nesting."""
        return _each(self.micro_batches, attrgetter("ticket"))

    @property
    def num_samples(self) -> int:
        """Samples in the step, over all ranks."""
        return sum(len(part) for rank in self.micro_batches for part in rank)

    @property
    def expected_loss_tokens(self) -> int:
        """Loss tokens of as many mean arrivals; of its own samples if `usual_loss` is not known."""
        if not self.usual_loss:
            return sum(sample.loss_tokens for sample in self.samples())
        return max(1, round(self.usual_loss * self.num_samples))

    @property
    def nbytes(self) -> int:
        """Payload bytes of its samples, wherever they are."""
        return sum(sample.nbytes for sample in self.samples())


def planned(step: OpenStep, *passed_over: int) -> Planned:
    """The fact of a planned step. passed_over: tickets that its plan left in the buffer."""
    return Planned(
        step.number, step.digest, step.planned_at, step.tickets(), passed_over, step.attempt,
        step.usual_loss, step.cp_sizes,
    )  # fmt: skip


def step_digest(
    number: int,
    micro_batches: MicroBatches,
    attempt: int = 0,
    usual_loss: float = 0.0,
    *,
    cp_sizes: CpSizes = (),
) -> str:
    """Digest of the plan: number, sample ids by DP rank and micro-batch, and the other values."""
    counts = [[len(part) for part in rank] for rank in micro_batches]
    names = [entry.sample.sample_id for rank in micro_batches for part in rank for entry in part]
    return digest_of(number, counts, names, attempt, usual_loss, cp_sizes=cp_sizes)


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """numbers[dp rank][micro-batch]: group number of each sample. loss_tokens: by group number."""

    numbers: Each[int]
    loss_tokens: tuple[int, ...]

    @classmethod
    def of(cls, micro_batches: MicroBatches) -> Self | None:
        """Of a step; None if no sample of it has a group."""
        samples = [entry.sample for rank in micro_batches for part in rank for entry in part]
        if not any(sample.group_id for sample in samples):
            return None
        following = count()
        known: defaultdict[str, int] = defaultdict(following.__next__)
        given = [known[s.group_id] if s.group_id else next(following) for s in samples]
        totals = [0] * next(following)
        for number, sample in zip(given, samples, strict=True):
            totals[number] += sample.loss_tokens
        taken = iter(given)
        return cls(_each(micro_batches, lambda _: next(taken)), tuple(totals))


class OpenSteps(Mapping[int, OpenStep]):
    """Open steps by number; waiting steps follow them."""

    def __init__(self) -> None:
        self._steps: dict[int, OpenStep] = {}  # open and waiting, in order
        #: Number of the next step to be planned.
        self.next_number = 0
        #: Number of the last opened step, -1 for none.
        self.last_opened = -1
        #: Attempts at steps that were withdrawn, and are to be planned, by number.
        self.withdrawn: dict[int, int] = {}

    def __getitem__(self, number: int) -> OpenStep:
        if number > self.last_opened:
            raise KeyError(number)
        return self._steps[number]

    def find(self, number: int) -> OpenStep | None:
        """`get` without the KeyError that `Mapping.get` catches; called for each micro-batch."""
        return self._steps.get(number) if number <= self.last_opened else None

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.committed + 1, self.last_opened + 1))

    def __len__(self) -> int:
        return self.last_opened - self.committed

    def restore(
        self,
        steps: Iterable[OpenStep],
        next_step: int,
        withdrawn: Mapping[int, int],
        *,
        room: int,
    ) -> None:
        """Start from the steps of an earlier process: the first `room` are open, the others
        wait.
        """
        self.withdrawn, self.next_number = dict(withdrawn), next_step
        self._steps = {step.number: step for step in steps}
        self.last_opened = min(self.committed + room, next_step - 1)

    # -- reading ------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of steps that are planned and not open yet."""
        return self.next_number - 1 - self.last_opened

    @property
    def last_planned(self) -> OpenStep:
        """The last planned step; there has to be an uncommitted one."""
        return self._steps[self.next_number - 1]

    def uncommitted(self) -> list[OpenStep]:
        """Every step that is planned and not committed, by number."""
        return list(self._steps.values())

    @property
    def in_flight(self) -> int:
        """Samples of all uncommitted steps."""
        return sum(step.num_samples for step in self._steps.values())

    @property
    def committed(self) -> int:
        """The last committed step, -1 for none."""
        return self.next_number - 1 - len(self._steps)

    @property
    def next(self) -> NextStep:
        """Number of the next step to be planned, and the last committed one."""
        return NextStep(self.next_number, self.committed)

    @property
    def attempts(self) -> dict[int, int]:
        """Attempt of each uncommitted step."""
        return {number: step.attempt for number, step in self._steps.items()}

    @property
    def last_announced(self) -> int:
        """Number of the last step that was ever announced to ranks, withdrawn ones included; -1 for
        none.
        """
        return max([self.next_number - 1, *self.withdrawn])

    def unplanned(self, dp_size: int) -> OpenStep | None:
        """The first open step that has no plan for so many DP ranks."""
        return next((step for step in self.values() if not step.fits(dp_size)), None)

    def unreleased(self) -> list[OpenStep]:
        """Open steps that are not released, in order."""
        return [step for step in self.values() if step.state is not StepState.RELEASED]

    # -- changes ------------------------------------------------------------------------------

    def add(
        self, plan: Plan, entries: Sequence[Entry], dp_size: int, now: float, usual_loss: float
    ) -> OpenStep:
        """Add the next step; it is open at once unless others wait.

        usual_loss: loss tokens of the mean arrival.
        """
        number, waiting = self.next_number, self.waiting
        attempt = self.withdrawn.pop(number, -1) + 1
        step = OpenStep(number, (), "", now, attempt=attempt, usual_loss=usual_loss)
        self._steps[number] = step = step.with_plan(plan, entries, dp_size)
        self.next_number += 1
        if not waiting:  # else it was being planned when the trainer rewound
            self.last_opened = number
        return step

    def replan(self, number: int, plan: Plan, entries: Sequence[Entry], dp_size: int) -> None:
        """Give an open step a new plan, for `dp_size` DP ranks."""
        self._steps[number] = self._steps[number].with_plan(plan, entries, dp_size)

    def withhold(self, number: int) -> None:
        """Move this unreleased step, and all open ones after it, back to PLANNED: it has lost
        samples.
        """
        for step in self.values():
            if step.number >= number:
                step.move(StepEvent.SAMPLES_LOST)

    def remove_samples(self, number: int, lost: Collection[Entry]) -> OpenStep:
        """Remove lost samples from a step, which loses its plan; returns the step without them."""
        self.withhold(number)
        return self._replace_samples(self._steps[number], self._steps[number].without(lost))

    def renumber(self, number: int) -> list[OpenStep]:
        """Close the gap of a step that has lost all samples: move those of each later step up by
        one.

        Withdraws the last step. Returns the others, which have lost their plans.
        """
        after = [step for step in self._steps.values() if step.number >= number]
        moved = [
            self._replace_samples(empty, full.micro_batches) for empty, full in pairwise(after)
        ]
        self.next_number, last = self._steps.popitem()
        self.withdrawn[last.number] = last.attempt
        self.last_opened = min(self.last_opened, last.number - 1)
        return moved

    def withdraw_all(self) -> list[OpenStep]:
        """Withdraw every uncommitted step; returns them, the newest first."""
        gone = self.uncommitted()[::-1]
        self.withdrawn |= self.attempts
        self.last_opened, self.next_number = self.committed, self.committed + 1
        self._steps.clear()
        return gone

    def _replace_samples(self, step: OpenStep, micro_batches: MicroBatches) -> OpenStep:
        """Give a step other samples, and no plan."""
        self._steps[step.number] = found = replace(
            step, micro_batches=micro_batches, digest="", planned_cost=None,
            attempt=step.attempt + 1, cp_sizes=(),
        )  # fmt: skip
        return found

    def open_waiting(self) -> OpenStep:
        """Open the first waiting step; there has to be one."""
        self.last_opened += 1
        return self._steps[self.last_opened]

    def start_over(self) -> None:
        """Move all open steps back to PLANNED for a new generation."""
        for step in self.values():
            step.move(StepEvent.NEW_GENERATION)

    def commit(self, through: int) -> list[OpenStep]:
        """Commit the steps up to `through`, open or waiting; returns them."""
        done = list(takewhile(lambda step: step.number <= through, self._steps.values()))
        for step in done:
            step.move(StepEvent.ALL_COMMITTED)
            del self._steps[step.number]
        self.last_opened = max(self.last_opened, self.committed)
        return done

    def rewind(self, steps: Sequence[OpenStep]) -> None:
        """Put the last committed `steps`, then the open ones, in front of the waiting steps."""
        for step in (*steps, *self.values()):
            step.move(StepEvent.REWOUND)
        self._steps = {step.number: step for step in steps} | self._steps
        self.last_opened = self.committed
