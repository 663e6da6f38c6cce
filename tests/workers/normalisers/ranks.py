"""What is started on each of two ranks: totals that are taken, and those that fail.

    ranks.py RANK STORE ENDPOINT FOLDER

ENDPOINT is of a dispatcher whose first step has a weight below 0. Prints one line a finding.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import torch
import torch.distributed as dist

from rollout_dispatcher.errors import DispatcherError, GenerationFenced
from rollout_workers import Loss, MicroBatchStream
from rollout_workers.micro_batch.loss import FloatArray
from rollout_workers.micro_batch.totals import RankTotals
from rollout_workers.process_group import Place


def main(rank: int, store: str, endpoint: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    fine = RankTotals(Place(rank, 2), None, lambda: None)

    def total(what: str, *values: float) -> str:
        return complaint(lambda: fine.total(what, lambda: np.array(values)))

    print("sum:", total("numbers", rank + 0.5, 10.0))
    print("length:", total("it", *[1.0] * (rank + 1)))
    print("what:", total(f"rank {rank}", 1.0))
    print("failed:", complaint(lambda: fine.total("numbers", lambda: broken(rank))))
    print("again:", total("numbers", 1.0))
    train(endpoint)
    fence(rank, folder / "done")


def complaint(taken: Callable[[], object]) -> str:
    try:
        return str(taken())
    except (DispatcherError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"


def broken(rank: int) -> FloatArray:
    return np.array([1.0 / rank])


def train(endpoint: str) -> None:
    """Each rank iterates steps of a stream; the first one cannot be, on either of them."""
    with MicroBatchStream(endpoint, losses={"kl": Loss(weights="kl")}) as stream:
        bad, good = next(stream), next(stream)
        print("step:", complaint(lambda: list(bad)))
        print("next step:", [one.loss_scales["kl"] for one in good])
        print("total:", good.reduce_total(2.0), good.reduce_total(torch.ones(2, 1)).tolist())
        print("shapes:", complaint(lambda: good.reduce_total([1.0] * (dist.get_rank() + 1))))


def fence(rank: int, done: Path) -> None:
    """Rank 1 does not come, and rank 0 hears that its stream has ended."""
    until = monotonic() + 0.2

    def check() -> None:
        if monotonic() > until:
            raise GenerationFenced("DP rank 1 was lost")

    if rank == 0:
        deaf = RankTotals(Place(0, 2), None, check)
        print("fenced:", complaint(lambda: deaf.total("numbers", lambda: np.ones(1))))
        done.touch()
    while not done.exists():
        sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
