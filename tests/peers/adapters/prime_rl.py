"""prime-rl: first fit decreasing, bins split until ranks have as many, then swaps between ranks."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.peers.loading import commit_of, load
from tests.peers.problem import (
    Corner,
    Peer,
    Problem,
    Schedule,
    Unanswered,
    in_one_micro_batch,
)

#: Its swaps look at all pairs of bins on all pairs of ranks in each round: more take minutes.
_MOST_BINS, _MOST_RANKS = 64, 8


def peer(folder: Path) -> Peer | None:
    """From a clone; None if it is not there."""
    source = folder / "src"
    if not (source / "prime_rl/trainer/batch.py").exists():
        return None
    module = load(source, "prime_rl.trainer.batch", ["prime_rl.transports.rollouts.types"])
    # A bin holds samples; what it makes of them then are tensors, which are not looked at here.
    module._materialize_bin = lambda content: content
    packed = partial(_packed, module)
    solves = {Corner.BUDGET: packed, Corner.MULTIPLE: packed, Corner.EQUAL: partial(_equal, module)}
    return Peer("prime-rl", commit_of(folder), solves)


def _equal(module: Any, problem: Problem) -> Schedule:
    return in_one_micro_batch(_partition(module, problem.costs.tolist(), problem.dp_size))


def _partition(module: Any, weights: list[float], ranks: int) -> list[list[int]]:
    if len(weights) > _MOST_BINS or ranks > _MOST_RANKS:
        raise Unanswered(f"its swaps between {ranks} ranks of {len(weights)} take too long")
    if len(weights) % ranks:
        raise Unanswered(f"{len(weights)} are not as many on each of {ranks} ranks")
    found: list[list[int]] = module.balanced_partition(weights, ranks)
    return found


def _packed(module: Any, problem: Problem) -> Schedule:
    """A multiple a rank is as if there were that many times the ranks to fill."""
    budget = problem.micro_batch_tokens
    samples = [
        SimpleNamespace(input_ids=range(count), index=i, mm_kwargs=None, routed_experts=None)
        for i, count in enumerate(problem.lengths.tolist())
    ]

    def cost(lengths: list[int]) -> float:
        return float(problem.cost(np.array(lengths)).sum())

    if int(problem.lengths.sum()) > (budget or 0) * _MOST_BINS:
        raise Unanswered("its swaps between so many micro-batches take too long")
    bins = module.packed_samples_into_micro_bs(
        samples, budget, problem.dp_size * problem.multiple, cost
    )
    weights = [content.workload(cost) for content in bins]
    ranks = _partition(module, weights, problem.dp_size)
    return [[[sample.index for sample in bins[b].samples] for b in rank] for rank in ranks]
