"""What everybody takes for granted of plans, measured where no construction promises it.

    python -m tests.bench.properties [--steps 100] [--seeds 5] [--cases 2000] [--json FILE]

Windows: `dispatcher simulate` on real traces, each window beside the next narrower one, the same
seeds for both. Random steps: the same samples with a larger budget, with a looser cap on a rank's
tokens, and beside two textbook splits, Karmarkar-Karp of equal counts and LPT under the budget;
and how long the slowest plan takes. Times are in percent of an even share of the work; what a
micro-step costs to begin is in them where a budget decides how many there are.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import process_time

import numpy as np

from rollout_planner import get_seqlen_balanced_partitions, tuning
from rollout_planner.cost import Quadratic
from rollout_planner.planner import plan
from rollout_planner.types import (
    FloatArray,
    Grouping,
    IntArray,
    PlanConfig,
    Sync,
    step_time,
)
from tests.bench.cells import TRACES
from tests.bench.mix import SIZES, runs_of
from tests.bench.rows import report
from tests.support.windows import window_of

WINDOWS = (1, 1.1, 1.25, 1.5, 2)
COST = Quadratic()
#: Larger and looser by this; a cap on a rank's tokens, over its even share.
MORE, CAP = 1.25, 1.03


@dataclass(frozen=True, slots=True)
class Row:
    """How much worse what should be better is: in the mean and at worst, in points.

    cases: compared. worse: of them by more than a tenth of a point. Of times: the mean, the slowest
        and how many are above half a second.
    """

    what: str
    cases: int
    mean: float
    worst: float
    worse: int

    @classmethod
    def of(cls, what: str, points: list[float]) -> "Row":
        """points: how much worse, of each case."""
        return cls(what, len(points), fmean(points), max(points), sum(one > 0.1 for one in points))


def windows(steps: int, seeds: int) -> Iterator[Row]:
    """A row a trace, bound and step to a wider window."""
    for trace, batch, ranks, budget in SIZES:
        path = TRACES / f"{trace}.csv.gz"
        if not path.exists():
            print(f"{trace} skipped: the trace is not here")
            continue
        for bound in ("off", "0.25"):
            excess = [
                [
                    run.excess
                    for run in runs_of(
                        path,
                        batch,
                        ranks,
                        budget,
                        window=window,
                        bound=bound,
                        steps=steps,
                        seeds=seeds,
                    )
                ]
                for window in WINDOWS
            ]
            for (narrow, before), (wide, after) in pairwise(zip(WINDOWS, excess, strict=True)):
                points = [100 * (b - a) for a, b in zip(before, after, strict=True)]
                name = f"{trace} {batch}/{ranks}, bound {bound}: window {narrow} to {wide}"
                yield Row.of(name, points)


@dataclass(frozen=True, slots=True)
class Step:
    """A random step: lengths, ranks, where they meet, and the budget of a micro-batch."""

    tokens: IntArray
    config: PlanConfig

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> "Step":
        """Lognormal lengths, a few to sixty samples a rank, room for one to four of the longest."""
        ranks = int(rng.integers(2, 17))
        count = int(ranks * rng.integers(2, 60))
        drawn = rng.lognormal(8, rng.uniform(0.2, 1.2), count)
        tokens = np.clip(drawn, 16, 65536).astype(np.int64)
        budget = int(tokens.max() * rng.uniform(1, 4))
        config = PlanConfig(
            dp_size=ranks, dispatch_batch_size=count, cost=COST, grouping=Grouping.IGNORE,
            micro_batch_tokens=budget, sync=Sync(rng.choice([*Sync])),
        )  # fmt: skip
        return cls(tokens, config)

    def planned(self, **changes: object) -> tuple[float, float]:
        """The time of our plan, with some of the config changed, and the seconds that it took.

        No time where a cap leaves samples for the next step.
        """
        config, count = replace(self.config, **changes), len(self.tokens)  # type: ignore[arg-type]
        begun = process_time()
        found = plan(window_of(self.tokens), config, count)
        took = process_time() - begun
        return (self.time(found.cost) if len(found.chosen) == count else math.nan), took

    def time(self, cost: FloatArray) -> float:
        """Of micro-batches of these costs, [R, M], in percent of an even share of the work."""
        work = float(COST(self.tokens).sum())
        full = (self.config.micro_batch_tokens or 0) * work / float(self.tokens.sum())
        begins = cost.shape[1] * tuning.BEGIN_MICRO_STEP * full
        time = step_time(cost, self.config.sync) + begins
        return float(100 * time * self.config.dp_size / work)

    def karmarkar_karp(self) -> float:
        """Ranks of equal counts by Karmarkar-Karp, then as few micro-batches as all can do with."""
        ranks, work = self.config.dp_size, COST(self.tokens)
        parts = get_seqlen_balanced_partitions(work.tolist(), ranks, equal_size=True)
        fewest = 1
        while True:
            cut = [self.packed(np.array(part), fewest) for part in parts]
            if all(one is not None for one in cut):
                return self.time(np.array(cut, dtype=np.float64))
            fewest += 1

    def lpt(self) -> float:
        """The dearest first into the cheapest micro-batch that has room, of as few as do."""
        ranks, count = self.config.dp_size, len(self.tokens)
        M = max(1, -(-int(self.tokens.sum()) // (ranks * (self.config.micro_batch_tokens or 1))))
        while (cost := self.packed(np.arange(count), ranks * M)) is None:
            M += 1
        return self.time(np.sort(cost)[::-1].reshape(M, ranks).T)

    def packed(self, samples: IntArray, bins: int) -> FloatArray | None:
        """Costs of these bins, filled so; None where one of them overflows."""
        tokens, cost = np.zeros(bins), np.zeros(bins)
        for at in samples[np.argsort(-self.tokens[samples], kind="stable")].tolist():
            fits = tokens + self.tokens[at] <= (self.config.micro_batch_tokens or 0)
            if not fits.any():
                return None
            best = int(np.where(fits, cost, np.inf).argmin())
            tokens[best] += self.tokens[at]
            cost[best] += float(COST(self.tokens[at]))
        return cost


def random_steps(cases: int) -> Iterator[Row]:
    """A row a property, and what plans take, in milliseconds."""
    milliseconds, points = list[float](), dict[str, list[float]]()
    for seed in range(cases):
        step = Step.drawn(np.random.default_rng(seed))
        budget, share = step.config.micro_batch_tokens or 1, step.tokens.sum() / step.config.dp_size
        cap = max(int(CAP * share), int(step.tokens.max()))
        plans = [
            step.planned(),
            step.planned(micro_batch_tokens=int(MORE * budget)),
            step.planned(rank_tokens=cap),
            step.planned(rank_tokens=int(MORE * cap)),
        ]
        milliseconds += [1000 * took for _, took in plans]
        time, larger, capped, looser = (time for time, _ in plans)
        worse = {
            "a budget larger by a quarter": larger - time,
            "a cap on a rank's tokens looser by a quarter": looser - capped,
            "beside Karmarkar-Karp of equal counts": time - step.karmarkar_karp(),
            "beside LPT under the budget": time - step.lpt(),
        }
        for name, by in worse.items():
            if math.isfinite(by):
                points.setdefault(name, []).append(by)
    for name, found in points.items():
        yield Row.of(name, found)
    slow = sum(took > 500 for took in milliseconds)
    yield Row(
        "milliseconds a plan", len(milliseconds), fmean(milliseconds), max(milliseconds), slow
    )


def measure(steps: int, seeds: int, cases: int) -> Iterator[Row]:
    """All of it."""
    yield from random_steps(cases)
    yield from windows(steps, seeds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    report(measure(given.steps, given.seeds, given.cases), line, given.json)


def line(row: Row) -> str:
    """As it is printed."""
    return (
        f"{row.what:75} {row.cases:5} cases  mean {row.mean:+7.3f}  worst {row.worst:+7.2f}  "
        f"{row.worse:4} worse"
    )


if __name__ == "__main__":
    main()
