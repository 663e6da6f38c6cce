"""AReaL: greedy by falling length, over ranks and over the micro-batches of each."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from rollout_planner.types import IntArray
from tests.peers.loading import commit_of, load
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered, in_one_micro_batch

#: As it says: no limit.
_NO_LIMIT = 10**12


def peer(folder: Path) -> Peer | None:
    """From a clone; None if it is not there."""
    if not (folder / "areal/utils/seqpack.py").exists():
        return None
    module = load(folder, "areal.utils.seqpack", ["numba"], {"areal.utils.logging": logging})
    budget = partial(_budget, module)
    solves = dict.fromkeys((Corner.BUDGET, Corner.MULTIPLE, Corner.MINIMUM), budget)
    return Peer("AReaL", commit_of(folder), solves | {Corner.EQUAL: partial(_equal, module)})


def _equal(module: Any, problem: Problem) -> Schedule:
    try:
        parts = module.balanced_greedy_partition(problem.costs.tolist(), problem.dp_size)
    except ValueError as error:
        raise Unanswered(str(error)) from error
    return in_one_micro_batch(parts)


def _budget(module: Any, problem: Problem) -> Schedule:
    """Ranks by tokens, as it hands trajectories out; then each rank until all agree on a number."""
    everyone, lengths = list(range(len(problem.lengths))), problem.lengths
    ranks = _allocate(module, lengths, everyone, (_NO_LIMIT, problem.dp_size, 1))
    least, budget = problem.minimum, problem.micro_batch_tokens or _NO_LIMIT
    while True:
        asked = (budget, least, problem.multiple)
        found = [_allocate(module, lengths, rank, asked) for rank in ranks]
        most = max(len(parts) for parts in found)
        if all(len(parts) == most for parts in found):
            return found
        least = most


def _allocate(
    module: Any, lengths: IntArray, items: list[int], asked: tuple[int, int, int]
) -> list[list[int]]:
    """asked: the budget, the least number of bins, and what it is a multiple of."""
    try:
        parts = module.ffd_allocate(lengths[items].tolist(), *asked)
    except RuntimeError as error:
        raise Unanswered(str(error)[-120:]) from error
    return [[items[i] for i in part] for part in parts]
