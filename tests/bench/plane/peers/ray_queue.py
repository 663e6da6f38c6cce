"""Ray: samples in the object store, references to them through `ray.util.queue.Queue`.

A producer puts a list of samples (dicts of numpy arrays, which Ray maps without a copy) into the
object store and its reference into the queue; a consumer takes a reference, gets the list, and
packs it into micro-batches of one array a field, as a trainer needs them.
"""

import time
from itertools import accumulate, cycle, islice
from typing import Any

import numpy as np
import ray
from ray.util.queue import Queue

from tests.bench.plane.peers.ray_actors import CONSUMERS, Receiving, load, make_pool, serve

#: Messages that wait in the queue at most.
QUEUED = 64


class Producer:
    """Sends runs."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._pool = queue, make_pool()

    def send(self, _run: int, batch: int, count: int) -> float:
        """Send so many samples; returns when that began."""
        samples = cycle(self._pool)
        began = time.monotonic()
        for _ in range(0, count, batch):
            self._queue.put([ray.put(list(islice(samples, batch)))])
        return began


class Consumer(Receiving):
    """Takes its share of a run."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def receive(self, _run: int, batch: int, count: int) -> float:
        """Take so many samples; returns when they were all checked."""
        for _ in range(0, count, batch):
            [reference] = self._queue.get()
            samples = ray.get(reference)
            for first in range(0, batch, load().micro_batch):
                self._micro_batch(samples[first : first + load().micro_batch])
        return self.done(count)

    def _micro_batch(self, samples: list[dict[str, Any]]) -> None:
        packed = {name: np.concatenate([it[name] for it in samples]) for name in samples[0]}
        bounds = np.array([0, *accumulate(len(it["input_ids"]) for it in samples)])
        self.checker.packed(packed, bounds, [""] * len(samples))


def main() -> None:
    """Serve until told to end."""

    def make_actors() -> tuple[Any, list[Any]]:
        queue = Queue(maxsize=QUEUED)
        consumer = ray.remote(Consumer)
        consumers = [consumer.remote(queue) for _ in range(CONSUMERS)]
        return ray.remote(Producer).remote(queue), consumers

    serve(make_actors)


if __name__ == "__main__":
    main()
