"""The steps that are planned and not committed, in order of their numbers.

    open                                        waiting
    as many as ranks have room for, at most     planned too, not open yet: a rewind has put them
    `max_open_steps`; ranks may hold them       behind each other, or the limit was larger before
                                                a restart; they are opened one by one

Invariant: numbers have no gap, from the first open step over the waiting ones to `next_step`, so
that "committed" and "opened" are one number each.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, pairwise, takewhile

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.freshness import NextStep
from rollout_dispatcher.core.effects import Redelivered
from rollout_dispatcher.core.steps.step import (
    MicroBatches,
    OpenStep,
    StepEvent,
    StepState,
    step_digest,
)
from rollout_planner.types import FloatArray


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

    def close_up(self, number: int) -> list[OpenStep]:
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

    def start_over(self, dp_size: int) -> list[Redelivered]:
        """A new generation of so many ranks: what earlier ones said of open steps is void."""
        self._look_from(-1)
        for step in self._open.values():
            step.move(StepEvent.NEW_GENERATION)
        return [
            Redelivered(step.number, "new-generation" if step.dp_size == dp_size else "new-size")
            for step in self._open.values()
        ]

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
