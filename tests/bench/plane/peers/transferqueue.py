"""TransferQueue: puts of jagged TensorDicts, gets by two consumers of one task.

Its defaults: SimpleStorage with two storage units, the sequential sampler; but consumers poll every
millisecond where nothing is ready, as its own waiting looks every 5 s only. A consumer asks for the
metadata of the next samples and then for their data, which comes as jagged tensors, packed already.
Clearing a run's partition is not in the time.
"""

import time
from itertools import cycle, islice
from typing import Any

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from tests.bench.plane.peers.ray_actors import CONSUMERS, Receiving, load, make_pool, serve


class Producer:
    """Sends runs, each in a partition of its own."""

    def __init__(self) -> None:
        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._pool = [
            {name: torch.from_numpy(value) for name, value in sample.items()}
            for sample in make_pool()
        ]

    def send(self, run: int, batch: int, count: int) -> float:
        """Put so many samples; returns when that began."""
        if run:
            self._client.clear_partition(partition_id=f"run-{run - 1}")
        samples = cycle(self._pool)
        began = time.monotonic()
        for _ in range(0, count, batch):
            members = list(islice(samples, batch))
            columns = {
                name: torch.nested.as_nested_tensor(
                    [it[name] for it in members], layout=torch.jagged
                )
                for name in members[0]
            }
            self._client.put(TensorDict(columns, batch_size=batch), partition_id=f"run-{run}")
        return began


class Consumer(Receiving):
    """Takes its share of a run."""

    def __init__(self) -> None:
        super().__init__()
        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._fields = list(load().fields(0))

    def receive(self, run: int, batch: int, count: int) -> float:
        """Get so many samples; returns when they were all checked."""
        left = count
        while left:
            meta = self._client.get_meta(
                data_fields=self._fields,
                batch_size=min(batch, left),
                partition_id=f"run-{run}",
                task_name="train",
            )
            if not meta.size:
                time.sleep(0.001)
                continue
            left -= meta.size
            self._check(self._client.get_data(meta), meta.size)
        return self.done(count)

    def _check(self, data: TensorDict, size: int) -> None:
        packed = {name: data[name].values().numpy() for name in self._fields}
        self.checker.packed(packed, data["input_ids"].offsets().numpy(), [""] * size)


def main() -> None:
    """Serve until told to end."""

    def make_actors() -> tuple[Any, list[Any]]:
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        consumer = ray.remote(Consumer)
        return ray.remote(Producer).remote(), [consumer.remote() for _ in range(CONSUMERS)]

    serve(make_actors)


if __name__ == "__main__":
    main()
