"""torchdata's `StatefulDataLoader`: its state holds the stream's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from rollout_workers import MicroBatchStream, RolloutProducer, StreamDataset
from tests.support.server import ServeProcess

#: Three steps of two micro-batches of a sample each, on one rank.
SERVE: dict[str, Any] = {"global_batch_size": 2, "micro_batch_size": 1, "strategy": "round-robin"}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    journal = SERVE | {"journal_dir": tmp_path / "journal"}
    with ServeProcess(tmp_path, dp_size=1, buffer_capacity=99, **journal) as server:
        with RolloutProducer(server.endpoint) as producer:
            for index in range(6):
                producer.push({"input_ids": [index, index]})
            producer.end_stream()
        yield server.endpoint


def loader_of(stream: MicroBatchStream) -> StatefulDataLoader:
    return StatefulDataLoader(StreamDataset(stream), batch_size=None)


@pytest.mark.parametrize(("handed_out", "rest"), [(2, 4), (3, 4), (4, 2)])
def test_it_goes_on_at_the_first_step_that_its_state_does_not_hold(
    endpoint: str, tmp_path: Path, handed_out: int, rest: int
) -> None:
    with MicroBatchStream(endpoint) as stream:
        loader = loader_of(stream)
        seen = [
            batch.input_ids.tolist() for _, batch in zip(range(handed_out), loader, strict=False)
        ]
        torch.save(loader.state_dict(), tmp_path / "state.pt")
        for _, batch in zip(range(2), loader, strict=False):  # trained and lost
            assert len(batch.input_ids) == 2
    with MicroBatchStream(endpoint) as stream:
        loader = loader_of(stream)
        loader.load_state_dict(torch.load(tmp_path / "state.pt"))
        after = [batch.input_ids.tolist() for batch in loader]
    assert len(after) == rest
    assert seen[: 6 - rest] + after == [[index, index] for index in range(6)]
