"""Groups of real lengths, and the way that others share them out over ranks."""

import numpy as np

from rollout_planner import Quadratic, karmarkar_karp
from rollout_planner.types import FloatArray, IntArray, Window
from tests.bench.cells import TRACES, read_trace

LOGNORMAL = "lognormal"
_BUDGETS = {
    "deepseek_r1_arc_g2": 32768,
    "lineage_open_reasoning": 131072,
    "reasoning_gym_rlvr_g3": 16384,
    "azure2023_conv": 32768,
    LOGNORMAL: 131072,
}
#: Lengths of each kind that there are here, and the token budget that suits them.
KINDS = {
    kind: budget
    for kind, budget in _BUDGETS.items()
    if kind == LOGNORMAL or (TRACES / f"{kind}.csv.gz").exists()
}


def window_of(lengths: IntArray) -> Window:
    """A window of lengths int[groups, size], one group after the other."""
    n = lengths.size
    group = np.repeat(np.arange(len(lengths)), lengths.shape[1])
    none = np.zeros(n, dtype=np.int64)
    return Window(lengths.ravel().astype(np.int64), none, group, none > 0)


def lengths_of(kind: str, groups: int, size: int) -> IntArray:
    """Lengths of groups as neighbours in a trace, or of lognormal prompts."""
    generator = np.random.default_rng(1)
    found: IntArray
    if kind == LOGNORMAL:
        prompt = generator.lognormal(np.log(8192), 0.6, (groups, 1))
        drawn = prompt * generator.lognormal(0, 0.5, (groups, size))
        return np.clip(drawn, 16, 65536).astype(np.int64)
    rows = np.maximum(read_trace(TRACES / f"{kind}.csv.gz"), 1)
    first = generator.integers(0, len(rows) // size, groups) * size
    found = rows[first[:, None] + np.arange(size)]
    return found


def by_sums(lengths: IntArray, dp_size: int) -> list[IntArray]:
    """Samples of each rank when equal-count KK shares out the sums of groups, as verl does."""
    work = (lengths**2 + 24576 * lengths).sum(axis=1)
    parts = karmarkar_karp(work, dp_size, equal_size=True)
    place = np.arange(lengths.size).reshape(lengths.shape)
    return [place[sorted(part)].ravel() for part in parts]


def cut_by_count(lengths: IntArray, dp_size: int, m: int) -> FloatArray:
    """Costs of runs of m of each rank's samples, dearest first."""
    x = Quadratic()(lengths.ravel())
    runs = [x[np.sort(rank)].reshape(-1, m).sum(axis=1) for rank in by_sums(lengths, dp_size)]
    return -np.sort(-np.array(runs), axis=1)


def cut_by_tokens(lengths: IntArray, dp_size: int, budget: int) -> FloatArray:
    """Costs of micro-batches that unequal KK makes of each rank's samples, dearest first."""
    s, x = lengths.ravel(), Quadratic()(lengths.ravel())
    ranks = by_sums(lengths, dp_size)
    M = max(-(-int(s[rank].sum()) // budget) for rank in ranks)
    while True:
        parts = [karmarkar_karp(x[rank], M, equal_size=False) for rank in ranks]
        loads = [[s[rank[p]].sum() for p in own] for rank, own in zip(ranks, parts, strict=True)]
        if np.max(loads) <= budget:
            break
        M += 1
    costs = [[x[rank[p]].sum() for p in own] for rank, own in zip(ranks, parts, strict=True)]
    return -np.sort(-np.array(costs), axis=1)
