"""What the trainers of the tests learn: a next to trivial model, as DDP users write its loop."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch

VOCABULARY = 64


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
