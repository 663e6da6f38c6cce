"""What torchrun starts on every DP rank: trains, and writes down what it saw and ended with.

    train_ddp.py DIRECTORY DEVICE BACKEND RUN=ENDPOINT ...

Models are on DEVICE, and BACKEND is the process group's, as torch.distributed takes it. RUN is a
normalisation; after `unmasked-` the loss is that of a causal model, shifted by one over
the whole row. For each endpoint it trains one model per optimizer on the same steps, by iterating
every step once for each, and writes DIRECTORY/RUN-RANK.json.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch, MicroBatchStream, Step
from tests.workers.support.tiny_model import TinyModel, flat, optimizers


def main(directory: Path, device: torch.device, backend: str, runs: list[str]) -> None:
    dist.init_process_group(backend)
    for run in runs:
        name, _, endpoint = run.partition("=")
        normalisation, shifted = name.removeprefix("unmasked-"), name.startswith("unmasked")
        found = train(endpoint, normalisation, device, shifted=shifted)
        file = directory / f"{name}-{dist.get_rank()}.json"
        file.write_text(json.dumps(found))
    dist.destroy_process_group()


def train(
    endpoint: str, normalisation: str, device: torch.device, *, shifted: bool
) -> dict[str, Any]:
    """Train until the stream ends; steps seen, and the parameters by optimizer."""
    models = {name: TinyModel().to(device) for name in ("sgd", "adamw")}
    ranks = {name: DistributedDataParallel(model) for name, model in models.items()}
    solvers = optimizers(models)
    seen = []
    with MicroBatchStream(
        endpoint,
        loss_normalisation=normalisation,
        weights_dtype=torch.float64,
        device=device,
    ) as stream:
        for step in stream:
            for name, model in ranks.items():
                accumulate(model, step, shifted=shifted)
                solvers[name].step()
                solvers[name].zero_grad()
            seen.append(describe(step))
            step.commit()
        generation = stream.generation
    parameters = {name: flat(model) for name, model in models.items()}
    return {"steps": seen, "parameters": parameters, "generation": generation}


def accumulate(model: DistributedDataParallel, step: Step, *, shifted: bool) -> None:
    """Add up the step's gradient over its micro-batches."""
    for batch in step:
        with nullcontext() if batch.is_last else model.no_sync():
            losses = model(batch.input_ids, batch.cu_seqlens.tolist(), shifted=shifted)
            ((losses * batch.loss_weights).sum() * batch.loss_scale).backward()


def describe(step: Step) -> dict[str, Any]:
    """What this rank saw of a step."""

    def batch_of(batch: MicroBatch) -> dict[str, Any]:
        return {"ids": batch.sample_ids, "filler": batch.is_filler, "tokens": batch.tokens}

    return {
        "number": step.number,
        "digest": step.digest,
        "num_samples": step.num_samples,
        "batches": [batch_of(batch) for batch in step],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3], sys.argv[4:])
