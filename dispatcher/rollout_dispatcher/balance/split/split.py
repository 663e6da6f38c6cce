"""Splitting the chosen samples over DP ranks and micro-batches, by strategy and layout.

Invariant: every sample is in exactly one micro-batch and every rank has the same number of them.
Indices are into the chosen samples, in arrival order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout_dispatcher.balance.objective import estimate, micro_batches_for
from rollout_dispatcher.balance.order import by_falling_tokens
from rollout_dispatcher.balance.split.karmarkar_karp import karmarkar_karp
from rollout_dispatcher.balance.split.leveling import lpt, spread_columns
from rollout_dispatcher.balance.split.packing import pack
from rollout_dispatcher.balance.split.padded.runs import begin_cost, cut_padded, padded_runs
from rollout_dispatcher.balance.split.partition import (
    column_partition,
    padded_partition,
    step_partition,
)
from rollout_dispatcher.balance.split.rank_groups import cut, deal, ranks_of_groups
from rollout_dispatcher.balance.split.runs import first_fit, next_fit
from rollout_dispatcher.plan import (
    FloatArray,
    IntArray,
    Layout,
    PlanConfig,
    Strategy,
    Sync,
    round_up,
)

#: Steps up to this many samples are always compared with the greedy split. Larger ones are if they
#: wait longer than this: with a fixed count, where greedy is cheap; with a token budget, where it
#: goes sample by sample, only up to a size, and if they wait longer than was thought as well.
_ALWAYS_COMPARED = 200
_CLOSE_BY_COUNT, _CLOSE_BY_TOKENS, _MOST_BY_TOKENS = 1.05, 1.01, 512


@dataclass(frozen=True, slots=True)
class Batch:
    """The chosen samples in arrival order, and `order`, the same by falling tokens and cost.

    group: dense group number of each sample, where groups have to stay on one rank.
    """

    cost: FloatArray
    tokens: IntArray
    group: IntArray | None
    order: IntArray

    @classmethod
    def of(cls, cost: FloatArray, tokens: IntArray, group: IntArray | None = None) -> "Batch":
        """Sorts once."""
        return cls(cost, tokens, group, by_falling_tokens(tokens))

    def __len__(self) -> int:
        return len(self.cost)

    @property
    def x(self) -> FloatArray:
        """Costs in falling order."""
        return self.cost[self.order]


@dataclass(frozen=True, slots=True)
class Parts:
    """Micro-batches as one sequence of samples, rank by rank, and counts int64[R, M]."""

    sequence: IntArray
    counts: IntArray

    @classmethod
    def of_slots(cls, slots: IntArray, n: int) -> "Parts":
        """From slots[R, M, m], where slots of n or beyond are empty."""
        R, M, m = slots.shape
        if slots.size == n:
            return cls(slots.ravel(), np.full((R, M), m))
        return cls(slots[slots < n], (slots < n).sum(axis=2))

    @classmethod
    def of_lists(cls, ranks: Sequence[Sequence[IntArray]], multiple: int) -> "Parts":
        """From lists that may differ in length: shorter ranks get fillers."""
        M = round_up(max(1, *(len(rank) for rank in ranks)), multiple)
        counts = np.zeros((len(ranks), M), dtype=np.int64)
        for r, rank in enumerate(ranks):
            counts[r, : len(rank)] = [len(part) for part in rank]
        return cls(np.concatenate([part for rank in ranks for part in rank]), counts)

    def positions(self, chosen: IntArray) -> tuple[tuple[IntArray, ...], ...]:
        """Window positions of every micro-batch."""
        where, (R, M) = chosen[self.sequence], self.counts.shape
        if self.counts.min() == self.counts.max():
            return tuple(tuple(rank) for rank in where.reshape(R, M, -1))
        ends = np.cumsum(self.counts).reshape(R, M).tolist()
        start, ranks = 0, []
        for row in ends:
            starts = [start, *row[:-1]]
            ranks.append(tuple([where[a:b] for a, b in zip(starts, row, strict=True)]))
            start = row[-1]
        return tuple(ranks)


def split(batch: Batch, config: PlanConfig, strategy: Strategy) -> Parts:
    """The micro-batches of every rank."""
    if batch.group is not None:
        return _split_by_group(batch, batch.group, config, strategy)
    if config.micro_batch_size is None:
        by_tokens = _split_padded if config.layout is Layout.PADDED else _split_by_tokens
        return by_tokens(batch, config, strategy)
    return _split_by_count(batch, config, strategy)


def plain_split(batch: Batch, config: PlanConfig) -> Parts:
    """What a trainer does without any of this: samples dealt to ranks as they came."""
    return split(replace(batch, group=None), config, Strategy.ROUND_ROBIN)


def matrix(batch: Batch, parts: Parts, layout: Layout) -> FloatArray:
    """Cost of each micro-batch, float64[R, M]; where the layout pads, of its padded shape."""
    counts = parts.counts.ravel()
    full = counts.nonzero()[0]
    counts = counts[full]
    starts = counts.cumsum() - counts
    cost = batch.cost[parts.sequence]
    if layout is Layout.PADDED:
        found = np.maximum.reduceat(cost, starts) * counts
    else:
        found = np.add.reduceat(cost, starts)
    out = np.zeros(parts.counts.shape)
    out.ravel()[full] = found
    return out


def _time(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    cost = matrix(batch, parts, config.layout)
    if config.sync is Sync.STEP:
        return float(cost.sum(axis=1).max())
    return float(cost.max(axis=0).sum())


def _split_by_count(batch: Batch, config: PlanConfig, strategy: Strategy) -> Parts:
    R, m, n = config.dp_size, config.micro_batch_size or 1, len(batch)
    M = micro_batches_for(n, config)
    if strategy is Strategy.ROUND_ROBIN:
        return Parts.of_slots(np.arange(R * M * m).reshape(-1, R).T.reshape(R, M, m), n)
    x, order = batch.x, batch.order
    if missing := R * M * m - n:
        x, order = np.append(x, np.zeros(missing)), np.append(order, np.full(missing, n))
    if strategy is not Strategy.WINDOW:
        return Parts.of_slots(order[_ranks(x, R, strategy)].reshape(R, M, m), n)
    per_step, padded = config.sync is Sync.STEP, config.layout is Layout.PADDED and m > 1
    if padded:
        slots = padded_partition(x, R, M, m, per_step)
    else:
        slots = step_partition(x, R, M, m) if per_step else column_partition(x, R, M, m)
    ours = Parts.of_slots(order[slots], n)
    if not padded and (per_step or m == 1):
        return ours  # starts from the greedy split, or is the optimum
    time = _time(batch, ours, config)
    if _good(batch, time, config):
        return ours
    greedy = Parts.of_slots(order[_ranks(x, R, Strategy.GREEDY)].reshape(R, M, m), n)
    return greedy if _time(batch, greedy, config) < time else ours


def _good(batch: Batch, time: float, config: PlanConfig) -> bool:
    """Whether comparing with the greedy split is not worth its time."""
    share = float(batch.cost.sum()) / config.dp_size
    if len(batch) <= _ALWAYS_COMPARED:
        return time <= share * (1 + 1e-9)
    if config.micro_batch_size is not None:
        return time <= share * _CLOSE_BY_COUNT
    if time <= share * _CLOSE_BY_TOKENS or len(batch) > _MOST_BY_TOKENS:
        return True
    return time <= _CLOSE_BY_TOKENS * estimate(batch.x, batch.tokens[batch.order], config)


def _ranks(x: FloatArray, R: int, strategy: Strategy) -> IntArray:
    """Ranks of equal count, ids[R, p] ascending: equal-size KK, or LPT."""
    p = len(x) // R
    if strategy is Strategy.KK:
        parts = karmarkar_karp(_as_integers(x), R, equal_size=True)
        return np.array(parts, dtype=np.int64).reshape(R, p)
    return np.argsort(lpt(x, R, p), kind="stable").reshape(R, p)


def _as_integers(x: FloatArray) -> list[int]:
    """Costs as integers: exact where they are whole, else to one part in 2^50."""
    if len(x) and (x[0] >= 2.0**62 or (x != np.rint(x)).any()):
        x = np.rint(x * (2.0**50 / max(float(x[0]), 1e-300)))
    whole: list[int] = x.astype(np.int64).tolist()
    return whole


def _split_by_tokens(batch: Batch, config: PlanConfig, strategy: Strategy) -> Parts:
    R, budget = config.dp_size, config.micro_batch_tokens or 1
    if strategy is Strategy.ROUND_ROBIN:
        dealt = np.arange(round_up(len(batch), R)).reshape(-1, R).T.ravel()
        sequence = dealt[dealt < len(batch)]
        sizes = (len(batch) - np.arange(R) + R - 1) // R
        return Parts(sequence, _rounded(next_fit(batch.tokens[sequence], sizes, budget), config))
    if strategy is not Strategy.WINDOW:
        ranks = _token_ranks(batch, R, strategy)
        fitted = first_fit(ranks, batch.tokens, budget)
        return Parts.of_lists(fitted, config.micro_batch_multiple)
    ours = _packed(batch, config)
    time = _time(batch, ours, config)
    if ours.counts.shape[1] == 1 or _good(batch, time, config):
        return ours
    greedy = _split_by_tokens(batch, config, Strategy.GREEDY)
    # Fewer micro-batches come first: greedy may need more.
    fits = greedy.counts.shape[1] <= ours.counts.shape[1]
    return greedy if fits and _time(batch, greedy, config) < time else ours


def _rounded(counts: IntArray, config: PlanConfig) -> IntArray:
    """counts[R, M] with empty micro-batches until M is a multiple of what is asked for."""
    M = counts.shape[1]
    missing = round_up(M, config.micro_batch_multiple) - M
    return np.pad(counts, ((0, 0), (0, missing))) if missing else counts


def _packed(batch: Batch, config: PlanConfig) -> Parts:
    """Bins of about equal cost in each micro-step, dealt to ranks so that their sums are close."""
    R, budget = config.dp_size, config.micro_batch_tokens or 1
    x, s = batch.x, batch.tokens[batch.order]
    labels, M = pack(x, s, R, budget, config.micro_batch_multiple)
    load = np.bincount(labels, weights=x, minlength=R * M).astype(np.float64)
    place = np.empty(R * M, dtype=np.int64)  # of each bin: rank * M + micro-step
    if config.sync is Sync.STEP and M > 1:
        by_cost = np.argsort(-load, kind="stable")
        place[by_cost[step_partition(load[by_cost], R, M, 1).ravel()]] = np.arange(R * M)
    else:
        rank_of = spread_columns(load.reshape(M, R))
        place[:] = (rank_of * M + np.arange(M)[:, None]).ravel()
    counts = np.bincount(place[labels], minlength=R * M).reshape(R, M)
    return Parts(batch.order[np.argsort(place[labels], kind="stable")], counts)


def _split_padded(batch: Batch, config: PlanConfig, strategy: Strategy) -> Parts:
    """Sorted runs under a budget of padded tokens; else each rank's samples as they are."""
    R, budget, multiple = (
        config.dp_size,
        config.micro_batch_tokens or 1,
        config.micro_batch_multiple,
    )
    if strategy is not Strategy.WINDOW:
        dealt = strategy is Strategy.ROUND_ROBIN
        every = [np.arange(r, len(batch), R) for r in range(R)]
        ranks = every if dealt else _token_ranks(batch, R, strategy)
        return Parts.of_lists(cut_padded(ranks, batch.tokens, budget), multiple)
    x, s = batch.x, batch.tokens[batch.order]
    runs = padded_runs(x, s, R, budget, multiple, per_step=config.sync is Sync.STEP)
    labels = np.repeat(runs.place, np.diff(runs.starts))
    counts = np.bincount(labels, minlength=R * runs.M).reshape(R, runs.M)
    ours = Parts(batch.order[np.argsort(labels, kind="stable")], counts)
    if len(batch) > _ALWAYS_COMPARED:
        return ours
    greedy, begin = _split_padded(batch, config, Strategy.GREEDY), begin_cost(x, s, budget)
    more = greedy.counts.shape[1] > runs.M
    if more or (ours.counts.all() and not greedy.counts.all()):
        return ours  # no fillers where there are samples enough

    def time(parts: Parts) -> float:
        return _time(batch, parts, config) + begin * float(parts.counts.shape[1])

    return min(ours, greedy, key=time)


def _token_ranks(batch: Batch, R: int, strategy: Strategy) -> list[IntArray]:
    n = len(batch)
    x = np.append(batch.x, np.zeros(-n % R if strategy is Strategy.KK else 0))
    if strategy is Strategy.KK:
        return [batch.order[rank[rank < n]] for rank in _ranks(x, R, strategy)]
    labels = lpt(x, R, n)
    ends = np.cumsum(np.bincount(labels, minlength=R))[:-1]
    return np.split(batch.order[np.argsort(labels, kind="stable")], ends)


def _split_by_group(batch: Batch, group: IntArray, config: PlanConfig, strategy: Strategy) -> Parts:
    """Whole groups onto ranks; the window strategy tries both ways to cut a rank's samples."""
    ranks, M = ranks_of_groups(batch.cost, group, batch.order, config, strategy)
    multiple = config.micro_batch_multiple
    if config.micro_batch_size is None:
        fit = cut_padded if config.layout is Layout.PADDED else first_fit
        return Parts.of_lists(fit(ranks, batch.tokens, config.micro_batch_tokens or 1), multiple)
    runs = Parts.of_lists(cut(ranks, M, config.micro_batch_size), multiple)
    if strategy is not Strategy.WINDOW:
        return runs
    dealt = Parts.of_lists(deal(ranks, M), multiple)
    return dealt if _time(batch, dealt, config) < _time(batch, runs, config) else runs
