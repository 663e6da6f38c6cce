"""A controller: one asyncio process that embeds the dispatcher and runs everything round it.

    python examples/controller.py

It starts rollout workers and a torchrun of trainers, has the workers generate one policy version
after the other (on-policy: a phase is trained on whole before the next begins), watches the
dispatcher's statistics, ends phases and the stream, and waits until everything is trained on. When
one of its processes fails, it ends the others and itself.
"""

import argparse
import asyncio
import random
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from rollout_dispatcher import Dispatcher, ServeConfig
from rollout_workers import AsyncRolloutProducer, MicroBatchStream, RolloutProducer

RANKS, WORKERS, PHASES = 2, 2, 3
BATCH, STEPS_A_PHASE = 16, 4
VOCABULARY = 64


# -- the controller ---------------------------------------------------------------------------


async def control() -> None:
    """Run `PHASES` policy versions, from the first rollout to the last commit."""
    config = ServeConfig(
        dp_size=RANKS,
        global_batch_size=BATCH,
        micro_batch_tokens=512,
        max_staleness=0,  # on-policy: a step has only samples of the version that it trains, ...
        steps_per_version=STEPS_A_PHASE,  # ... of which the trainer takes several steps
        listen=["127.0.0.1:0"],
        http="127.0.0.1:0",  # any free ports
    )
    async with Dispatcher(config) as dispatcher, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch(dispatcher))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        await start(tasks, *torchrun, __file__, "train", dispatcher.endpoint)
        workers = [
            await start(tasks, __file__, "rollout", dispatcher.endpoint, f"{seed}", pipe=PIPE)
            for seed in range(WORKERS)
        ]
        async with AsyncRolloutProducer(dispatcher.endpoint) as phases:  # says when they end
            for version in range(PHASES):
                await asyncio.gather(*(generate(worker, version) for worker in workers))
                await phases.end_phase(version + 1, force=True)
                while dispatcher.statistics().policy_version != version + 1:
                    await asyncio.sleep(0.02)
            await phases.end_stream(force=True)
        for worker in workers:
            worker.stdin.close()  # type: ignore[union-attr]
        everything = await dispatcher.drained()
        watching.cancel()
    done = dispatcher.statistics()
    print(f"trained on {done.samples_committed} of {done.accepted} samples, all: {everything}")


async def watch(dispatcher: Dispatcher) -> None:
    """Print what the dispatcher holds and has done, whenever it is something else."""
    before = None
    while True:
        now = dispatcher.statistics()
        line = (
            f"version {now.policy_version}: {now.buffered} buffered, {now.in_flight} in flight, "
            f"{now.steps_committed} steps committed"
        )
        if line != before:
            print(line, flush=True)
        before = line
        await asyncio.sleep(0.1)


async def start(tasks: asyncio.TaskGroup, *words: str, pipe: int | None = None) -> Process:
    """Start a Python process that ends with these tasks, and they with it if it fails."""
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)
    tasks.create_task(owned(process, words))
    return process


async def owned(process: Process, words: tuple[str, ...]) -> None:
    """Wait for a process; raises if it failed."""
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
    if code:
        raise RuntimeError(f"{' '.join(words)} ended with {code}")


async def generate(worker: Process, version: int) -> None:
    """Have a worker push its share of a phase; returns once the dispatcher has all of it."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{version}\n".encode())
    await worker.stdout.readline()


# -- a rollout worker -------------------------------------------------------------------------


def rollout(endpoint: str, seed: int) -> None:
    """Push a share of each phase that standard input names, then say so on standard output."""
    chance = random.Random(seed)
    with RolloutProducer(endpoint) as producer:
        for line in sys.stdin:
            for _ in range(BATCH * STEPS_A_PHASE // WORKERS):
                producer.push(sequence(chance), policy_version=int(line))
            print("done", flush=True)


def sequence(chance: random.Random) -> dict[str, list[int]]:
    """What stands in for a rollout: a count in steps, mostly short and now and then long."""
    tokens, first, by = (
        int(4 * chance.paretovariate(1.2)),
        chance.randrange(8),
        chance.choice((1, 2)),
    )
    ids = [(first + by * place) % VOCABULARY for place in range(min(tokens, 256))]
    return {"input_ids": ids}  # no loss_mask: all tokens but the first are targets


# -- a trainer --------------------------------------------------------------------------------


def train(endpoint: str) -> None:
    """A DP rank, until the stream ends."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    with MicroBatchStream(endpoint, epochs=1) as stream:
        stream.set_policy_version(0)
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
            # Here the new weights would go to the rollout workers, before their version is named.
            stream.set_policy_version((step.number + 1) // STEPS_A_PHASE)
            dist.all_reduce(lost)
            if dist.get_rank() == 0:
                print(f"step {step.number}: loss {lost / step.loss_tokens:.3f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """The controller, or one of the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "role", nargs="?", default="control", choices=["control", "rollout", "train"]
    )
    parser.add_argument("endpoint", nargs="?", help="of the dispatcher; the controller has its own")
    parser.add_argument("seed", nargs="?", type=int)
    args = parser.parse_args()
    if args.role == "train":
        train(args.endpoint)
    elif args.role == "rollout":
        rollout(args.endpoint, args.seed)
    else:
        asyncio.run(control())


if __name__ == "__main__":
    main()
