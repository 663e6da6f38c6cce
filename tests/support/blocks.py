"""What a step takes in which blocks of ranks train together, by the ranks' clocks."""

import numpy as np

from rollout_planner import Quadratic
from rollout_planner.types import IntArray, round_up

#: Of each doubling, as `plan_step` is asked.
OVERHEAD = 0.05
COST = Quadratic()


def step_time(plan: list[list[list[int]]], lengths: IntArray, sync: str, budget: int) -> float:
    """What the ranks' clocks show at the end of a legal plan; raises for others."""
    ranks, clock, seen = len(plan), np.zeros(len(plan)), np.zeros(len(lengths), dtype=np.int64)
    assert len({len(rank) for rank in plan}) == 1
    for step in range(len(plan[0])):
        rank = 0
        while rank < ranks:
            own, size = plan[rank][step], 1
            while own and rank + size < ranks and plan[rank + size][step][:1] == own[:1]:
                assert plan[rank + size][step] == own
                size += 1
            assert size & (size - 1) == 0
            assert rank % size == 0
            held = round_up(lengths[own], 2 * size if size > 1 else 1)
            assert held.sum() <= size * budget
            took = float(COST(held).sum()) * (1 + OVERHEAD) ** (size.bit_length() - 1) / size
            clock[rank : rank + size] = clock[rank : rank + size].max() + took
            seen[own] += 1
            rank += size
        if sync == "micro-step":
            clock[:] = clock.max()
    assert (seen == 1).all()
    return float(clock.max())
