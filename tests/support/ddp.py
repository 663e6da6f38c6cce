"""What the trainers of the tests learn: a next to trivial model, as DDP users write its loop."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch

VOCABULARY = 64


@contextmanager
def process_group() -> Iterator[None]:
    """That of gloo, from the environment; computing takes one thread, as others share the cores."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def network(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)).to(dtype)


def learn(model: DistributedDataParallel, micro_batch: MicroBatch) -> None:
    """Forward and backward of one micro-batch; gradients meet at the step's last."""
    with nullcontext() if micro_batch.is_last else model.no_sync():
        ids = micro_batch.input_ids % VOCABULARY
        losses = nn.functional.cross_entropy(model(ids), ids, reduction="none")
        loss = (losses * micro_batch.loss_weights).sum() * micro_batch.loss_scale
        loss.backward()  # type: ignore[no-untyped-call]
