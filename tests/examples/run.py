"""Examples as their users start them: real processes, on the addresses of a real dispatcher."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_workers import RolloutProducer
from tests.e2e.harness import finish, running
from tests.support.server import ServeProcess
from tests.support.source import ROOT

EXAMPLES = ROOT / "examples"
VOCABULARY = 60

Sample = Mapping[str, Any]


def example(name: str, *arguments: object) -> Any:
    """One process of `examples/NAME`, as a context manager."""
    return running(sys.executable, str(EXAMPLES / name), *map(str, arguments))


def torchrun(folder: Path, ranks: int, name: str, *arguments: object) -> Any:
    """`ranks` processes of `examples/NAME` under torchrun, as a context manager."""
    return _torchrun(folder, ranks, [str(EXAMPLES / name), *map(str, arguments)])


def _torchrun(folder: Path, ranks: int, command: list[str]) -> Any:
    return running(
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "--log-dir", str(folder / "torchrun"), *command,
    )  # fmt: skip


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


def gradient_difference(folder: Path, name: str, *arguments: str, pushed: list[Sample]) -> float:
    """Largest difference of the first step's gradients from those of one process on one big batch.

    Over the largest gradient. The example runs as it stands, on two ranks with many micro-batches
    and on one with one.
    """
    found = {}
    for ranks, budget in ((2, 64), (1, 1 << 16)):
        at = folder / f"ranks-{ranks}"
        at.mkdir()
        gradients = at / "gradients.pt"
        command = ["-m", "tests.examples.recorded", str(gradients), str(EXAMPLES / name)]
        with ServeProcess(
            at, dp_size=ranks, dispatch_batch_size=len(pushed), micro_batch_tokens=budget
        ) as server:
            push(server, pushed)
            words = [word.replace("ENDPOINT", server.endpoint) for word in arguments]
            with _torchrun(at, ranks, [*command, *words]) as process:
                finish(process)
            assert server.wait() == 0
        found[ranks] = torch.load(gradients, weights_only=True)
    largest = max(float(each.abs().max()) for each in found[1])
    pairs = zip(found[1], found[2], strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs) / largest


__all__ = ["example", "finish", "gradient_difference", "push", "samples", "torchrun"]
