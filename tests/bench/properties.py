"""What everybody takes for granted of plans, measured where no construction promises it.

    python -m tests.bench.properties [--steps 100] [--seeds 5] [--cases 2500] [--json FILE]

Windows: `dispatcher simulate` with --max-step-variation off on real traces and on lengths of which
a fifth are near half the budget, each window beside the next narrower one, the same seeds for both
(`tests.bench.mix` has them with the bound). Random steps: the same
samples with a larger budget, with a looser cap on a rank's tokens, and beside two textbook splits,
Karmarkar-Karp of equal counts and LPT under the budget; and how long the slowest plan takes. Small
steps: beside the best of all splits. Times are in percent of an even share of the work; what a
micro-step costs to begin is in them where a budget decides how many there are.
"""

import argparse
import gzip
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
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
from tests.bench.mix import runs_of
from tests.support.traces import HEADER
from tests.support.windows import window_of

WINDOWS = (1, 1.1, 1.25, 1.5, 2)
COST = Quadratic()
#: Larger and looser by this; a cap on a rank's tokens, over its even share.
MORE, CAP = 1.25, 1.03


#: Lengths of which a fifth are long, and two of these fill a budget.
TWO_KINDS = "two_kinds"
#: Trace, dispatch batch, DP ranks, tokens of a micro-batch's budget, and where ranks meet.
ASKED = (
    ("lineage_open_reasoning", 512, 64, 131072, Sync.MICRO_STEP),
    ("lineage_open_reasoning", 1024, 64, 131072, Sync.MICRO_STEP),
    ("reasoning_gym_rlvr_g3", 256, 16, 16384, Sync.MICRO_STEP),
    ("reasoning_gym_rlvr_g3", 1024, 64, 16384, Sync.MICRO_STEP),
    (TWO_KINDS, 1024, 64, 65536, Sync.MICRO_STEP),
    ("lineage_open_reasoning", 512, 64, 131072, Sync.STEP),
    ("reasoning_gym_rlvr_g3", 512, 32, 16384, Sync.STEP),
)


@dataclass(frozen=True, slots=True)
class Row:
    """How much worse what should be better is: in the mean and at worst, in points.

    cases: compared. worse: of them by more than a tenth of a point.
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


@dataclass(frozen=True, slots=True)
class Windows:
    """Excess at each of `WINDOWS`, means of the seeds, in percent.

    mean_rise, worst_rise: the most that a wider window is worse than the next narrower one, in
    points, in the mean of the seeds and of any one.
    """

    lengths: str
    sync: Sync
    excess: list[float]
    mean_rise: float
    worst_rise: float


@dataclass(frozen=True, slots=True)
class Times:
    """Of the processor, in milliseconds, for plans of random steps. slowest: which that was."""

    plans: int
    mean: float
    worst: float
    slowest: str


def windows(steps: int, seeds: int) -> Iterator[Windows]:
    """A row a trace and barrier."""
    with TemporaryDirectory() as folder:
        made = Path(folder, "two-kinds.csv.gz")
        write_two_kinds(made)
        for trace, batch, ranks, budget, sync in ASKED:
            path = made if trace == TWO_KINDS else TRACES / f"{trace}.csv.gz"
            if not path.exists():
                print(f"{trace} skipped: the trace is not here")
                continue
            runs = partial(runs_of, path, batch, ranks, budget, steps=steps, seeds=seeds, sync=sync)
            excess = [
                [100 * run.excess for run in runs(window=window, bound="off")] for window in WINDOWS
            ]
            yield of_windows(f"{trace} {batch}/{ranks}", sync, excess)


def of_windows(lengths: str, sync: Sync, excess: list[list[float]]) -> Windows:
    """excess: of each window and seed."""
    rises = [
        [b - a for a, b in zip(narrow, wide, strict=True)] for narrow, wide in pairwise(excess)
    ]
    return Windows(
        lengths, sync, list(map(fmean, excess)),
        max(map(fmean, rises)), max(map(max, rises)),
    )  # fmt: skip


def write_two_kinds(path: Path) -> None:
    """A trace of 20,000 samples, a fifth of them long."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(500, 3300, 20_000)
    tokens[rng.permutation(len(tokens))[: len(tokens) // 5]] = rng.integers(30_500, 32_600, 4_000)
    rows = [f"{at},{at},0,1,{length - 1},0" for at, length in enumerate(tokens.tolist())]
    path.write_bytes(gzip.compress("\n".join([HEADER, *rows]).encode()))


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


def random_steps(cases: int) -> tuple[list[Row], Times]:
    """A row a property, and what the plans took."""
    took, points = dict[str, float](), dict[str, list[float]]()
    for seed in range(cases):
        step = Step.drawn(np.random.default_rng(seed))
        budget, share = step.config.micro_batch_tokens or 1, step.tokens.sum() / step.config.dp_size
        cap = max(int(CAP * share), int(step.tokens.max()))
        limits: dict[str, dict[str, object]] = {
            "as drawn": {},
            "a larger budget": {"micro_batch_tokens": int(MORE * budget)},
            "a cap": {"rank_tokens": cap},
            "a looser cap": {"rank_tokens": int(MORE * cap)},
        }
        times = []
        for name, limit in limits.items():
            time, took[f"seed {seed}, {name}"] = step.planned(**limit)
            times.append(time)
        time, larger, capped, looser = times
        worse = {
            "a budget larger by a quarter": larger - time,
            "a cap on a rank's tokens looser by a quarter": looser - capped,
            "beside Karmarkar-Karp of equal counts": time - step.karmarkar_karp(),
            "beside LPT under the budget": time - step.lpt(),
        }
        for name, by in worse.items():
            if math.isfinite(by):
                points.setdefault(name, []).append(by)
    slowest = max(took, key=lambda name: took[name])
    times_of = Times(len(took), 1e3 * fmean(took.values()), 1e3 * took[slowest], slowest)
    return [Row.of(name, found) for name, found in points.items()], times_of


def small_steps(cases: int) -> Iterator[Row]:
    """Five to eight samples beside the best of all splits into as many micro-batches."""
    limits = {
        "beside the best split under a budget": ("budget", Sync.MICRO_STEP),
        "beside the best split of a fixed size": ("size", Sync.MICRO_STEP),
        "beside the best split once a step": ("size", Sync.STEP),
    }
    for name, (limit, sync) in limits.items():
        points = []
        for seed in range(cases):
            rng = np.random.default_rng(seed)
            drawn = rng.lognormal(8, 0.8, int(rng.integers(5, 9)))
            tokens = np.clip(drawn, 16, 65536).astype(np.int64)
            ranks = int(rng.integers(2, 4))
            most = int(tokens.max() * rng.uniform(1, 3)) if limit == "budget" else 0
            size = 0 if limit == "budget" else int(rng.integers(1, 4))
            config = PlanConfig(
                dp_size=ranks, dispatch_batch_size=len(tokens), cost=COST, sync=sync,
                grouping=Grouping.IGNORE, micro_batch_size=size or None,
                micro_batch_tokens=most or None,
            )  # fmt: skip
            found = plan(window_of(tokens), config, len(tokens))
            step = Step(tokens, config)
            best = min(map(step.time, all_splits(tokens, found.num_micro_batches, config)))
            points.append(step.time(found.cost) - best)
        yield Row.of(name, points)


def all_splits(tokens: IntArray, M: int, config: PlanConfig) -> Iterator[FloatArray]:  # noqa: N803
    """Costs [R, M] of every legal split: as in plans, no micro-batch is empty if none has to be.

    Where ranks meet once a step a rank is one micro-batch of M times the samples.
    """
    bins, each = config.dp_size * M, 1
    if config.sync is Sync.STEP:
        bins, each = config.dp_size, M
    least = each if len(tokens) >= config.dp_size * M else 0
    room = each * (config.micro_batch_size or len(tokens))
    budget = config.micro_batch_tokens or int(tokens.sum())
    work = COST(tokens)
    cost, held, count = np.zeros(bins), np.zeros(bins), np.zeros(bins)

    def place(at: int, used: int) -> Iterator[FloatArray]:
        if at == len(tokens):
            if count.min() >= least:
                even = -np.sort(-cost).reshape(-1, config.dp_size).T
                yield np.pad(even, ((0, 0), (0, M - even.shape[1])))
            return
        for into in range(min(used + 1, bins)):
            if held[into] + tokens[at] > budget or count[into] == room:
                continue
            change = (work[at], tokens[at], 1)
            for what, by in zip((cost, held, count), change, strict=True):
                what[into] += by
            yield from place(at + 1, max(used, into + 1))
            for what, by in zip((cost, held, count), change, strict=True):
                what[into] -= by

    return place(0, 0)


def printed(rows: "Iterable[Row | Windows]") -> list[dict[str, object]]:
    """Each as it comes, and as it is written."""
    found = []
    for row in rows:
        print(line(row), flush=True)
        found.append(asdict(row))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", type=int, default=2500, help="random steps, of four plans each")
    parser.add_argument("--small", type=int, default=200, help="small steps of each limit")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    rows, times = random_steps(given.cases)
    found = {"steps": printed(rows) + printed(small_steps(given.small)), "times": asdict(times)}
    print(
        f"{times.plans} plans: {times.mean:.1f} ms in the mean, {times.worst:.0f} the slowest, "
        f"of {times.slowest}",
        flush=True,
    )
    found["windows"] = printed(windows(given.steps, given.seeds))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def line(row: Row | Windows) -> str:
    """As it is printed."""
    if isinstance(row, Row):
        return (
            f"{row.what:48} {row.cases:5} cases  mean {row.mean:+7.3f}  worst {row.worst:+7.2f}  "
            f"{row.worse:4} worse"
        )
    excess = " / ".join(f"{each:.2f}" for each in row.excess)
    return (
        f"{row.lengths:32} {row.sync:10} {excess} %  "
        f"rises by {row.mean_rise:+.2f}, {row.worst_rise:+.2f} at worst"
    )


if __name__ == "__main__":
    main()
