"""A model whose work takes as long as a test says, for ranks that are timed: plain, DDP, FSDP2."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rollout_workers.timing.timing import StepTimer, Timing

BLOCKS, WIDTH = 3, 64


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


def computed(timing: Timing, step: int, count: int, work: Callable[[int], object]) -> StepTimer:
    """A loop over a step's micro-batches, which are worked on by their index."""
    timer = timing.begin(step, count)
    assert timer is not None
    for index in range(count):
        timer.hand_out(index)
        work(index)
        timer.asked(index)
    return timer


def shard(net: Net) -> None:
    """Each layer by itself, on the CPU also where there is a GPU."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def wrapped(kind: str, net: Net) -> tuple[nn.Module, Callable[[bool], AbstractContextManager[Any]]]:
    """The model, and what a micro-batch is computed in, by whether it is the last."""
    if kind == "ddp":
        model = DistributedDataParallel(net)
        return model, lambda last: nullcontext() if last else model.no_sync()
    if kind == "fsdp2":  # with collectives in every micro-batch
        shard(net)
    return net, lambda _last: nullcontext()
