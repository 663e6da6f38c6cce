"""SkyRL: chunks in order of arrival, then the least loaded micro-batch of each rank."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.peers.loading import commit_of, load
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered


def peer(folder: Path) -> Peer | None:
    """From a clone; None if it is not there."""
    if not (folder / "skyrl/train/dataset/bin_packing.py").exists():
        return None
    solve = partial(_packed, load(folder, "skyrl.train.dataset.bin_packing"))
    corners = (Corner.BUDGET, Corner.COUNT, Corner.TIME)
    return Peer("SkyRL", commit_of(folder), dict.fromkeys(corners, solve))


def _packed(module: Any, problem: Problem) -> Schedule:
    """Ranks with fewer micro-batches than others run fillers, as `rate` counts them."""
    n, R = len(problem.lengths), problem.dp_size
    if n % R:
        raise Unanswered(f"it pads {n} samples to a multiple of {R}")
    share, lengths, ranks = n // R, problem.lengths.tolist(), []
    for start in range(0, n, share):
        packer = module.make_seq_packer("balanced", bin_capacity=problem.micro_batch_tokens)
        bins = packer.pack(lengths[start : start + share])
        ranks.append([[start + i for i in part] for part in bins])
    return ranks
