"""A real run from a wrong cost: whether fitting it while it runs brings the waiting down.

    python -m tests.bench.fitted [--steps 60] [--rounds 2] [--json FILE]

The demo's trainer on two torchrun ranks, the same samples with each cost: the default for good, the
default until a fit is better, and what the demo has measured of single samples beforehand. Beside
them the noise of the machine: samples of one length, so that both ranks compute the same. Figures
are of processor seconds of the steps after the first twenty, medians of the rounds.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from rollout_dispatcher.cli.demo.command import (
    Load,
    Progress,
    calibrate,
    child_environment,
    make_load,
    train,
)
from rollout_planner.types import Strategy
from tests.bench.rows import command

DEFAULT = "quadratic:1,24576,0"
#: Steps that are left out: until then a fit is found.
LEARNT = 20
#: Seconds: for as many steps as a demo may have.
LONG = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """Mean imbalance of steps in percent: what ranks computed, largest over mean, less one.

    rounds: of each. early: of the first twenty steps, median.
    """

    cost: str
    imbalance: float
    early: float
    rounds: tuple[float, ...]


def measure(steps: int, rounds: int) -> Iterator[Row]:
    """A row a cost."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environ = child_environment()
        timings = calibrate(folder, environ)
        load = make_load("lineage", 0, LONG, timings)
        load = replace(load, lengths=load.lengths[: steps * load.batch])
        even = [round(fmean(load.lengths))] * len(load.lengths)
        arms = {
            f"{DEFAULT} for good": replace(load, cost=DEFAULT),
            f"auto, beginning with {DEFAULT}": replace(load, cost="auto"),
            f"{load.cost}, measured before": load,
            "the same work on both ranks": replace(load, lengths=even),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, arm in arms.items():
                found[name].append(_imbalance(arm, folder, environ))
        for name, each in found.items():
            early, late = zip(*each, strict=True)
            yield Row(name, median(late), median(early), tuple(late))


def _imbalance(load: Load, folder: Path, environ: dict[str, str]) -> tuple[float, float]:
    """Of the first steps and of the others, in percent."""
    train([Strategy.WINDOW], load, folder, environ, Progress(sys.stderr))
    ranks = [
        [json.loads(line)["cpu_s"] for line in path.read_text().splitlines()]
        for path in sorted((folder / Strategy.WINDOW).glob("rank*.jsonl"))
    ]
    each = [100 * (max(times) / fmean(times) - 1) for times in zip(*ranks, strict=True)]
    return fmean(each[:LEARNT]), fmean(each[LEARNT:])


def line(row: Row) -> str:
    """As it is printed."""
    rounds = " ".join(f"{each:.2f}" for each in row.rounds)
    return f"{row.cost:42} {row.imbalance:6.2f} %  (first {LEARNT}: {row.early:.2f} %; {rounds})"


if __name__ == "__main__":
    command(__doc__, measure, line, steps=60, rounds=2)
