"""TransferQueue: `SeqlenBalancedSampler`, Karmarkar-Karp on the tokens of groups."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.peers.loading import load, version_of
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered, in_one_micro_batch


def peer(folder: Path) -> Peer | None:
    """From the wheel unpacked in `folder`; None if it is not there."""
    if not (folder / "transfer_queue/sampler/seqlen_balanced_sampler.py").exists():
        return None
    module = load(folder, "transfer_queue.sampler")
    version = version_of(folder, "transferqueue")
    solve = partial(_sampled, module)
    return Peer("TransferQueue", version, {Corner.GROUPS: solve, Corner.EQUAL: solve})


def _sampled(module: Any, problem: Problem) -> Schedule:
    n, R, size = len(problem.lengths), problem.dp_size, 1
    if problem.group is not None:
        size = int((problem.group == problem.group[0]).sum())
    if n % (R * size):
        raise Unanswered(f"{n} samples are not as many groups of {size} on each of {R} ranks")
    meta = {i: {"total_lengths": count} for i, count in enumerate(problem.lengths.tolist())}
    partition = SimpleNamespace(get_custom_meta=lambda ids: {i: meta[i] for i in ids})
    sampler = module.SeqlenBalancedSampler(n_samples_per_prompt=size, dp_size=R)
    return in_one_micro_batch(
        [
            sampler.sample(
                list(range(n)), n // R, dp_rank=rank, batch_index=0, partition=partition
            )[0]
            for rank in range(R)
        ]
    )
