"""Runs `ranks.py`, and what is to be read from what it wrote."""

import json
import os
import subprocess
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from tests.support.source import PYTHONPATH, ROOT
from tests.support.torchrun import torchrun_command

SCRIPT = Path(__file__).parent / "ranks.py"


class Run(NamedTuple):
    """By rank, what was seen of each step."""

    ranks: list[list[dict[str, Any]]]

    def table(self, of: str) -> list[list[list[float]]]:
        """Seconds by step, rank and micro-batch: `spent` by the script's clocks, or `computed`."""
        steps = zip(*self.ranks, strict=True)
        return [
            _computed(step) if of == "computed" else [r["spent_s"] for r in step] for step in steps
        ]

    def lost(self, of: str, *, each_micro_step: bool) -> float:
        """The share of ranks' time in which they wait for the slowest of them."""
        paid = needed = 0.0
        for by_rank in self.table(of):
            if each_micro_step:
                paid += sum(map(max, zip(*by_rank, strict=True)))
            else:
                paid += max(map(sum, by_rank))
            needed += fmean(map(sum, by_rank))
        return 1 - needed / paid

    def rank_s(self, of: str) -> list[float]:
        """Seconds of each rank in the median step: one step may hold a pause of the machine's."""
        return [median(map(sum, steps)) for steps in zip(*self.table(of), strict=True)]


def _computed(step: tuple[dict[str, Any], ...]) -> list[list[float]]:
    """As the dispatcher makes it of what ranks tell."""
    return [
        [busy - blocked for busy, blocked in zip(r["busy_s"], r["collective_s"], strict=True)]
        for r in step
    ]


def run(folder: Path, ranks: int, *options: str) -> dict[str, Run]:
    """Run it to its end: what was seen, by model."""
    done = subprocess.run(
        [*torchrun_command(ranks, folder), str(SCRIPT), "--out", str(folder), *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    models = {path.name.partition(".")[0] for path in folder.glob("*.jsonl")}
    return {model: Run([_read(folder, model, rank) for rank in range(ranks)]) for model in models}


def _read(folder: Path, model: str, rank: int) -> list[dict[str, Any]]:
    lines = (folder / f"{model}.rank{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
