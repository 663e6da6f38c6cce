"""What torchrun starts on every rank: trains, and writes down what it saw and ended with.

    train_replicas.py DIRECTORY DEVICE BACKEND CASE=ENDPOINT ...

Models are on DEVICE, and BACKEND is the process group's, as torch.distributed takes it. CASE is a
mesh of `SHAPES`, or `PLAIN`: DP ranks alone, with the loss of a causal model, shifted by one over
the whole row. For each case it trains one model per optimizer on the same steps, by iterating every
step once for each, and writes DIRECTORY/CASE-RANK.json.
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


class Shape(NamedTuple):
    """A mesh of dimensions of two ranks each; over which of them gradients are averaged."""

    names: tuple[str, ...]
    dp_dims: str | tuple[str, ...]
    averaged: tuple[str, ...]


PLAIN = "plain"
SHAPES = {
    "tp": Shape(("dp", "tp"), "dp", ("dp",)),
    "hsdp": Shape(("replicate", "shard"), ("replicate", "shard"), ("replicate", "shard")),
    "cp": Shape(("dp", "cp", "tp"), "dp", ("dp", "cp")),
    "pp": Shape(("pp", "dp", "tp"), "dp", ("dp",)),
}


def main(directory: Path, device: torch.device, backend: str, runs: list[str]) -> None:
    dist.init_process_group(backend)
    for run in runs:
        case, _, endpoint = run.partition("=")
        found = train(endpoint, SHAPES.get(case), device)
        (directory / f"{case}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def train(endpoint: str, shape: Shape | None, device: torch.device) -> dict[str, Any]:
    """Train until the stream ends; steps seen, and the parameters by optimizer."""
    mesh, group, options = None, None, dict[str, Any]()
    if shape is not None:
        mesh = init_device_mesh("cpu", (2,) * len(shape.names), mesh_dim_names=shape.names)
        averaged = mesh[shape.averaged]
        group = averaged.get_group() if averaged.ndim == 1 else averaged._flatten().get_group()
        options = {"mesh": mesh, "dp_dims": shape.dp_dims, "grad_mesh": averaged}
    models = {name: TinyModel().to(device) for name in ("sgd", "adamw")}
    ranks = {
        name: DistributedDataParallel(model, process_group=group) for name, model in models.items()
    }
    solvers = optimizers(models)
    seen, bytes_received = [], list[int]()
    with MicroBatchStream(
        endpoint, weights_dtype=torch.float64, device=device, **options
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


def accumulate(model: DistributedDataParallel, step: Step, mesh: DeviceMesh | None) -> None:
    """Add up the step's gradient over its micro-batches, of this rank's tokens if there is cp."""
    batches: list[MicroBatch] = list(step)
    for batch in batches:
        with nullcontext() if batch.is_last else model.no_sync():
            weights = batch.loss_weights
            if mesh is not None and "cp" in (mesh.mesh_dim_names or ()):
                weights = weights * (batch.position_ids % 2 == mesh.get_local_rank("cp"))
            losses = model(batch.input_ids, batch.cu_seqlens.tolist(), shifted=mesh is None)
            ((losses * weights).sum() * batch.loss_scale).backward()


def describe(step: Step) -> dict[str, Any]:
    """What this rank saw of a step."""

    def batch_of(batch: MicroBatch) -> dict[str, Any]:
        return {"ids": batch.sample_ids, "filler": batch.is_filler, "tokens": batch.tokens}

    return {
        "number": step.number,
        "digest": step.digest,
        "batches": [batch_of(batch) for batch in step],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3], sys.argv[4:])
