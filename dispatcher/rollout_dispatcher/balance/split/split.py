"""Splitting the chosen samples over DP ranks and micro-batches, by strategy and layout.

Invariant: every sample is in exactly one micro-batch and every rank has the same number of them;
only round-robin leaves one empty while another has two samples.
Indices are into the chosen samples, in arrival order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout_dispatcher.balance.objective import estimate, micro_batches_for
from rollout_dispatcher.balance.order import by_falling_tokens
from rollout_dispatcher.balance.split.budgets.fillers import fill_empty
from rollout_dispatcher.balance.split.budgets.ranks import pack_ranks
from rollout_dispatcher.balance.split.karmarkar_karp import karmarkar_karp
from rollout_dispatcher.balance.split.leveling import lpt, spread_columns
from rollout_dispatcher.balance.split.packing import pack
from rollout_dispatcher.balance.split.partition import (
    column_partition,
    padded_partition,
    step_partition,
)
from rollout_dispatcher.balance.split.rank_groups import cut, deal, ranks_of_groups
from rollout_dispatcher.balance.split.runs import first_fit, next_fit, spread
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
    def of_lists(cls, ranks: Sequence[Sequence[IntArray]], config: PlanConfig) -> "Parts":
        """From lists that may differ in length: shorter ranks get fillers."""
        M = config.micro_batches(max(1, *(len(rank) for rank in ranks)))
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
        parts = _split_by_group(batch, batch.group, config, strategy)
    elif config.micro_batch_size is None:
        parts = _split_by_tokens(batch, config, strategy)
    else:
        parts = _split_by_count(batch, config, strategy)
    if strategy is Strategy.ROUND_ROBIN and config.micro_batches(1) == 1:
        return parts  # what nobody asked to be more micro-batches stays as it came
    return without_fillers(batch, parts, config)


def without_fillers(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """The same, but no micro-batch is empty while another that may give has two samples."""
    if parts.counts.min() > 0 or parts.counts.max() <= 1:
        return parts
    sequence, counts = fill_empty(
        parts.sequence,
        parts.counts,
        batch.cost,
        halve=config.sync is Sync.STEP,
        across=batch.group is None,
    )
    return Parts(sequence, counts)


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
    ours = without_fillers(batch, Parts.of_slots(order[slots], n), config)
    if not padded and (per_step or m == 1):
        return ours  # starts from the greedy split, or is the optimum
    time = _time(batch, ours, config)
    if _good(batch, time, config):
        return ours
    greedy = Parts.of_slots(order[_ranks(x, R, Strategy.GREEDY)].reshape(R, M, m), n)
    greedy = without_fillers(batch, greedy, config)
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
        return without_fillers(batch, Parts.of_lists(_fitted(ranks, batch, config), config), config)
    ours = without_fillers(batch, _packed(batch, config), config)
    time = _time(batch, ours, config)
    if ours.counts.shape[1] == 1 or _good(batch, time, config):
        return ours
    greedy = _split_by_tokens(batch, config, Strategy.GREEDY)
    # Fewer micro-batches come first: greedy may need more.
    fits = greedy.counts.shape[1] <= ours.counts.shape[1]
    return greedy if fits and _time(batch, greedy, config) < time else ours


def _rounded(counts: IntArray, config: PlanConfig) -> IntArray:
    """counts[R, M] with empty micro-batches until there are as many as asked for."""
    M = counts.shape[1]
    missing = config.micro_batches(M) - M
    return np.pad(counts, ((0, 0), (0, missing))) if missing else counts


def _packed(batch: Batch, config: PlanConfig) -> Parts:
    """Under a budget: ranks of equal cost, or micro-steps whose micro-batches cost about the same.

    In the latter case, bins of each micro-step go to ranks so that their sums are close.
    """
    R, budget = config.dp_size, config.micro_batch_tokens or 1
    x, s = batch.x, batch.tokens[batch.order]
    per_step = config.sync is Sync.STEP
    place, M = (pack_ranks if per_step else pack)(
        x,
        s,
        R,
        budget,
        multiple=config.micro_batch_multiple,
        minimum=config.min_micro_batches,
        came=batch.order,
    )
    if not per_step:
        load = np.bincount(place, weights=x, minlength=R * M).astype(np.float64)
        rank_of = spread_columns(load.reshape(M, R))
        place = (rank_of * M + np.arange(M)[:, None]).ravel()[place]
    counts = np.bincount(place, minlength=R * M).reshape(R, M)
    return Parts(batch.order[np.argsort(place, kind="stable")], counts)


def _fitted(ranks: list[IntArray], batch: Batch, config: PlanConfig) -> list[list[IntArray]]:
    """Each rank's samples, falling, by first fit, or evenly where there must be more than that."""
    budget = config.micro_batch_tokens or 1
    fitted = first_fit(ranks, batch.tokens, budget)
    needed = max(len(rank) for rank in fitted)
    M = config.micro_batches(needed)
    return fitted if needed == M else spread(ranks, batch.cost, batch.tokens, M, budget)


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
    if config.micro_batch_size is None:
        return Parts.of_lists(_fitted(ranks, batch, config), config)
    runs = Parts.of_lists(cut(ranks, M, config.micro_batch_size), config)
    if strategy is not Strategy.WINDOW:
        return runs
    dealt = Parts.of_lists(deal(ranks, M), config)
    return dealt if _time(batch, dealt, config) < _time(batch, runs, config) else runs
