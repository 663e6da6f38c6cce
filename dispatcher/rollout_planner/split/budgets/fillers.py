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
    sizes = counts.sum(axis=1)
    if across and sizes.min() < counts.shape[1] < sizes.max():
        sequence, counts = _share(sequence, counts, cost)
    sequence, filled = sequence.copy(), counts.copy()
    ends = counts.sum(axis=1).cumsum().tolist()
    is_empty = counts == 0
    levels = {} if halve else _levels(sequence, counts, cost, is_empty.any(axis=0).nonzero()[0])
    for r in is_empty.any(axis=1).nonzero()[0].tolist():  # the others stay as they are
        own = slice(ends[r - 1] if r else 0, ends[r])
        rank = cut(sequence[own].tolist(), counts[r].tolist())
        empty = is_empty[r].nonzero()[0].tolist()
        if halve:
            _halve(rank, empty, cost)
        else:
            _move_cheapest(rank, sorted(empty, key=levels.__getitem__), sequence[own], cost)
        sequence[own], filled[r] = [i for part in rank for i in part], list(map(len, rank))
    return sequence, filled


def _share(sequence: IntArray, counts: IntArray, cost: FloatArray) -> tuple[IntArray, IntArray]:
    """Ranks with fewer samples than micro-batches get the cheapest that others can spare."""
    R, M = counts.shape
    parts = cut(sequence.tolist(), counts.ravel().tolist())
    sizes = counts.sum(axis=1).tolist()
    wanted = [b for b, part in enumerate(parts) if not part and sizes[b // M] < M]
    costs = cost.tolist()
    spare = [(costs[i], i, b) for b, part in enumerate(parts) if sizes[b // M] > M for i in part]
    for _, i, b in sorted(spare):
        while wanted and sizes[wanted[-1] // M] >= M:
            wanted.pop()
        if not wanted:
            break
        if sizes[b // M] > M:
            to = wanted.pop()
            parts[b].remove(i)
            parts[to].append(i)
            sizes[b // M] -= 1
            sizes[to // M] += 1
    counts = np.array(list(map(len, parts)), dtype=np.int64).reshape(R, M)
    return np.array([i for part in parts for i in part], dtype=np.int64), counts


def _levels(
    sequence: IntArray, counts: IntArray, cost: FloatArray, columns: IntArray
) -> dict[int, float]:
    """The largest micro-batch of these micro-steps."""
    ends = counts.cumsum().reshape(counts.shape)
    starts = ends - counts
    return {
        j: max(
            float(cost[sequence[start:end]].sum())
            for start, end in zip(starts[:, j].tolist(), ends[:, j].tolist(), strict=True)
        )
        for j in columns.tolist()
    }


def _halve(rank: _Parts, empty: list[int], cost: FloatArray) -> None:
    heap = [(-float(cost[part].sum()), j) for j, part in enumerate(rank) if len(part) > 1]
    heapq.heapify(heap)
    for j in empty:
        if not heap:
            return
        _, source = heapq.heappop(heap)
        rank[source], rank[j] = _halves(rank[source], cost)
        for half in (source, j):
            if len(rank[half]) > 1:
                heapq.heappush(heap, (-float(cost[rank[half]].sum()), half))


def _halves(part: list[int], cost: FloatArray) -> tuple[list[int], list[int]]:
    """LPT, of which neither is empty."""
    costs = cost[part].tolist()
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0.0, 0.0]
    for dear, i in sorted(zip((-each for each in costs), part, strict=True)):
        side = int(loads[1] < loads[0] or len(halves[0]) == len(part) - 1)
        halves[side].append(i)
        loads[side] -= dear
    return halves


def _move_cheapest(rank: _Parts, empty: list[int], samples: IntArray, cost: FloatArray) -> None:
    """Samples by rising cost, each from its micro-batch as long as that has another."""
    of = {i: j for j, part in enumerate(rank) for i in part}
    cheapest = iter(samples[np.lexsort((samples, cost[samples]))].tolist())
    for j in empty:
        found = next((i for i in cheapest if len(rank[of[i]]) > 1), None)
        if found is None:
            return
        rank[of[found]].remove(found)
        rank[j].append(found)
