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

`GroupTotals`: the groups of a step by numbers, and the loss tokens of each over all DP ranks.

A group goes into a step whole, but its members may go to different ranks: what is averaged over the
tokens of a group needs a total that no single rank can count. A sample without a group is a group
of its own. Numbers are given in the order of the plan, so that they are the same whenever a step is
told of.

`OpenSteps`: the steps that are planned and not committed, in order of their numbers.

    open                                        waiting
    as many as ranks have room for, at most     planned too, not open yet: a rewind has put them
    `max_open_steps`; ranks may hold them       behind each other, or the limit was larger before
                                                a restart; they are opened one by one

Invariant: numbers have no gap, from the first open step over the waiting ones to `next_step`, so
that "committed" and "opened" are one number each.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, count, pairwise, takewhile
from operator import attrgetter
from typing import Self, TypeVar

from rollout_dispatcher.core.buffer.entry import Entry, in_journal
from rollout_dispatcher.core.buffer.phases import NextStep
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


T = TypeVar("T")
#: Something of each sample, by DP rank and micro-batch.
Each = tuple[tuple[tuple[T, ...], ...], ...]
#: Entries by DP rank and micro-batch; an empty micro-batch is a filler.
MicroBatches = Each[Entry]


def _each(micro_batches: MicroBatches, of: Callable[[Entry], T]) -> Each[T]:
    """What is of each entry, in the same nesting."""
    return tuple(tuple(tuple(map(of, part)) for part in rank) for rank in micro_batches)


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
        return replace(self, micro_batches=_each(self.micro_batches, in_journal))

    def without(self, lost: Collection[Entry]) -> MicroBatches:
        """Its samples but for these."""
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


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """numbers[dp rank][micro-batch]: of the group of each sample. loss_tokens: by that number."""

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
    """Open steps by number, and those that wait behind them."""

    def __init__(self) -> None:
        self._open: dict[int, OpenStep] = {}
        self._waiting: deque[OpenStep] = deque()
        #: The number of the next step to be planned.
        self.next_step = 0
        #: Attempts at steps that were withdrawn, and are to be planned, by number.
        self.withdrawn: dict[int, int] = {}
        # Open steps up to there need no look: they are released, and for that many DP ranks.
        self._released = self._fitting = -1
        self._fits = 0

    def __getitem__(self, number: int) -> OpenStep:
        return self._open[number]

    def find(self, number: int) -> OpenStep | None:
        """`get`, which a mapping has through an exception: this is asked for each micro-batch."""
        return self._open.get(number)

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def restore(
        self,
        steps: Iterable[OpenStep],
        next_step: int,
        withdrawn: Mapping[int, int],
        *,
        room: int,
    ) -> None:
        """Start from what an earlier process had: `room` steps are open, and others wait."""
        self.next_step, self.withdrawn = next_step, dict(withdrawn)
        self._waiting = deque(steps)
        while self._waiting and len(self._open) < room:
            self.open_waiting()

    # -- what there is ----------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many steps are planned and not open yet."""
        return len(self._waiting)

    @property
    def newest(self) -> OpenStep:
        """The step that was planned last; there has to be one that is not committed."""
        return self._waiting[-1] if self._waiting else self._open[self.next_step - 1]

    def uncommitted(self) -> list[OpenStep]:
        """Every step that is planned and not committed, by number."""
        return list(self._in_order())

    @property
    def num_uncommitted(self) -> int:
        """How many those are."""
        return len(self._open) + len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Samples of all uncommitted steps."""
        return sum(step.num_samples for step in self._in_order())

    @property
    def committed(self) -> int:
        """The last committed step, -1 for none."""
        return self.next_step - self.num_uncommitted - 1

    @property
    def next(self) -> NextStep:
        """The step that is planned next."""
        return NextStep(self.next_step, self.committed)

    @property
    def last(self) -> int:
        """The last step that was opened, -1 for none."""
        return (self._waiting[0].number if self._waiting else self.next_step) - 1

    @property
    def attempts(self) -> dict[int, int]:
        """At each step that is planned and not committed."""
        return {step.number: step.attempt for step in self._in_order()}

    @property
    def announced(self) -> int:
        """The last step that ranks may ever have heard of, -1 for none."""
        return max([self.next_step - 1, *self.withdrawn])

    def unplanned(self, dp_size: int) -> OpenStep | None:
        """The first open step that has no plan for so many DP ranks."""
        if dp_size != self._fits:
            self._fits, self._fitting = dp_size, -1
        if self._fitting >= self.last:  # as nearly always
            return None
        for number in self._after(self._fitting):
            step = self._open[number]
            if not step.fits(dp_size):
                return step
            self._fitting = step.number
        return None

    def unreleased(self) -> Iterator[OpenStep]:
        """Open steps that are not released, in order: what is released comes before them."""
        for number in self._after(self._released):
            step = self._open[number]
            if step.state is StepState.RELEASED:
                self._released = step.number
            yield step

    def _after(self, number: int) -> range:
        """The open steps after that one."""
        last = self.last
        return range(max(number, last - len(self._open)) + 1, last + 1)

    def _look_from(self, number: int) -> None:
        """The open steps after that one are others now."""
        self._released, self._fitting = min(self._released, number), min(self._fitting, number)

    # -- what becomes of them ---------------------------------------------------------------

    def add(
        self,
        micro_batches: MicroBatches,
        dp_size: int,
        now: float,
        cost: FloatArray | None = None,
        *,
        usual_loss: float = 0.0,
        slowness: tuple[float, ...] | None = None,
    ) -> OpenStep:
        """The next step was planned, at this cost; it is open at once unless others wait.

        usual_loss: loss tokens of the mean arrival.
        """
        number = self.next_step
        self.next_step += 1
        attempt = self.withdrawn.pop(number, -1) + 1
        digest = step_digest(number, micro_batches, attempt, usual_loss)
        step = OpenStep(
            number, micro_batches, digest, now,
            dp_size=dp_size, planned_cost=cost, slowness=slowness, attempt=attempt,
            usual_loss=usual_loss,
        )  # fmt: skip
        if self._waiting:  # it was being planned when the trainer rewound
            self._waiting.append(step)
        else:
            self._open[number] = step
        return step

    def replace(
        self,
        number: int,
        micro_batches: MicroBatches,
        dp_size: int,
        cost: FloatArray | None = None,
        slowness: tuple[float, ...] | None = None,
    ) -> None:
        """An open step was planned again, for so many DP ranks, at this cost."""
        self._look_from(number - 1)
        before = self._open[number]
        digest = step_digest(number, micro_batches, before.attempt, before.usual_loss)
        self._open[number] = replace(
            before, micro_batches=micro_batches, digest=digest, state=StepState.PLANNED,
            dp_size=dp_size, planned_cost=cost, slowness=slowness,
        )  # fmt: skip

    def hold_back(self, number: int) -> None:
        """This step, which is not released, has lost samples: none is prepared from it on."""
        self._look_from(number - 1)
        for step in self._open.values():
            if step.number >= number:
                step.move(StepEvent.SAMPLES_LOST)

    def lose(self, number: int, lost: Collection[Entry]) -> OpenStep:
        """These samples are gone, and the step's plan with them; returns what is left of it."""
        self.hold_back(number)
        return self._fill(self._open[number], self._open[number].without(lost))

    def renumber(self, number: int) -> list[OpenStep]:
        """A step has lost all of its samples: it takes over those of the next one, and so on.

        The last step is withdrawn with that. Returns the others, whose plans are lost.
        """
        after = [step for step in self._in_order() if step.number >= number]
        moved = [self._fill(empty, full.micro_batches) for empty, full in pairwise(after)]
        last = after[-1]
        self.next_step = last.number
        self.withdrawn[last.number] = last.attempt
        if self._waiting:
            self._waiting.pop()
        else:
            del self._open[last.number]
        return moved

    def withdraw_all(self) -> list[OpenStep]:
        """No step is left; returns those that there were, the newest first."""
        gone = self.uncommitted()[::-1]
        self.withdrawn |= {step.number: step.attempt for step in gone}
        self.next_step -= len(gone)
        self._open, self._waiting = {}, deque()
        self._look_from(-1)
        return gone

    def _fill(self, step: OpenStep, micro_batches: MicroBatches) -> OpenStep:
        """A step has these samples now, and no plan."""
        self._look_from(step.number - 1)
        found = replace(
            step, micro_batches=micro_batches, digest="", planned_cost=None,
            attempt=step.attempt + 1,
        )  # fmt: skip
        if step.number in self._open:
            self._open[step.number] = found
        else:
            self._waiting[step.number - self._waiting[0].number] = found
        return found

    def open_waiting(self) -> OpenStep:
        """Open the first step of those that wait; there has to be one."""
        step = self._waiting.popleft()
        self._open[step.number] = step
        return step

    def start_over(self) -> None:
        """A new generation: what ranks of earlier ones said of open steps is void."""
        self._look_from(-1)
        for step in self._open.values():
            step.move(StepEvent.NEW_GENERATION)

    def commit(self, through: int) -> list[OpenStep]:
        """Steps up to `through` are committed: open ones by ranks, others by a checkpoint."""
        done = list(takewhile(lambda step: step.number <= through, self._in_order()))
        for step in done:
            step.move(StepEvent.ALL_COMMITTED)
            if self._open.pop(step.number, None) is None:
                self._waiting.popleft()
        return done

    def rewind(self, steps: Iterable[OpenStep]) -> None:
        """Committed `steps` come again, then what was open; all of it waits."""
        self._look_from(-1)
        back = [*steps, *self._open.values()]
        for step in back:
            step.move(StepEvent.REWOUND)
        self._waiting.extendleft(reversed(back))
        self._open = {}

    def _in_order(self) -> Iterator[OpenStep]:
        return chain(self._open.values(), self._waiting)
