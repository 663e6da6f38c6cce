"""No micro-batch stays empty while another has two samples: they are split instead.

Invariant: no micro-batch gains samples but empty ones, so caps hold; with `across` false, ranks
keep their samples. Then an empty micro-batch, a filler, is left only where samples are fewer
than micro-batches.

A rank with fewer samples than micro-batches first gets the cheapest that others can spare. Where
ranks meet once a step, the dearest micro-batch of two or more is halved, so that they become alike;
where they meet at every micro-step, the cheapest sample goes, as it adds the least to its new one.

Example, costs 9 4 3 1 on a rank whose micro-batches are 9 | 4 3 1 | -: once a step it becomes
9 | 4 | 3 1, at every micro-step 9 | 4 3 | 1.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from rollout_dispatcher.balance.split.leveling import lpt
from rollout_dispatcher.plan import FloatArray, IntArray

_Ranks = list[list[list[int]]]


def fill_empty(
    sequence: IntArray, counts: IntArray, cost: FloatArray, *, halve: bool, across: bool
) -> tuple[IntArray, IntArray]:
    """Micro-batches as one sequence, rank by rank, and counts int64[R, M], no filler needlessly.

    cost: of each sample that `sequence` names. halve: whether ranks meet once a step. across:
    whether samples may change ranks.
    """
    if counts.min() > 0 or counts.max() <= 1:
        return sequence, counts
    R, M = counts.shape
    parts = [part.tolist() for part in np.split(sequence, np.cumsum(counts)[:-1])]
    ranks = [parts[r * M : (r + 1) * M] for r in range(R)]
    if across:
        _share(ranks, cost)
    level = _levels(ranks, cost)
    for rank in ranks:
        empty = [j for j, part in enumerate(rank) if not part]
        if halve:
            _halve(rank, empty, cost)
        else:
            _move_cheapest(rank, sorted(empty, key=lambda j: level[j]), cost)
    counts = np.array([[len(part) for part in rank] for rank in ranks], dtype=np.int64)
    return np.array([i for rank in ranks for part in rank for i in part], dtype=np.int64), counts


def _share(ranks: _Ranks, cost: FloatArray) -> None:
    """Ranks with fewer samples than micro-batches get the cheapest that others can spare."""
    M = len(ranks[0])
    sizes = [sum(len(part) for part in rank) for rank in ranks]
    wanted = [(r, j) for r, rank in enumerate(ranks) for j, part in enumerate(rank) if not part]
    wanted = [(r, j) for r, j in wanted if sizes[r] < M]
    if not wanted or max(sizes) <= M:
        return
    spare = [
        (cost[i], i, r, j)
        for r, rank in enumerate(ranks)
        if sizes[r] > M
        for j, part in enumerate(rank)
        for i in part
    ]
    for _, i, r, j in sorted(spare):
        while wanted and sizes[wanted[-1][0]] >= M:
            wanted.pop()
        if not wanted:
            return
        if sizes[r] > M:
            to, empty = wanted.pop()
            ranks[r][j].remove(i)
            ranks[to][empty].append(i)
            sizes[r], sizes[to] = sizes[r] - 1, sizes[to] + 1


def _levels(ranks: _Ranks, cost: FloatArray) -> list[float]:
    """The largest micro-batch of each micro-step."""
    return [max(float(cost[part].sum()) for part in column) for column in zip(*ranks, strict=True)]


def _halve(rank: list[list[int]], empty: list[int], cost: FloatArray) -> None:
    heap = [(-float(cost[part].sum()), j) for j, part in enumerate(rank) if len(part) > 1]
    heapq.heapify(heap)
    for j in empty:
        if not heap:
            return
        _, source = heapq.heappop(heap)
        part = sorted(rank[source], key=lambda i: (-cost[i], i))
        side = lpt(cost[part], 2, len(part) - 1)
        for half, b in ((source, 0), (j, 1)):
            rank[half] = [i for i, label in zip(part, side.tolist(), strict=True) if label == b]
            if len(rank[half]) > 1:
                heapq.heappush(heap, (-float(cost[rank[half]].sum()), half))


def _move_cheapest(rank: list[list[int]], empty: list[int], cost: FloatArray) -> None:
    cheapest = _spare(rank, cost)
    for j in empty:
        found = next(cheapest, None)
        if found is None:
            return
        i, source = found
        rank[source].remove(i)
        rank[j].append(i)


def _spare(rank: list[list[int]], cost: FloatArray) -> Iterator[tuple[int, int]]:
    """Samples by rising cost, with their micro-batch, as long as that has another."""
    for _, i, j in sorted((cost[i], i, j) for j, part in enumerate(rank) for i in part):
        if len(rank[j]) > 1:
            yield i, j
