"""A Ray driver that embeds the dispatcher: rollout actors push to it, trainer actors stream.

    python examples/ray_driver.py

The dispatcher lives on the driver's event loop, beside the calls to actors; its sample bytes go
from actor to driver to actor by its own protocol, not through Ray's object store. The trainer
actors form a torch process group; on several machines the driver listens on an address that all of
them reach, with a token (see README, Security).
"""

import asyncio
import random
from contextlib import nullcontext
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from rollout_dispatcher import Dispatcher, ServeConfig
from rollout_workers import AsyncRolloutProducer, MicroBatchStream, RolloutProducer

RANKS, ROLLOUTS, SAMPLES = 2, 2, 128
VOCABULARY = 64


async def drive() -> dict[str, Any]:
    """Start actors and dispatcher, train until everything that was pushed is trained on."""
    # integration: begin
    config = ServeConfig(
        dp_size=RANKS,
        global_batch_size=32,
        micro_batch_tokens=512,
        listen=["127.0.0.1:0"],
        http="127.0.0.1:0",  # any free ports
    )
    async with Dispatcher(config) as dispatcher:
        trainers = [Trainer.remote() for _ in range(RANKS)]  # type: ignore[attr-defined]
        rollouts = [
            Rollout.remote(seed)  # type: ignore[attr-defined]
            for seed in range(ROLLOUTS)
        ]
        port = await trainers[0].open_store.remote()
        training = [
            trainer.train.remote(rank, port, dispatcher.endpoint)
            for rank, trainer in enumerate(trainers)
        ]
        await asyncio.gather(*(each.push.remote(dispatcher.endpoint) for each in rollouts))
        async with AsyncRolloutProducer(dispatcher.endpoint) as producer:
            await producer.end_stream(force=True)  # all of them have pushed what they had
        losses = await asyncio.gather(*training)  # an actor's error is raised here
        everything = await dispatcher.drained()
    # integration: end
    done = dispatcher.statistics()
    return {
        "losses": losses[0],
        "pushed": done.accepted,
        "trained on": done.samples_committed,
        "everything": everything,
    }


@ray.remote(num_cpus=0)
class Rollout:
    """Generates and pushes; when the buffer is full, `push` waits."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def push(self, endpoint: str) -> None:
        """Push a share of the samples."""
        with RolloutProducer(endpoint) as producer:
            for _ in range(SAMPLES // ROLLOUTS):
                producer.push(self.sequence())

    def sequence(self) -> dict[str, list[int]]:
        """What stands in for a rollout: a count in steps, mostly short and now and then long."""
        tokens = min(256, int(4 * self.chance.paretovariate(1.2)))
        first, by = self.chance.randrange(8), self.chance.choice((1, 2))
        return {"input_ids": [(first + by * place) % VOCABULARY for place in range(tokens)]}


@ray.remote(num_cpus=0)
class Trainer:
    """A DP rank."""

    def open_store(self) -> int:
        """In rank 0: where the process group meets; returns its port."""
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self.store.port)

    def train(self, rank: int, port: int, endpoint: str) -> list[float]:
        """Train until the stream ends; the loss of every step."""
        torch.manual_seed(0)
        store = self.store if rank == 0 else TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        model = DistributedDataParallel(
            nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        found = []
        with MicroBatchStream(endpoint, epochs=1) as stream:
            for step in stream:
                lost = torch.zeros(())
                for micro_batch in step:
                    with nullcontext() if micro_batch.is_last else model.no_sync():
                        ids = micro_batch.input_ids
                        losses = cross_entropy(model(ids[:-1]), ids[1:], reduction="none")
                        weighted = (pad(losses, (1, 0)) * micro_batch.loss_weights).sum()
                        (weighted * micro_batch.loss_scale).backward()
                    lost += weighted.detach()
                optimizer.step()
                optimizer.zero_grad()
                step.commit()
                dist.all_reduce(lost)
                found.append(float(lost / step.loss_tokens))
        dist.destroy_process_group()
        return found


def main() -> None:
    """Run on this machine, in a Ray of its own."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    try:
        print(asyncio.run(drive()))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
