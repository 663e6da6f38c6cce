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

import numpy as np

from rollout_planner.split.assign import lpt
from rollout_planner.types import FloatArray, IntArray, cut

#: The samples of each micro-batch.
_Parts = list[list[int]]


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
    labels = np.repeat(np.arange(R * M), counts.ravel())
    if across:
        labels = _shared(labels, counts, cost[sequence])
        sequence = sequence[np.argsort(labels, kind="stable")]
        counts = np.bincount(labels, minlength=R * M).reshape(R, M)
        labels.sort()
    load = np.bincount(labels, weights=cost[sequence], minlength=R * M).reshape(R, M)
    cheapest_first = np.argsort(load.max(axis=0), kind="stable")
    parts = cut(sequence.tolist(), counts.ravel().tolist())
    for r in np.flatnonzero(counts.min(axis=1) == 0).tolist():  # the others stay as they are
        rank = parts[r * M : (r + 1) * M]
        if halve:
            _halve(rank, cost)
        else:
            _move_cheapest(rank, cheapest_first[counts[r, cheapest_first] == 0].tolist(), cost)
        parts[r * M : (r + 1) * M] = rank
    filled = np.array(list(map(len, parts)), dtype=np.int64).reshape(R, M)
    return np.array([i for part in parts for i in part], dtype=np.int64), filled


def _shared(labels: IntArray, counts: IntArray, cost: FloatArray) -> IntArray:
    """Ranks with fewer samples than micro-batches get the cheapest that others can spare."""
    (R, M), sizes, labels = counts.shape, counts.sum(axis=1), labels.copy()
    by_rank = np.lexsort((cost, labels // M))
    place = np.arange(len(labels)) - np.repeat(sizes.cumsum() - sizes, sizes)
    spare = by_rank[place < np.repeat(np.maximum(sizes - M, 0), sizes)]
    empty = [np.flatnonzero(counts[r] == 0)[: max(M - sizes[r], 0)] + r * M for r in range(R)]
    wanted = np.concatenate(empty)[: len(spare)]
    labels[spare[np.argsort(cost[spare], kind="stable")][: len(wanted)]] = wanted
    return labels


def _halve(rank: _Parts, cost: FloatArray) -> None:
    """The dearest of two samples or more for each that has none, by LPT."""
    heap = [(-float(cost[part].sum()), j) for j, part in enumerate(rank) if len(part) > 1]
    heapq.heapify(heap)
    for j in [j for j, part in enumerate(rank) if not part]:
        if not heap:
            return
        _, source = heapq.heappop(heap)
        part = sorted(rank[source], key=lambda i: (-cost[i], i))
        halves = lpt(cost[part], 2, len(part) - 1)
        for side, half in enumerate((source, j)):
            rank[half] = [i for i, label in zip(part, halves, strict=True) if label == side]
            if len(rank[half]) > 1:
                heapq.heappush(heap, (-float(cost[rank[half]].sum()), half))


def _move_cheapest(rank: _Parts, empty: list[int], cost: FloatArray) -> None:
    """Samples by rising cost, each from its micro-batch as long as that has another."""
    cheapest = iter(sorted((cost[i], i, j) for j, part in enumerate(rank) for i in part))
    for j in empty:
        found = next(((i, k) for _, i, k in cheapest if len(rank[k]) > 1), None)
        if found is None:
            return
        rank[found[1]].remove(found[0])
        rank[j].append(found[0])
