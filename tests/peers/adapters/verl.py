"""verl: Karmarkar-Karp over ranks, then over the micro-batches of each rank."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.peers.loading import UNPACKED, load, version_of
from tests.peers.problem import (
    Corner,
    Peer,
    Problem,
    Schedule,
    Unanswered,
    in_one_micro_batch,
)

KarmarkarKarp = Callable[[list[float], int, bool], list[list[int]]]

#: Samples times micro-batches of a rank, beyond which its loop takes minutes in plain Python.
_MOST = 20_000

_MODULE, _FILE = "verl.utils.seqlen_balancing", "verl/utils/seqlen_balancing.py"
_STUBS = ("verl.protocol", "verl.utils.device", "verl.utils.tensordict_utils")


def peer(folder: Path) -> Peer | None:
    """From the wheel unpacked in `folder`; None if it is not there."""
    if not (folder / _FILE).exists():
        return None
    module = load(folder, _MODULE, _STUBS)
    budget = partial(_budget, module)
    solves = {
        Corner.BUDGET: budget,
        Corner.COUNT: budget,
        Corner.MULTIPLE: budget,
        Corner.MINIMUM: budget,
        Corner.TOGETHER: budget,
        Corner.GROUPS: partial(_groups, module),
        Corner.EQUAL: partial(_equal, module),
    }
    return Peer("verl", version_of(folder, "verl"), solves)


def load_karmarkar_karp(folder: Path = UNPACKED) -> KarmarkarKarp | None:
    """Its `karmarkar_karp` alone; None if its wheel is not there."""
    if not (folder / _FILE).exists():
        return None
    found: KarmarkarKarp = load(folder, _MODULE, _STUBS).karmarkar_karp
    return found


def _equal(module: Any, problem: Problem) -> Schedule:
    return in_one_micro_batch(_ranks(module, problem))


def _ranks(module: Any, problem: Problem) -> list[list[int]]:
    """What its trainer does before anything else: as many samples on each rank."""
    costs, R = problem.costs.tolist(), problem.dp_size
    try:
        if problem.group is not None:
            # Its cost is the one that is compared: 24576 s + s^2.
            found = module.get_group_balanced_partitions(
                problem.lengths.tolist(), problem.group.tolist(), R
            )
        else:
            found = module.get_seqlen_balanced_partitions(costs, R, equal_size=True)
    except AssertionError as error:
        raise Unanswered(str(error)) from error
    return found  # type: ignore[no-any-return]


def _groups(module: Any, problem: Problem) -> Schedule:
    return in_one_micro_batch(_ranks(module, problem))


def _budget(module: Any, problem: Problem) -> Schedule:
    """Each rank by itself; then again, until all have as many micro-batches as the one with most.

    Its own loop agrees on that number by collectives; there is one process here.
    """
    budget = problem.micro_batch_tokens or 1
    if len(problem.lengths) * int(problem.lengths.sum()) // budget > _MOST * problem.dp_size**2:
        raise Unanswered("its Karmarkar-Karp takes minutes for so many micro-batches")
    ranks, least = _ranks(module, problem), problem.minimum
    while True:
        found = [_micro_batches(module, problem, rank, least) for rank in ranks]
        most = max(len(parts) for parts in found)
        if all(len(parts) == most for parts in found):
            return found
        least = most


def _micro_batches(module: Any, problem: Problem, rank: list[int], least: int) -> list[list[int]]:
    lengths = torch.tensor(problem.lengths[rank])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    size = 1
    if problem.together and problem.group is not None:
        size = int((problem.group == problem.group[0]).sum())
    try:
        _, parts = module.rearrange_micro_batches(
            {"input_ids": SimpleNamespace(is_nested=True, offsets=lambda: ends)},
            problem.micro_batch_tokens,
            num_batches_divided_by=problem.multiple if problem.multiple > 1 else None,
            min_num_micro_batch=least if least > 1 else None,
            force_group_size=size,
        )
    except (AssertionError, ValueError) as error:
        raise Unanswered(str(error)) from error
    return [[rank[i] for i in part] for part in parts]
