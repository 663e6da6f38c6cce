"""The last steps, as they went: when each was planned, delivered, trained and committed, and how.

Invariant: at most `MAX_STEPS`, whatever becomes of them; the oldest are forgotten first. Of each,
whatever ranks say, the times of the micro-batches that were planned. Times are the core's clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout_dispatcher.core.effects import StepPlanned
from rollout_dispatcher.core.measuring.times import Pass
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_planner.types import FloatArray, Plan

MAX_STEPS = 64
#: Passes over a step of which a rank's times are remembered.
MAX_COST_KEYS = 8


@dataclass(slots=True)
class SeenStep:
    """One step. cost: float64[R, M]. tokens: of all its samples.

    attempt: how often it was planned. delivered, taken, done: when each rank was given its last
    micro-batch, began to train, and committed. measured: by pass.
    """

    number: int
    generation: int
    trigger: str
    eligible: int
    samples: int
    tokens: int
    planned: float
    cost: FloatArray
    fifo_excess: float
    lower_bound: float
    attempt: int = 1
    released: float | None = None
    committed: float | None = None
    delivered: dict[int, float] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    measured: dict[str, Pass] = field(default_factory=dict)

    @property
    def dp_size(self) -> int:
        """DP ranks that it is planned for."""
        return int(self.cost.shape[0])

    def times_of(self, cost_key: str, dp_rank: int, count: int) -> Pass | None:
        """Where this rank's `count` times of a pass belong; None for what is not its first word,
        or has not one time for each micro-batch.
        """
        times = self.measured.get(cost_key)
        if not 0 <= dp_rank < self.dp_size or count != self.cost.shape[1]:
            return None
        if times is not None and dp_rank in times.busy:
            return None
        if sum(dp_rank in known.busy for known in self.measured.values()) == MAX_COST_KEYS:
            return None
        if times is None:
            times = self.measured[cost_key] = Pass()
        return times

    def began_again(self) -> None:
        """It is delivered anew: what ranks did with it before is void."""
        self.released = self.committed = None
        for seen in (self.delivered, self.taken, self.done):
            seen.clear()
        self.measured.clear()


class RecentSteps:
    """Steps by number."""

    def __init__(self) -> None:
        self._steps: dict[int, SeenStep] = {}

    def __iter__(self) -> Iterator[SeenStep]:
        return iter(self._steps.values())

    def get(self, number: int) -> SeenStep | None:
        """A step that is remembered."""
        return self._steps.get(number)

    def planned(
        self, report: StepPlanned, at: float, *, generation: int, eligible: int
    ) -> SeenStep | None:
        """A step was planned, from so many eligible samples; returns one that is forgotten now."""
        plan = report.plan
        self._steps[report.step] = SeenStep(
            number=report.step,
            generation=generation,
            trigger=str(report.trigger),
            eligible=eligible,
            samples=len(report.tokens),
            tokens=int(report.tokens.sum()),
            planned=at,
            cost=plan.cost,
            fifo_excess=plan.fifo_excess,
            lower_bound=plan.lower_bound,
        )
        if len(self._steps) <= MAX_STEPS:
            return None
        return self._steps.pop(next(iter(self._steps)))

    def withdrawn(self, number: int) -> bool:
        """It is no step any more; returns whether it was remembered."""
        return self._steps.pop(number, None) is not None

    def replanned(self, step: OpenStep, plan: Plan, *, generation: int) -> SeenStep | None:
        """A step has another plan, and other samples if it has lost some."""
        if (seen := self._steps.get(step.number)) is not None:
            samples = step.samples()
            seen.samples, seen.tokens = len(samples), sum(sample.tokens for sample in samples)
            seen.cost, seen.fifo_excess = plan.cost, plan.fifo_excess
            seen.lower_bound = plan.lower_bound
            seen.generation = generation
            seen.attempt += 1
        return seen

    def open_ones(self, through: int) -> Iterator[SeenStep]:
        """Steps up to that number which are not committed."""
        found = reversed(self._steps.values())
        return (step for step in found if step.number <= through and step.committed is None)
