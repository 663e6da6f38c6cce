"""Examples as their users start them: real processes, on the addresses of a real dispatcher."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollout_workers import RolloutProducer
from tests.e2e.harness import finish, running
from tests.support.server import ServeProcess
from tests.support.source import ROOT
from tests.support.torchrun import torchrun_command

EXAMPLES = ROOT / "examples"
VOCABULARY = 60

Sample = Mapping[str, Any]


def example(name: str, *arguments: object, **env: str) -> Any:
    """One process of `examples/NAME`, as a context manager."""
    return running(sys.executable, str(EXAMPLES / name), *map(str, arguments), **env)


def torchrun(folder: Path, ranks: int, name: str, *arguments: object, **env: str) -> Any:
    """`ranks` processes of `examples/NAME` under torchrun, as a context manager.

    name: or the absolute path of a program that runs an example.
    """
    return running(
        *torchrun_command(ranks, folder), str(EXAMPLES / name), *map(str, arguments), **env
    )


def samples(count: int, *, longest: int = 48, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of very different lengths, whose first tokens are no targets."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = int(2 + (longest - 2) * random.random() ** 3)
        ids = (random.integers(3, 9) * np.arange(tokens) + random.integers(9)) % VOCABULARY
        found.append({"input_ids": ids, "loss_mask": np.arange(tokens) >= max(1, tokens // 3)})
    return found


def push(server: ServeProcess, fields: Iterable[Sample], **options: Any) -> None:
    """Push samples, named by their place, and end the stream."""
    with RolloutProducer(server.endpoint) as producer:
        for number, each in enumerate(fields):
            producer.push(each, sample_id=str(number), **options)
        producer.end_stream()


__all__ = ["EXAMPLES", "Sample", "example", "finish", "push", "samples", "torchrun"]
