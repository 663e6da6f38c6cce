"""slime, and miles, which has its interface: first fit over all, then Karmarkar-Karp on bins."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.peers.loading import commit_of, load
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered


def peer(folder: Path, name: str = "slime") -> Peer | None:
    """From a clone; None if it is not there."""
    if not (folder / name / "utils/dp_schedule.py").exists():
        return None
    solve = partial(_schedule, load(folder, f"{name}.utils.dp_schedule"))
    corners = (Corner.BUDGET, Corner.COUNT, Corner.MULTIPLE)
    return Peer(name, commit_of(folder), dict.fromkeys(corners, solve))


miles = partial(peer, name="miles")


def _schedule(module: Any, problem: Problem) -> Schedule:
    n, R = len(problem.lengths), problem.dp_size
    # Its FLOPs are those of a model; what is compared is one cost, so it gets this one.
    module.calculate_fwd_flops = lambda lengths, _: int(problem.cost(np.array(lengths)).sum())
    asked = SimpleNamespace(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=problem.micro_batch_tokens,
        balance_data=True,
        balance_by_flops=False,
    )
    pipeline = {
        "dp_size": R,
        "cp_size": 1,
        "vpp_size": 2 if problem.multiple > 1 else 1,
        "microbatch_group_size_per_vp_stage": problem.multiple,
    }
    try:
        ranks, micro_batches, _, _ = module.build_dp_schedule(
            asked,
            pipeline,
            problem.lengths.tolist(),
            global_batch_size=n,
            rollout_indices=list(range(n)),
        )
    except AssertionError as error:
        raise Unanswered(str(error)) from error
    return [
        [[rank[i] for i in part] for part in parts]
        for rank, parts in zip(ranks, micro_batches, strict=True)
    ]
