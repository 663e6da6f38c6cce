"""NeMo-RL: modified first fit decreasing over all, bins dealt to ranks in turn."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.peers.loading import commit_of, load
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered


def peer(folder: Path) -> Peer | None:
    """From a clone; None if it is not there."""
    if not (folder / "nemo_rl/data/packing/algorithms.py").exists():
        return None
    solve = partial(_packed, load(folder, "nemo_rl.data.packing.algorithms"))
    corners = (Corner.BUDGET, Corner.COUNT, Corner.MULTIPLE, Corner.MINIMUM)
    return Peer("NeMo-RL", commit_of(folder), dict.fromkeys(corners, solve))


def _packed(module: Any, problem: Problem) -> Schedule:
    """As `shard_by_batch_size` calls it; a multiple a rank is one of R times as many bins."""
    R = problem.dp_size
    packer = module.get_packer(
        "modified_first_fit_decreasing",
        bin_capacity=problem.micro_batch_tokens,
        min_bin_count=R * problem.minimum,
        bin_count_multiple=R * problem.multiple,
    )
    try:
        bins = packer.pack(problem.lengths.tolist())
    except ValueError as error:
        raise Unanswered(str(error)) from error
    return [bins[rank::R] for rank in range(R)]
