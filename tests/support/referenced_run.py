"""A run whose payloads lie in a payload store: pushed, trained on, and nothing left at its end."""

from pathlib import Path
from threading import Thread
from typing import Any

import torch

from rollout_workers import MicroBatchStream, RolloutProducer, RolloutSample
from rollout_workers.stores.registry import open_store
from tests.support.server import ServeProcess

SAMPLES, BATCH = 32, 8
#: Of each fourth sample; of the others half as much, which stays in the push.
LARGE_TOKENS = 20_000


def values(at: int) -> torch.Tensor:
    """What sample `at` consists of."""
    return torch.arange(LARGE_TOKENS if at % 4 == 0 else 100 + at) + at


def push(endpoint: str) -> None:
    """Everything, a few samples a push."""
    with RolloutProducer(endpoint) as producer:
        for first in range(0, SAMPLES, 4):
            producer.push_many(
                RolloutSample({"input_ids": values(at)}, f"s{at}") for at in range(first, first + 4)
            )
        producer.end_stream()


def trained_on(endpoint: str) -> dict[str, torch.Tensor]:
    """What the steps of a whole run consist of, by sample."""
    seen: dict[str, torch.Tensor] = {}
    with MicroBatchStream(endpoint) as stream:
        for step in stream:
            for micro_batch in step:
                ends = micro_batch.cu_seqlens.tolist()
                parts = torch.tensor_split(micro_batch["input_ids"], ends[1:-1])
                new = dict(zip(micro_batch.sample_ids, parts, strict=True))
                assert not new.keys() & seen.keys()
                seen |= {name: part.clone() for name, part in new.items()}
            step.commit()
    return seen


def train_on_references(folder: Path, address: str) -> None:
    """Assert that everything that is pushed is trained on once, as it was, and then freed."""
    options: dict[str, Any] = {
        "dp_size": 1,
        "global_batch_size": BATCH,
        "micro_batch_size": 4,
        "journal_dir": str(folder / "journal"),
        "sample_retention": "commit",
        "payload_stores": [address],
        "inline_limit": "64KiB",
    }
    with ServeProcess(folder, **options) as server:
        pushing = Thread(target=push, args=(server.endpoint,))
        pushing.start()
        seen = trained_on(server.endpoint)
        pushing.join()
        assert server.wait() == 0
    store = open_store(address)
    assert store.list("") == []
    store.close()
    assert len(seen) == SAMPLES
    for at in range(SAMPLES):
        assert torch.equal(seen[f"s{at}"], values(at))
