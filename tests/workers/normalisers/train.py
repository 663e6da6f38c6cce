"""What torchrun starts on every rank: the gradient of every loss of every step, by DDP and FSDP2.

    train.py ENDPOINT DIRECTORY CP

On a mesh of DP x CP, each CP rank with the loss of every CP-th token. The total of a mask made on
the way is added up over the DP ranks, and gradients are averaged over all ranks. Where CP is above
1 the trainer divides each loss by the step's micro-batches, as Megatron does. Every rank writes
DIRECTORY/RANK.json.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch, MicroBatchStream, Step
from tests.workers.normalisers.losses import LOSSES, MADE, MAIN, NAMES, made_mask
from tests.workers.support.tiny_model import TinyModel


@dataclass
class Batch:
    """What a CP rank needs of a micro-batch; weights, scales: by loss."""

    input_ids: Tensor
    bounds: list[int]
    weights: dict[str, Tensor]
    scales: dict[str, float]
    is_last: bool
    is_filler: bool
    sample_ids: tuple[str, ...]
    count: int


def main(endpoint: str, directory: Path, cp: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    trainers: dict[str, Trainer] = {"ddp": by_ddp(), "fsdp2": by_fsdp2()}
    seen = []
    for batches in steps(endpoint, mesh):
        gradients = {
            name: {loss: gradient(trainer, batches, loss, mesh) for loss in NAMES}
            for name, trainer in trainers.items()
        }
        made = [{"ids": one.sample_ids, "filler": one.is_filler} for one in batches]
        seen.append({"batches": made, "gradients": gradients})
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


# -- what is trained on


def steps(endpoint: str, mesh: DeviceMesh) -> Iterator[list[Batch]]:
    """Each step's micro-batches, on every CP rank; the DP leader relays them to its peers."""
    with MicroBatchStream(
        endpoint,
        mesh=mesh,
        dp_dims="dp",
        loss_normalisation=MAIN,
        losses=LOSSES,
        grad_mesh=mesh["dp", "cp"],
        trainer_divides_by="micro-batches" if mesh["cp"].size() > 1 else 1,
        weights_dtype=torch.float64,
    ) as stream:
        for step in stream:
            masks = [made_mask(one.input_ids) * (not one.is_filler) for one in step]
            total = torch.stack([mask.sum() for mask in masks]).sum()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            scale = step.scale_for(total)
            pairs = zip(step, masks, strict=True)
            yield [batch_of(step, one, mask, scale) for one, mask in pairs]
            step.commit()


def batch_of(step: Step, one: MicroBatch, mask: Tensor, scale: float) -> Batch:
    assert one.loss_scale == one.loss_scales["loss"]
    return Batch(
        input_ids=one.input_ids,
        bounds=one.cu_seqlens.tolist(),
        weights={name: one[f"{name}_weights"] for name in ("loss", *LOSSES)} | {MADE: mask},
        scales={**one.loss_scales, MADE: scale},
        is_last=one.is_last,
        is_filler=one.is_filler,
        sample_ids=one.sample_ids,
        count=len(step),
    )


# -- how it is trained


@dataclass
class Trainer:
    """A model, and how its gradients meet at the last micro-batch only."""

    model: nn.Module
    syncing: Callable[[bool], AbstractContextManager[object]]


def by_ddp() -> Trainer:
    model = DistributedDataParallel(TinyModel())
    return Trainer(model, lambda last: nullcontext() if last else model.no_sync())


def by_fsdp2() -> Trainer:
    world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    model = TinyModel()
    sharded = fully_shard(model, mesh=world)

    def syncing(last: bool) -> AbstractContextManager[object]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return Trainer(model, syncing)


def gradient(trainer: Trainer, batches: list[Batch], loss: str, mesh: DeviceMesh) -> list[float]:
    """Of one loss of a whole step; this rank's part is the loss of every CP-th token."""
    cp, place = mesh["cp"].size(), mesh.get_local_rank("cp")
    trainer.model.zero_grad()
    for one in batches:
        with trainer.syncing(one.is_last):
            losses = trainer.model(one.input_ids, one.bounds)
            weighted = (losses * one.weights[loss])[place::cp].sum() * one.scales[loss]
            divided = weighted / one.count if cp > 1 else weighted
            divided.backward()
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
    found: list[float] = torch.cat([one.reshape(-1) for one in whole]).tolist()
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
