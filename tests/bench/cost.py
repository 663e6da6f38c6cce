"""What plans lose while their cost is fitted: real lengths, and models whose FLOPs are known.

    python -m tests.bench.cost [--steps 100] [--seeds 5] [--traces NAME ...] [--json FILE]

A micro-batch takes what the model's FLOPs say, and 4 % of a full one to begin; each reports that
with 5 % of noise, and one in a hundred five times as long. Beside each other: plans with the
default cost for good, with a cost that adapts, and with the model's own. Excess is that of true
times, in percent, without the noise, over five steps after so many.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout_dispatcher.core.measuring.cost_in_use import CostConfig, CostInUse, Timing
from rollout_planner.cost import Quadratic, transformer_cost
from rollout_planner.planner import plan
from rollout_planner.types import (
    CostModel,
    FloatArray,
    Grouping,
    IntArray,
    Oversize,
    PlanConfig,
    Sync,
    Window,
    straggler_excess,
    summed,
)
from tests.bench.cells import TRACES, read_trace
from tests.bench.rows import report

#: Trace, and tokens of a micro-batch's budget.
SIZES = {
    "lineage_open_reasoning": 131072,
    "reasoning_gym_rlvr_g3": 16384,
    "deepseek_r1_arc_g2": 65536,
    "azure2023_code": 16384,
    "azure2023_conv": 32768,
    "tau_airline_agent_g4": 32768,
}
#: Hidden size, layers, heads, key/value heads, MLP: as their published config.json have them.
_DENSE = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648),
}
_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size",
)  # fmt: skip
_VOCABULARY = {"vocab_size": 151936, "model_type": "qwen2"}
_EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
MODELS = {
    name: dict(zip(_KEYS, numbers, strict=True)) | _VOCABULARY for name, numbers in _DENSE.items()
} | {
    "Qwen3-30B-A3B": dict(zip(_KEYS, (2048, 48, 32, 4, 6144), strict=True))
    | _VOCABULARY
    | _EXPERTS
    | {"moe_intermediate_size": 768}
}
BATCH, RANKS, WINDOW = 256, 16, 1.25
NOISE, FAR, BEGIN = 0.05, 0.01, 0.04
AFTER = (5, 20, 95)


@dataclass(frozen=True, slots=True)
class Row:
    """Mean excess in percent after `AFTER` steps. fits: taken, mean of seeds. ratio: b over a of
    the first seed's last. error: standard error over seeds of what adapting adds.
    """

    lengths: str
    model: str
    believed: tuple[float, ...]
    adapting: tuple[float, ...]
    known: tuple[float, ...]
    fits: float
    ratio: float
    error: tuple[float, ...]


class Run:
    """Steps of one trace, planned by one cost; adapting: until a fit is better."""

    def __init__(self, trace: IntArray, budget: int, truth: CostModel, seed: int) -> None:
        self._trace, self._budget, self._truth = trace, budget, truth
        self._arrivals, self._noise = (np.random.default_rng((seed, at)) for at in range(2))
        self._tokens = self._arrivals.choice(trace, int(WINDOW * BATCH))
        self._skips = np.zeros(len(self._tokens), np.int64)
        self._begin = BEGIN * budget * float(truth(trace).sum()) / float(trace.sum())
        self.cost = CostInUse(CostConfig(Quadratic(), adapts=True))

    def step(self, cost: CostModel, *, number: int = 0) -> float:
        """Plan one, train it, tell what it took; returns its excess, in percent."""
        window = Window(
            self._tokens, self._skips, np.full(len(self._tokens), -1),
            np.zeros(len(self._tokens), np.bool_),
        )  # fmt: skip
        config = PlanConfig(
            dp_size=RANKS, dispatch_batch_size=BATCH, cost=cost, grouping=Grouping.IGNORE,
            oversize=Oversize.ALONE, max_skips=8, micro_batch_tokens=self._budget,
        )  # fmt: skip
        found = plan(window, config, BATCH)
        tokens = self._tokens[found.chosen]
        took = summed(self._truth(tokens), found.counts) + self._begin * (found.counts > 0)
        self._report(number, found.cost, took, tokens, found.counts)
        stay = np.ones(len(self._tokens), np.bool_)
        stay[found.chosen] = False
        new = self._arrivals.choice(self._trace, int(WINDOW * BATCH) - int(stay.sum()))
        self._tokens = np.concatenate((self._tokens[stay], new))
        self._skips = np.concatenate((self._skips[stay] + 1, np.zeros(len(new), np.int64)))
        return 100 * straggler_excess(took, Sync.MICRO_STEP)

    def _report(
        self, number: int, planned: FloatArray, took: FloatArray, tokens: IntArray, counts: IntArray
    ) -> None:
        noisy = took * np.exp(NOISE * self._noise.standard_normal(took.shape))
        noisy *= np.where(self._noise.random(took.shape) < FAR, 5, 1)
        ones = np.ones(RANKS)
        step = Timing(self.cost.work(tokens, counts), planned, noisy, ones, ones, Sync.MICRO_STEP)
        self.cost.measured(step, number + 1)


def measure(steps: int, seeds: int, traces: list[str]) -> Iterator[Row]:
    """A row a trace and model."""
    for name in traces:
        path = TRACES / f"{name}.csv.gz"
        if not path.exists():
            print(f"{name} skipped: the trace is not here")
            continue
        trace = read_trace(path)
        for model, config in MODELS.items():
            truth = transformer_cost(config)
            excess, fitted = np.zeros((3, seeds, steps)), [CostInUse(CostConfig())] * seeds
            for seed in range(seeds):
                runs = [Run(trace, SIZES[name], truth, seed) for _ in range(3)]
                for number in range(steps):
                    adapted = runs[1].cost.fitted_cost
                    excess[:, seed, number] = (
                        runs[0].step(Quadratic(), number=number),
                        runs[1].step(adapted or Quadratic(), number=number),
                        runs[2].step(truth, number=number),
                    )
                fitted[seed] = runs[1].cost
            after = [at for at in AFTER if at < steps]
            of_seeds = np.array([excess[:, :, at : at + 5].mean(axis=2) for at in after])
            means = of_seeds.mean(axis=2).T.tolist()
            error = (of_seeds[:, 1] - of_seeds[:, 0]).std(axis=1) / max(seeds - 1, 1) ** 0.5
            last = fitted[0].fitted_cost or Quadratic()
            taken = [0 if one.fitted is None else one.fitted.version for one in fitted]
            believed, adapting, known = map(tuple, means)
            ratio = last.b / max(last.a, 1e-300)
            fits = float(np.mean(taken))
            yield Row(name, model, believed, adapting, known, fits, ratio, tuple(error.tolist()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--traces", nargs="*", default=[*SIZES])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    report(measure(given.steps, given.seeds, given.traces), line, given.json)


def line(row: Row) -> str:
    """As it is printed."""
    columns = (row.believed, row.adapting, row.known)
    after = "  ".join(" ".join(f"{each:6.2f}" for each in at) for at in zip(*columns, strict=True))
    return f"{row.lengths:24} {row.model:14} {after}  {row.fits:4.1f} fits, ratio {row.ratio:8.0f}"


if __name__ == "__main__":
    main()
