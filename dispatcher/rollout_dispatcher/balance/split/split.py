"""Splitting the chosen samples over DP ranks and micro-batches, by strategy and layout.

Invariant: every sample is in exactly one micro-batch and every rank has the same number of them.
Indices are into the chosen samples, in arrival order.
"""

from dataclasses import replace

import numpy as np

from rollout_dispatcher.balance.objective import estimate, micro_batches_for
from rollout_dispatcher.balance.split.groups.items import group_items, members_of_items
from rollout_dispatcher.balance.split.groups.ranks import split_by_rank
from rollout_dispatcher.balance.split.karmarkar_karp import karmarkar_karp
from rollout_dispatcher.balance.split.leveling import lpt, spread_columns
from rollout_dispatcher.balance.split.packing import pack
from rollout_dispatcher.balance.split.partition import (
    column_partition,
    padded_partition,
    step_partition,
)
from rollout_dispatcher.balance.split.parts import Batch, Parts, step_time
from rollout_dispatcher.balance.split.runs import first_fit, next_fit
from rollout_dispatcher.plan import (
    FloatArray,
    Grouping,
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


def split(batch: Batch, config: PlanConfig, strategy: Strategy) -> Parts:
    """The micro-batches of every rank."""
    if batch.group is not None and config.grouping is Grouping.RANK:
        return split_by_rank(batch, batch.group, config, strategy)
    if batch.group is not None:
        items, own = group_items(batch, batch.group, config)
        return members_of_items(split(items, own, strategy), batch.group)
    if config.micro_batch_size is None:
        return _split_by_tokens(batch, config, strategy)
    return _split_by_count(batch, config, strategy)


def plain_split(batch: Batch, config: PlanConfig) -> Parts:
    """What a trainer does without any of this: samples dealt to ranks as they came."""
    return split(replace(batch, group=None), config, Strategy.ROUND_ROBIN)


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
    time = step_time(batch, ours, config)
    if _good(batch, time, config):
        return ours
    greedy = Parts.of_slots(order[_ranks(x, R, Strategy.GREEDY)].reshape(R, M, m), n)
    return greedy if step_time(batch, greedy, config) < time else ours


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
    time = step_time(batch, ours, config)
    if ours.counts.shape[1] == 1 or _good(batch, time, config):
        return ours
    greedy = _split_by_tokens(batch, config, Strategy.GREEDY)
    # Fewer micro-batches come first: greedy may need more.
    fits = greedy.counts.shape[1] <= ours.counts.shape[1]
    return greedy if fits and step_time(batch, greedy, config) < time else ours


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


def _token_ranks(batch: Batch, R: int, strategy: Strategy) -> list[IntArray]:
    n = len(batch)
    x = np.append(batch.x, np.zeros(-n % R if strategy is Strategy.KK else 0))
    if strategy is Strategy.KK:
        return [batch.order[rank[rank < n]] for rank in _ranks(x, R, strategy)]
    labels = lpt(x, R, n)
    ends = np.cumsum(np.bincount(labels, minlength=R))[:-1]
    return np.split(batch.order[np.argsort(labels, kind="stable")], ends)
