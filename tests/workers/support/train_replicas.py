"""What torchrun starts on every rank of a mesh: trains, and writes down what it saw and ended with.

    train_replicas.py DIRECTORY CASE=ENDPOINT ...

For each case of `SHAPES` it trains with a stream over that mesh, iterating every step once for each
optimizer, and writes DIRECTORY/CASE-RANK.json.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch, MicroBatchStream, Step
from tests.workers.support.tiny_model import TinyModel, flat, optimizers
from tests.workers.support.train_ddp import describe


class Shape(NamedTuple):
    """A mesh of dimensions of two ranks each; over which of them gradients are averaged."""

    names: tuple[str, ...]
    dp_dims: str | tuple[str, ...]
    averaged: tuple[str, ...]


SHAPES = {
    "tp": Shape(("dp", "tp"), "dp", ("dp",)),
    "hsdp": Shape(("replicate", "shard"), ("replicate", "shard"), ("replicate", "shard")),
    "cp": Shape(("dp", "cp", "tp"), "dp", ("dp", "cp")),
    "pp": Shape(("pp", "dp", "tp"), "dp", ("dp",)),
}


def main(directory: Path, runs: list[str]) -> None:
    dist.init_process_group("gloo")
    for run in runs:
        case, _, endpoint = run.partition("=")
        found = train(endpoint, SHAPES[case])
        (directory / f"{case}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def train(endpoint: str, shape: Shape) -> dict[str, Any]:
    """Train until the stream ends; steps seen, and the parameters by optimizer."""
    mesh = init_device_mesh("cpu", (2,) * len(shape.names), mesh_dim_names=shape.names)
    averaged = mesh[shape.averaged]
    group = averaged.get_group() if averaged.ndim == 1 else averaged._flatten().get_group()
    models = {name: TinyModel() for name in ("sgd", "adamw")}
    ranks = {
        name: DistributedDataParallel(model, process_group=group) for name, model in models.items()
    }
    solvers = optimizers(models)
    seen, bytes_received = [], list[int]()
    with MicroBatchStream(
        endpoint,
        mesh=mesh,
        dp_dims=shape.dp_dims,
        grad_mesh=averaged,
        weights_dtype=torch.float64,
    ) as stream:
        for step in stream:
            for name, model in ranks.items():
                accumulate(model, step, mesh)
                bytes_received.append(stream.statistics().bytes_received)
                solvers[name].step()
                solvers[name].zero_grad()
            seen.append(describe(step))
            stream.set_policy_version(step.number + 1)
            # Stages and shards of a real model exchange activations: none is a step behind.
            dist.barrier()
            step.commit()
        state = stream.state_dict()
        statistics = stream.statistics()
    return {
        "steps": seen,
        "parameters": {name: flat(model) for name, model in models.items()},
        "bytes": bytes_received,
        "state": state,
        "committed": statistics.steps_committed,
    }


def accumulate(model: DistributedDataParallel, step: Step, mesh: DeviceMesh) -> None:
    """Add up the step's gradient over its micro-batches, of this rank's tokens if there is cp."""
    batches: list[MicroBatch] = list(step)
    for batch in batches:
        with nullcontext() if batch.is_last else model.no_sync():
            weights = batch.loss_weights
            if "cp" in (mesh.mesh_dim_names or ()):
                weights = weights * (batch.position_ids % 2 == mesh.get_local_rank("cp"))
            losses = model(batch.input_ids, batch.cu_seqlens.tolist())
            ((losses * weights).sum() * batch.loss_scale).backward()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
