"""What a test starts as a process of its own: clients in DataLoader workers and in forked children.

    processes.py CASE ENDPOINT

Prints, as one line of JSON, what was raised where; the parent's own client has to be unharmed.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader, IterableDataset

from rollout_dispatcher.errors import DispatcherError
from rollout_workers import (
    AsyncRolloutProducer,
    MicroBatch,
    MicroBatchStream,
    RankClient,
    RolloutProducer,
    StreamDataset,
)
from rollout_workers.rank.client import RankStep

FIELDS = {"input_ids": [1, 2, 3]}


class MicroBatches(IterableDataset[MicroBatch]):
    """The micro-batches of a stream that is made by whom iterates."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(StreamDataset(join(self._endpoint)))


def join(endpoint: str) -> MicroBatchStream:
    return MicroBatchStream(endpoint, dp_rank=0, dp_size=1)


def loader(endpoint: str, made: str, context: str) -> object:
    """What iterating a loader comes to, then the parent's own stream if it has one."""
    stream = join(endpoint) if made == "before" else None
    data = MicroBatches(endpoint) if stream is None else StreamDataset(stream)
    loading = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=context)
    found = attempt(lambda: [batch.input_ids.tolist() for batch in loading])
    own = attempt(lambda: [[b.input_ids.tolist() for b in s] for s in stream]) if stream else None
    return {"loader": found, "own": own}


def attempt(action: Callable[[], object]) -> object:
    try:
        return action()
    except DispatcherError as error:
        return f"{type(error).__name__}: {error}"


def fork(child: Callable[[], object], leave: Callable[[int], object] = sys.exit) -> object:
    """What the child says; it exits as a Python process does, with its exit hooks."""
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.close(readable)
        with os.fdopen(writable, "w") as out:
            out.write(json.dumps(child()))
        leave(0)
    os.close(writable)
    with os.fdopen(readable) as answers:
        text = answers.read()
    assert os.wait()[1] == 0
    return json.loads(text)


def train(step: RankStep) -> int:
    """How many micro-batches the step has."""
    count = len(list(step))
    step.commit()
    return count


def forked_rank(endpoint: str) -> object:
    client = RankClient(endpoint, dp_rank=0, dp_size=1)
    step = client.next_step()
    assert step is not None
    calls: list[Callable[[], object]] = [
        client.next_step,
        step.commit,
        lambda: next(iter(step)),
        lambda: client.set_policy_version(1),
        lambda: client.checkpoint_saved(0),
        lambda: client.position,
        client.statistics,
        client.close,
    ]
    answers = fork(lambda: [attempt(call) for call in calls])
    return {"child": answers, "own": attempt(lambda: train(step))}


def forked_producer(endpoint: str) -> object:
    producer = RolloutProducer(endpoint)
    calls: list[Callable[[], object]] = [
        lambda: producer.push(FIELDS),
        lambda: producer.push_many([FIELDS]),
        lambda: producer.close_group("g"),
        producer.end_stream,
        producer.close,
    ]
    answers = fork(lambda: [attempt(call) for call in calls])
    return {"child": answers, "own": attempt(lambda: producer.push(FIELDS))}


def forked_async_producer(endpoint: str) -> object:
    async def use() -> object:
        async with AsyncRolloutProducer(endpoint) as producer:
            # Not through the parent's loop: that would take its sockets from the epoll they share.
            answers = fork(lambda: asyncio.run(in_child(producer)), leave=os._exit)
            return {"child": answers, "own": await producer.push(FIELDS)}

    async def in_child(producer: AsyncRolloutProducer) -> list[object]:
        answers: list[object] = []
        for work in (producer.push(FIELDS), producer.end_stream(), producer.close()):
            try:
                answers.append(await work)
            except DispatcherError as error:
                answers.append(f"{type(error).__name__}: {error}")
        return answers

    return asyncio.run(use())


CASES: dict[str, Callable[[str], object]] = {
    "rank": forked_rank,
    "producer": forked_producer,
    "async-producer": forked_async_producer,
    "before-fork": lambda endpoint: loader(endpoint, "before", "fork"),
    "before-spawn": lambda endpoint: loader(endpoint, "before", "spawn"),
    "inside-fork": lambda endpoint: loader(endpoint, "inside", "fork"),
    "inside-spawn": lambda endpoint: loader(endpoint, "inside", "spawn"),
}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](sys.argv[2])), flush=True)
