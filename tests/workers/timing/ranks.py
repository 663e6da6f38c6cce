"""Ranks that train for real, time what they compute themselves, and are timed; run under torchrun.

    torchrun ... tests/workers/timing/ranks.py --model ddp fsdp2 --slow 1.4 --out FOLDER

Rank 1 takes `--slow` times as long for the same work. Every rank writes a line of JSON a step into
a file for each model: what was told of it, and what the clocks round its own work say.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rollout_dispatcher.protocol.messages import StepTimes
from rollout_workers.timing.timing import Timing

BLOCKS, WIDTH = 3, 64
#: by-hand: gradients are reduced after the step; unknown: so is something in every micro-batch.
MODELS = ["ddp", "fsdp2", "by-hand", "unknown"]
#: Steps of which the first are left out: models are made ready in them.
WARM = 2


class Work:
    """So many seconds of it; counts what it really took."""

    def __init__(self, kind: str) -> None:
        self.spent_s = 0.0
        self._do = {"sleep": time.sleep, "matmul": self._multiply}[kind]

    def __call__(self, seconds: float) -> None:
        began = time.perf_counter()
        self._do(seconds)
        self.spent_s += time.perf_counter() - began

    def take(self) -> float:
        """Since this was asked last."""
        spent, self.spent_s = self.spent_s, 0.0
        return spent

    def _multiply(self, seconds: float) -> None:
        """On a machine with a core for each rank half a millisecond each."""
        matrix = torch.ones(192, 192)
        for _ in range(int(seconds / 0.0005)):
            matrix @ matrix


class Works(torch.autograd.Function):
    """The identity; a third of the work forward, the rest backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, work: Work, seconds: float) -> Tensor:
        ctx.work, ctx.seconds = work, seconds
        work(seconds / 3)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.work(ctx.seconds * 2 / 3)
        return *grads, None, None


class Net(nn.Module):
    """Linear layers with work between them, and a buffer that DDP broadcasts."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.layers = work, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor, seconds: float) -> Tensor:
        for layer in self.layers:
            done: Tensor = Works.apply(  # type: ignore[no-untyped-call]
                hidden, self.work, seconds / BLOCKS
            )
            hidden = layer(done).relu()
        return hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--work", choices=["sleep", "matmul"], default="sleep")
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = Work(args.work)
    for model in args.model:
        torch.manual_seed(0)
        with (args.out / f"{model}.rank{dist.get_rank()}.jsonl").open("w") as lines:
            for seen in train(model, args, work):
                lines.write(json.dumps(seen) + "\n")
        dist.barrier()
    dist.destroy_process_group()


def train(kind: str, args: argparse.Namespace, work: Work) -> Any:
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), 3
    device = torch.device(args.device)
    model, sync = wrapped(kind, Net(work).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[StepTimes] = []
    timing = Timing(told.append, dp_size=ranks, dp_ranks=None, device=device, says_why=True)
    slow = args.slow if rank == 1 else 1.0
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        costs = args.unit * (1 + 3 * torch.rand(ranks, count, generator=generator))
        timer, spent = timing.begin(step, count), []
        assert timer is not None
        for index in range(count):
            timer.hand_out(index)
            with sync(index == count - 1):
                hidden = torch.randn(4, WIDTH, device=device, requires_grad=True)
                model(hidden, float(costs[rank, index]) * slow).sum().backward()
            if kind == "unknown":
                dist.all_reduce(torch.zeros(1))
            timer.asked(index)
            spent.append(work.take())
        if kind == "by-hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        timing.finish(timer)
        if device.type == "cuda":
            torch.cuda.synchronize()
            timing.flush()
        (times,) = told
        told.clear()
        if step >= WARM:
            yield {
                "step": step, "key": times.cost_key, "why": times.why, "spent_s": spent,
                "busy_s": times.busy_s, "collective_s": times.collective_s,
            }  # fmt: skip


def shard(net: Net) -> None:
    """Each layer by itself, on the CPU also where there is a GPU."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def wrapped(kind: str, net: Net) -> tuple[nn.Module, Callable[[bool], AbstractContextManager[Any]]]:
    """The model, and what a micro-batch is computed in, told whether it is the last."""
    if kind == "ddp":
        model = DistributedDataParallel(net)
        return model, lambda last: nullcontext() if last else model.no_sync()
    if kind == "fsdp2":  # with collectives in every micro-batch
        shard(net)
    return net, lambda _last: nullcontext()


if __name__ == "__main__":
    main()
