"""Runs of many seeds, some at a time, each in a process with one thread."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.convergence.policy import Policy
from tests.convergence.runs import Arm, Loop, Run, train

Runs = dict[Arm, Run]


def run_all(
    loop: Loop, first: Policy, seeds: Sequence[int], steps: int, processes: int
) -> Iterator[Runs]:
    """A run of each arm for every seed, in so many processes at a time."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "first.pt")
        torch.save(first.state_dict(), path)
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            job = partial(_run_seed, loop=loop, path=path, steps=steps)
            for seed, runs in zip(seeds, pool.map(job, seeds), strict=True):
                rewards = "  ".join(f"{arm} {run.reward:.4f}" for arm, run in runs.items())
                print(f"{loop} seed {seed}: {rewards}", flush=True)
                yield runs


def _run_seed(seed: int, loop: Loop, path: Path, steps: int) -> Runs:
    torch.set_num_threads(1)
    first = Policy()
    first.load_state_dict(torch.load(path))
    return {arm: train(loop, arm, first, seed, steps) for arm in Arm}
