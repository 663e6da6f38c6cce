"""Measures what samples cost here: processor seconds to train on one, by length.

    python -m rollout_workers.demo.calibrate

Prints `{"lengths": [...], "seconds": [...], "slowdown": ...}`. The best of several runs, as other
processes only ever make a run slower; `slowdown` is by how much they did, wall over processor time.
"""

import json
import time

import torch

from rollout_workers.demo.model import Transformer, token_losses

LENGTHS = (64, 256, 512, 1024, 2048, 4096, 6144)
REPEATS = 3


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    model = Transformer()
    _train_on(model, max(LENGTHS))  # the first pass allocates
    began, cpu_began = time.perf_counter(), time.thread_time()
    seconds = [min(_train_on(model, tokens) for _ in range(REPEATS)) for tokens in LENGTHS]
    slowdown = (time.perf_counter() - began) / (time.thread_time() - cpu_began)
    print(json.dumps({"lengths": LENGTHS, "seconds": seconds, "slowdown": slowdown}))  # noqa: T201


def _train_on(model: Transformer, tokens: int) -> float:
    ids = torch.zeros(tokens, dtype=torch.long)
    began = time.thread_time()
    loss = token_losses(model(ids, torch.arange(tokens), [0, tokens]), ids).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return time.thread_time() - began


if __name__ == "__main__":
    main()
