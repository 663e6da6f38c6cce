"""A stream as torch knows data: a dataset in a loader, its state in files, processes by spawn."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

from rollout_dispatcher.errors import StepContractError
from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer, Step, StreamDataset
from tests.support.server import ServeProcess

#: Three steps of two micro-batches of a sample each, on one rank.
SERVE: dict[str, Any] = {"global_batch_size": 2, "micro_batch_size": 1, "strategy": "round-robin"}
SAMPLES, STEPS = 6, 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    with ServeProcess(tmp_path, warm=True, dp_size=1, buffer_capacity=99, **SERVE) as serving:
        push(serving.endpoint)
        yield serving


def push(endpoint: str) -> None:
    with RolloutProducer(endpoint) as producer:
        for index in range(SAMPLES):
            producer.push({"input_ids": [index, index]})
        producer.end_stream()


def loader_of(dataset: StreamDataset) -> Any:
    return DataLoader(dataset, batch_size=None)


def test_a_loader_hands_out_micro_batches_as_they_are(server: ServeProcess) -> None:
    seen = []
    with MicroBatchStream(server.endpoint) as stream:
        dataset = StreamDataset(stream)
        for micro_batch in loader_of(dataset):
            assert isinstance(micro_batch, MicroBatch)
            seen.append((micro_batch.step, micro_batch.is_last, len(micro_batch.input_ids)))
            assert stream.statistics().steps_committed == micro_batch.step  # those before
        assert stream.statistics().steps_committed == STEPS
        assert list(loader_of(dataset)) == []
    assert seen == [(step, last, 2) for step in range(STEPS) for last in (False, True)]


def gathered(step: Step) -> Iterator[MicroBatch]:
    """All micro-batches of a step are taken before the first is handed out."""
    return iter(list(step))


def twice(step: Step) -> Iterator[MicroBatch]:
    return chain(step, step)


@pytest.mark.parametrize(
    ("of_step", "taken", "items"),
    [(iter, 1, [0, 1]), (gathered, 1, [0, 1]), (twice, 3, [0, 1, 0, 1])],
)
def test_a_step_is_half_way_until_all_that_is_made_of_it_was_handed_out(
    server: ServeProcess, of_step: Callable[[Step], Iterator[MicroBatch]], taken: int, items: Any
) -> None:
    with MicroBatchStream(server.endpoint) as stream:
        dataset = StreamDataset(stream, of_step)
        seen, states = [], []
        for batch in dataset:
            seen.append((batch.step, batch.index))
            states.append(dataset.state_dict()["step"])
            if len(seen) == taken:
                break
        assert states == [-1] * taken
        for batch in dataset:
            assert dataset.step is not None
            assert dataset.step.number == batch.step
            seen.append((batch.step, batch.index))
            states.append(dataset.state_dict()["step"])
    assert seen[taken:] == [(step, index) for step in range(STEPS) for index in items]
    before = [-1] * (len(items) - 1)
    assert states[taken:] == [step + less for step in range(STEPS) for less in [*before, 0]]


def test_the_last_step_of_a_loop_that_breaks_off_is_committed_by_hand(server: ServeProcess) -> None:
    with MicroBatchStream(server.endpoint) as stream:
        dataset = StreamDataset(stream)
        batches = iter(loader_of(dataset))
        next(batches)
        dataset.commit()  # half of it was handed out
        assert stream.statistics().steps_committed == 0
        next(batches)
        dataset.commit()
        dataset.commit()
        assert stream.statistics().steps_committed == 1


def test_a_state_comes_back_from_a_file_without_unpickling_code(
    server: ServeProcess, tmp_path: Path
) -> None:
    with MicroBatchStream(server.endpoint) as stream:
        dataset = StreamDataset(stream)
        list(zip(range(2), dataset, strict=False))
        torch.save(dataset.state_dict(), tmp_path / "state.pt")
    with MicroBatchStream(server.endpoint) as stream:
        dataset = StreamDataset(stream)
        dataset.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert [batch.step for batch in dataset] == [1, 1, 2, 2]


def test_micro_batches_that_are_never_made_use_of_are_logged(server: ServeProcess) -> None:
    with MicroBatchStream(server.endpoint) as stream:
        firsts = StreamDataset(stream, lambda step: [next(iter(step))])
        with pytest.raises(StepContractError, match="1 of its 2 micro-batches were handed out"):
            list(firsts)


@pytest.mark.e2e
def test_ranks_that_are_started_by_spawn_train(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, dp_size=2, buffer_capacity=99, **SERVE) as server:
        push(server.endpoint)
        spawn(rank, (server.endpoint, str(tmp_path / "store")), nprocs=2)  # type: ignore[no-untyped-call]
        assert server.wait() == 0  # every step is committed


def rank(index: int, endpoint: str, store: str) -> None:
    """One rank, in a process of its own."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    with MicroBatchStream(endpoint) as stream:
        assert len(list(StreamDataset(stream))) == STEPS
    dist.destroy_process_group()
