"""Runs of many seeds, some at a time, each in a process with one thread."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.convergence.policy import Policy
from tests.convergence.runs import ARMS, Arm, Run, Task, train

Runs = dict[Arm, Run]


def run_all(
    task: Task, first: Policy, seeds: Sequence[int], steps: int, processes: int
) -> Iterator[Runs]:
    """A run of each arm for every seed, in so many processes at a time."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "first.pt")
        torch.save(first, path)
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            job = partial(_run_seed, task=task, path=path, steps=steps)
            for seed, runs in zip(seeds, pool.map(job, seeds), strict=True):
                scores = "  ".join(f"{arm} {run.score:.4f}" for arm, run in runs.items())
                print(f"{task} seed {seed}: {scores}", flush=True)
                yield runs


def _run_seed(seed: int, task: Task, path: Path, steps: int) -> Runs:
    torch.set_num_threads(1)
    first = torch.load(path, weights_only=False)
    return {arm: train(task, arm, first, seed, steps) for arm in ARMS[task]}
