"""OpenRLHF: the longest samples beside the shortest, in turn."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.peers.loading import commit_of, load
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered, in_one_micro_batch

_MODULE = "openrlhf.trainer.ppo_utils.experience"


def peer(folder: Path) -> Peer | None:
    """From a clone; None if it is not there."""
    if not folder.joinpath(*_MODULE.split(".")).with_suffix(".py").exists():
        return None
    module = load(folder, _MODULE, ["openrlhf.utils.utils"])
    module.split_experience_batch = lambda item: [item]
    module.make_experience_batch = list
    return Peer("OpenRLHF", commit_of(folder), {Corner.EQUAL: partial(_interleaved, module)})


def _interleaved(module: Any, problem: Problem) -> Schedule:
    n, R = len(problem.lengths), problem.dp_size
    if n % R:
        raise Unanswered(f"{n} samples are not as many on each of {R} ranks")
    lengths = problem.lengths.tolist()
    items = [SimpleNamespace(total_length=count, index=i) for i, count in enumerate(lengths)]
    args = SimpleNamespace(
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=R),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )
    ranks = module.balance_experiences(items, args)
    return in_one_micro_batch([[item.index for item in rank] for rank in ranks])
