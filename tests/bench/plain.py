"""Our selection beside the plain column DP, over the same samples: ranks meet at every micro-step.

    python -m tests.bench.plain [--steps 100] [--seeds 3] [--json FILE]

Plain is the DP of candidates.py with nothing around it: the oldest; then the DP, at three prices
of skips that lead or lag their share, with a penalty that grows with the square of the age, until
the step waits no more than 1 %; of these the one that waits least. No samples gather company, and
there is no debt. Each window is refilled before each dispatch, and epochs are
permutations.

Printed is the straggler excess in %, and in brackets the Kolmogorov-Smirnov distance of the lengths
of 20 dispatches over that of what arrived; the median over seeds of either.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np

from rollout_dispatcher.simulate.figures import selection_bias
from rollout_planner.order import by_falling_tokens
from rollout_planner.planner import plan
from rollout_planner.selection import tightest
from rollout_planner.types import FloatArray, IntArray, PlanConfig, Strategy, Window
from tests.bench.cells import Cell, lengths_of, stream, those_here
from tests.bench.planner import WARM_UP, Totals, refilled

#: A window and a config to the positions that leave.
Choose = Callable[[Window, PlanConfig], IntArray]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one way to choose gives: excess as a ratio, distance over that of what arrived."""

    excess: float
    distance: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    lengths: str
    window: float
    plain: Choice
    ours: Choice


_PLAN = {"micro_batch_size": 1}
CELLS = tuple(
    Cell(f"{name} {batch}/{ranks}", batch, ranks, multiple, lengths, _PLAN)
    for name, lengths, sizes in (
        ("lognormal", "lognormal", ((1024, 64),)),
        ("lineage", "lineage_open_reasoning", ((256, 16), (1024, 64), (512, 64))),
        ("reasoning_gym", "reasoning_gym_rlvr_g3", ((256, 16), (1024, 64))),
        ("azure_conv", "azure2023_conv", ((1024, 64),)),
    )
    for batch, ranks in sizes
    for multiple in (1.25, 2.0)
)
_PRICES, _GOOD_ENOUGH = (100.0, 30.0, 10.0), 0.01


def ours(window: Window, config: PlanConfig) -> IntArray:
    """What the planner chooses."""
    return plan(window, config).chosen


def plain(window: Window, config: PlanConfig) -> IntArray:
    """What the column DP alone chooses."""
    take, ranks = config.dispatch_batch_size, config.dp_size
    order = by_falling_tokens(window.tokens)
    x, age = config.cost(window.tokens)[order], window.skips[order] / config.max_skips
    forced = window.skips[order] >= config.max_skips
    penalty = x.mean() * (np.minimum(age, 1.0) ** 2 + 1000.0 * forced)
    best = order < take  # the oldest
    least = _waits(x[best], ranks)
    for price in _PRICES:
        if least <= _GOOD_ENOUGH:
            break
        keep = np.zeros(len(order), dtype=bool)
        keep[tightest(x, penalty, take, ranks, price)] = True
        if _waits(x[keep], ranks) < least:
            best, least = keep, _waits(x[keep], ranks)
    return np.sort(order[best])


def _waits(x: FloatArray, ranks: int) -> float:
    """Straggler excess of sorted columns of falling `x`."""
    return float(ranks * x[::ranks].sum() / x.sum()) - 1


def measure(cell: Cell, choose: Choose, seed: int, steps: int) -> tuple[float, float]:
    """Straggler excess, and the distance of lengths over that of what arrived."""
    config, total, left = cell.config(Strategy.WINDOW), Totals(), []
    decided = refilled(cell, cell.window, seed, lambda it: choose(it, config), lambda it: it)
    for window, chosen in islice(decided, WARM_UP, WARM_UP + steps):
        left.append(window.tokens[chosen])
        x = np.sort(config.cost(left[-1]))[::-1]
        total.add(_waits(x, cell.dp_size), float(x.sum()) / cell.dp_size)
    count = cell.window + (WARM_UP + steps - 1) * cell.batch
    arrived = np.fromiter(islice(stream(cell, seed), count), np.int64)
    every = lengths_of(cell)
    ks, by_chance = selection_bias(
        arrived if every is None else every, left, arrived, WARM_UP * cell.batch
    )
    return total.excess, ks / by_chance


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100, help="twice as many for reasoning_gym")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    found = []
    print(HEADING)
    for cell in those_here(CELLS):
        steps = given.steps * (2 if cell.lengths.startswith("reasoning_gym") else 1)
        columns = [_column(cell, choose, given.seeds, steps) for choose in (plain, ours)]
        found.append(Row(cell.name, cell.window_multiple, *columns))
        print(line(found[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")


HEADING = f"{'lengths':24} {'window':>6} {'plain %':>16} {'ours %':>16}"


def line(row: Row) -> str:
    """A row as it is printed."""
    both = (f"{100 * one.excess:9.2f} ({one.distance:.2f})" for one in (row.plain, row.ours))
    return f"{row.lengths:24} {row.window:6g} " + " ".join(both)


def _column(cell: Cell, choose: Choose, seeds: int, steps: int) -> Choice:
    runs = [measure(cell, choose, seed, steps) for seed in range(1, seeds + 1)]
    excess, distance = (median(figures) for figures in zip(*runs, strict=True))
    return Choice(excess, distance)


if __name__ == "__main__":
    main()
