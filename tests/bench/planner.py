"""Times planning and measures plans, beside verl's Karmarkar-Karp, greedy and the lower bound.

    python -m tests.bench.planner [--runs 15] [--steps 40] [--cell NAME ...] [--json FILE]

Planning is timed on windows of the steady state, alternating with verl's function on the oldest
batch of the same window; medians. Excess is the ratio of sums over the steps, and each strategy
has its own stream of the same lengths.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from rollout_planner import karmarkar_karp
from rollout_planner.planner import plan
from rollout_planner.types import (
    FloatArray,
    IntArray,
    Plan,
    Strategy,
    Sync,
    Window,
    straggler_excess,
)
from tests.bench.cells import CELLS, Cell, stream, those_here
from tests.peers.adapters.verl import KarmarkarKarp, load_karmarkar_karp

#: What is decided on a window.
T = TypeVar("T")

#: Beyond this, one call of the peer takes so long that it is measured once.
SLOW_SECONDS = 2.0
#: Steps before the window has aged: more than max_skips.
WARM_UP = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; excess as a ratio, times in milliseconds, None if not measured."""

    cell: str
    window_ms: float | None
    verl_kk_ms: float | None
    window_excess: float
    verl_kk_excess: float | None
    greedy_excess: float
    fifo_excess: float
    bound_excess: float


@dataclass(frozen=True, slots=True)
class Unequal:
    """Milliseconds to divide 8192 items into 512 sets of any count, None if not measured."""

    ms: float
    verl_ms: float | None


@dataclass(slots=True)
class Totals:
    """Sums over steps: time that ranks need together, and total cost / R."""

    time: float = 0.0
    work: float = 0.0

    def add(self, excess: float, work: float) -> None:
        """Count a step of this straggler excess and this cost per rank."""
        self.time += (1 + excess) * work
        self.work += work

    @property
    def excess(self) -> float:
        """Ratio of the sums, minus one."""
        return self.time / self.work - 1


def steady(
    cell: Cell, strategy: Strategy, seed: int, samples: int | None = None
) -> Iterator[tuple[Window, Plan]]:
    """Windows of the steady state and their plans, see `refilled`."""
    size = cell.window if strategy is Strategy.WINDOW else cell.batch
    config = cell.config(strategy)

    def decide(window: Window) -> Plan:
        return plan(window, config)

    return refilled(cell, size, seed, decide, lambda made: made.chosen, samples=samples)


def refilled(
    cell: Cell,
    size: int,
    seed: int,
    decide: Callable[[Window], T],
    chosen: Callable[[T], IntArray],
    *,
    samples: int | None = None,
) -> Iterator[tuple[Window, T]]:
    """Windows of `size` samples and what is decided on each; `chosen` leave.

    Without end, or until the last of so many samples has left.
    """
    lengths = islice(stream(cell, seed), samples)
    tokens, skips = np.zeros(0, np.int64), np.zeros(0, np.int64)
    while True:
        fresh = np.fromiter(islice(lengths, size - len(tokens)), np.int64)
        tokens = np.concatenate([tokens, fresh])
        skips = np.concatenate([skips, np.zeros(len(fresh), np.int64)])
        if not (held := len(tokens)):
            return
        window = Window(tokens, skips, np.full(held, -1), np.zeros(held, np.bool_))
        answer = decide(window)
        yield window, answer
        left = np.delete(np.arange(held), chosen(answer))
        tokens, skips = tokens[left], skips[left] + 1


def measure(cell: Cell, peer: KarmarkarKarp | None, steps: int, runs: int) -> Row:
    """One row: quality over `steps`, times over `runs`."""
    ours, fifo, bound = Totals(), Totals(), Totals()
    windows: list[Window] = []
    for window, answer in islice(steady(cell, Strategy.WINDOW, 1), WARM_UP, WARM_UP + steps):
        windows.append(window)
        work = float(answer.cost.sum()) / cell.dp_size
        ours.add(answer.excess, work)
        bound.add(max(0.0, answer.lower_bound / work - 1), work)
    greedy = Totals()
    for _, answer in islice(steady(cell, Strategy.GREEDY, 1), steps):
        work = float(answer.cost.sum()) / cell.dp_size
        greedy.add(answer.excess, work)
        fifo.add(answer.fifo_excess, work)
    window_ms, verl_ms = time_both(cell, peer, windows, runs)
    return Row(
        cell=cell.name,
        window_ms=window_ms,
        verl_kk_ms=verl_ms,
        window_excess=ours.excess,
        verl_kk_excess=kk_excess(cell, peer, min(steps, 10)),
        greedy_excess=greedy.excess,
        fifo_excess=fifo.excess,
        bound_excess=bound.excess,
    )


def time_both(
    cell: Cell, peer: KarmarkarKarp | None, windows: list[Window], runs: int
) -> tuple[float, float | None]:
    """Median milliseconds of our whole plan and of the peer's partition alone, alternating."""
    config = cell.config(Strategy.WINDOW)
    ours: list[float] = []
    theirs: list[float] = []
    for run in range(runs):
        window = windows[run % len(windows)]
        ours.append(timed(lambda w=window: plan(w, config)))  # type: ignore[misc]
        if peer is not None and (not theirs or theirs[0] < SLOW_SECONDS * 1e3):
            costs = config.cost(window.tokens[: cell.batch]).tolist()
            theirs.append(timed(lambda c=costs: peer(c, cell.dp_size, True)))  # type: ignore[misc]
    return median(ours), median(theirs) if theirs else None


def timed(call: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def kk_excess(cell: Cell, peer: KarmarkarKarp | None, steps: int) -> float | None:
    """Straggler excess of verl's equal-size partition, micro-batches sorted inside each rank.

    Only for a fixed number of samples a micro-batch, packed, where its partition says all.
    """
    size = cell.plan.get("micro_batch_size")
    if peer is None or size is None or "layout" in cell.plan:
        return None
    totals, lengths = Totals(), stream(cell, 1)
    for _ in range(steps):
        tokens = np.fromiter(islice(lengths, cell.batch), np.int64)
        cost = cell.config(Strategy.KK).cost(tokens)
        parts = peer(cost.tolist(), cell.dp_size, True)
        matrix = np.array([_micro_batches(cost[part], size) for part in parts])
        excess = straggler_excess(matrix, cell.plan.get("sync", Sync.MICRO_STEP))
        totals.add(excess, float(cost.sum()) / cell.dp_size)
    return totals.excess


def _micro_batches(cost: FloatArray, size: int) -> FloatArray:
    descending = np.sort(cost)[::-1]
    sums: FloatArray = descending.reshape(-1, size).sum(axis=1)
    return sums


def unequal(peer: KarmarkarKarp | None) -> Unequal:
    """The case where naive differencing is slowest: many sets, counts free."""
    rng = np.random.default_rng(0)
    values = rng.lognormal(9, 1, 8192).astype(np.int64).tolist()
    ours = median(timed(lambda: karmarkar_karp(values, 512, False)) for _ in range(5))
    return Unequal(ours, None if peer is None else timed(lambda: peer(values, 512, False)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15, help="timed runs a cell")
    parser.add_argument("--steps", type=int, default=40, help="steps of the steady state")
    parser.add_argument("--cell", nargs="*", help="only these cells")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    peer = load_karmarkar_karp()
    if peer is None:
        print("verl is not in build/bench/peers: its columns are empty; `make bench` fetches it")
    print(HEADING)
    rows = []
    for cell in those_here(cell for cell in CELLS if not args.cell or cell.name in args.cell):
        rows.append(measure(cell, peer, args.steps, args.runs))
        print(line(rows[-1]), flush=True)
    alone = unequal(peer)
    print(unequal_line(alone))
    if args.json is not None:
        found = {"cells": [asdict(row) for row in rows], "unequal": asdict(alone)}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=2) + "\n")


HEADING = (
    f"{'cell':30} {'ms':>7} {'verl ms':>9} | excess % {'ours':>6} {'verl':>7} {'greedy':>7}"
    f" {'fifo':>7} {'bound':>7}"
)


def unequal_line(found: Unequal) -> str:
    """The last line of what is printed."""
    said = f"unequal KK, 8192 items into 512 sets: {found.ms:.1f} ms"
    if found.verl_ms is None:
        return said
    times = found.verl_ms / found.ms
    return f"{said}, verl {found.verl_ms:.0f} ms, {times:.0f} times as long"


def line(row: Row) -> str:
    """A row as it is printed."""
    ms = "-" if row.window_ms is None else f"{row.window_ms:.2f}"
    verl_ms = "-" if row.verl_kk_ms is None else f"{row.verl_kk_ms:.1f}"
    verl = "-" if row.verl_kk_excess is None else f"{100 * row.verl_kk_excess:.2f}"
    return (
        f"{row.cell:30} {ms:>7} {verl_ms:>9} |          "
        f"{100 * row.window_excess:6.2f} {verl:>7} {100 * row.greedy_excess:7.2f} "
        f"{100 * row.fifo_excess:7.2f} {100 * row.bound_excess:7.2f}"
    )


if __name__ == "__main__":
    main()
