"""Training with each way to balance: same model, samples, packing and token budget.

    python -m tests.bench.training [--repetitions 5] [--seconds 12] [--json FILE]

Two torchrun ranks under DDP on CPU, lengths of real reasoning rollouts. Rows take turns step by
step, so that whatever else the machine does slows all of them alike; a repetition has samples of
its own, and figures are medians over repetitions. Rows of the cases in which nothing is to be
gained have the case before their name.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout_dispatcher.cli.demo.command import RANKS, Timings, calibrate, make_load
from rollout_dispatcher.cli.demo.processes import signals_unwind
from tests.bench.training.cases import COMPARED, Case, measure
from tests.bench.training.orders import Work
from tests.bench.training.rows import Measured, line, medians
from tests.support.source import PYTHONPATH

#: Tokens of a micro-batch: the longest samples, of 6.4 times the mean 1000, fit.
BUDGET = 8192
#: Samples arrive at this share of the rate at which the dataloader's row trains on them.
GENERATION_SHARE = 0.5
#: The cases without a gain need fewer samples.
SHORTER = 2
PROFILE = "lineage"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="training time of a row")
    parser.add_argument("--steps", type=int, help="no more steps than these")
    parser.add_argument("--json", type=Path, default=Path("build/bench/training.json"))
    given = parser.parse_args()
    repetitions: list[dict[str, Measured]] = []
    with signals_unwind(), TemporaryDirectory() as scratch:
        timings = calibrate(Path(scratch), os.environ | {"PYTHONPATH": PYTHONPATH})
        for seed in range(given.repetitions):
            work = make_work(timings, seed, given.seconds, given.steps)
            repetitions.append(repetition(work, Path(scratch, str(seed))))
            for row in medians(repetitions[-1:]):
                print(f"{seed}: {line(row)}", flush=True)
    rows = medians(repetitions)
    print(*map(line, rows), sep="\n")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def make_work(timings: Timings, seed: int, seconds: float, steps: int | None) -> Work:
    """Samples that train in about so many seconds, but no more than so many steps."""
    load = make_load(PROFILE, seed, seconds, timings)
    lengths = load.lengths[: (steps or load.steps) * load.batch]
    return Work(lengths, load.batch, RANKS, BUDGET, load.cost, seed)


def repetition(work: Work, folder: Path) -> dict[str, Measured]:
    """All cases over the same samples."""
    found = measure(Case("", COMPARED), work, folder / "compared")
    some = replace(work, lengths=work.lengths[: len(work.lengths) // SHORTER])
    alone = replace(some, batch=work.ranks)
    found |= measure(
        Case("one-sample-a-rank", ("dataloader", "ours-window-1", "ours")), alone, folder / "alone"
    )
    mean = sum(work.lengths) / len(work.lengths)
    rate = GENERATION_SHARE * found["dataloader"].tokens_per_second / mean
    for row in ("dataloader", "ours"):  # each alone: who waits for samples waits for the clock
        case = Case("generation-bound", (row,), rate)
        found |= measure(case, some, folder / f"bound-{row}")
    return found


if __name__ == "__main__":
    main()
