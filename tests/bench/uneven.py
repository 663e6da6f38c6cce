"""One rank of four is 1.5 times as slow, and in mid-run another: what ranks wait for it.

    python -m tests.bench.uneven [--rounds 3] [--json FILE]

Real torchrun ranks that sleep what their tokens cost, as four do not compute on two cores: DDP,
where they meet once a step, and FSDP2, where they meet at every micro-batch. Beside each other: a
cost that was asked for, by which ranks count as alike; the default, which measures their speed; and
the noise of the machine, the same work on ranks that are alike. Waiting is the share of the ranks'
time by clocks round their work, of the last ten steps before the change and of the run.
"known" is what plans of the same lengths wait that are told the speeds.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rollout_planner import Quadratic, plan
from rollout_planner.types import Grouping, PlanConfig, Sync
from tests.bench.rows import command
from tests.support.uneven import BATCH, BUDGET, CHANGE, RANKS, SLOW, STEPS, lost, run, samples
from tests.support.windows import window_of

LAST = 10


@dataclass(frozen=True, slots=True)
class Row:
    """Shares of the ranks' time that are lost to waiting, in percent, medians of the rounds.

    known: of plans that know the speeds. load: of the machine, processes that want to run, mean.
    """

    model: str
    arm: str
    first_steps: float
    before_change: float
    after_change: float
    known: float
    load: float


#: Name -> cost, and what is not as in the others.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "speeds not asked for": ("tokens", {}),
    "measured": ("auto", {}),
    "noise: the same work": ("tokens", {"slow": 1.0, "alike": True}),
}


def measure(rounds: int) -> Iterator[Row]:
    """A row a model and arm."""
    for model in ("ddp", "fsdp2"):
        found = {name: list[tuple[float, ...]]() for name in ARMS}
        for _ in range(rounds):
            for name, (cost, options) in ARMS.items():
                with tempfile.TemporaryDirectory() as folder:
                    steps = run(Path(folder), model, cost, **options)
                spans = steps[:5], steps[CHANGE - LAST : CHANGE], steps[STEPS - LAST :]
                lost_of = (100 * lost(span, model) for span in spans)
                found[name].append((*lost_of, os.getloadavg()[0]))
        for name, each in found.items():
            first, before, after, load = map(median, zip(*each, strict=True))
            yield Row(model, name, first, before, after, _known(model), load)


def _known(model: str) -> float:
    """What plans wait that know the speeds, of batches of the same lengths as they come."""
    lengths = [len(sample.fields["input_ids"]) for sample in samples().values()]
    config = PlanConfig(
        RANKS, BATCH, Quadratic(0, 1), micro_batch_tokens=BUDGET, grouping=Grouping.IGNORE,
        sync=Sync.STEP if model == "ddp" else Sync.MICRO_STEP,
        slowness=(1.0, SLOW, *[1.0] * (RANKS - 2)),
    )  # fmt: skip
    window, excess = int(1.5 * BATCH), []
    waiting: Any = np.array(lengths[:window])
    for start in range(window, len(lengths) - BATCH, BATCH):
        found = plan(window_of(waiting), config, BATCH)
        excess.append(found.excess)
        waiting = np.append(np.delete(waiting, found.chosen), lengths[start : start + BATCH])
    mean = float(np.mean(excess))
    return 100 * mean / (1 + mean)


def line(row: Row) -> str:
    """As it is printed."""
    return (
        f"{row.model:6}{row.arm:21} first five steps {row.first_steps:5.2f} %, before the change "
        f"{row.before_change:5.2f} %, behind it {row.after_change:5.2f} %; speeds known "
        f"{row.known:.2f} %, load {row.load:.1f}"
    )


if __name__ == "__main__":
    command(__doc__, measure, line, rounds=3)
