"""What torchrun starts on each of four ranks: a 2 x 2 mesh of data and tensor parallelism.

    train_mesh.py ENDPOINT DIRECTORY

Writes DIRECTORY/RANK.json: the errors of the rank, and the token ids that it trained on.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollout_dispatcher.errors import ConfigError
from rollout_workers import LengthBucketSampler, MicroBatchStream
from rollout_workers.process_group import find_place


def main(endpoint: str, directory: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {"plain": plain()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found["stream"] = complaint(lambda: MicroBatchStream(endpoint))
    found["sampler"] = complaint(lambda: LengthBucketSampler([1, 2], batch_size=1))
    sampler = LengthBucketSampler([4, 3, 2, 1], batch_size=1, mesh=mesh, dp_dims="dp")
    found["drawn"] = list(sampler)
    place = mesh["dp"].get_local_rank()
    found["position"] = complaint(lambda: MicroBatchStream(endpoint, dp_rank=place, dp_size=2))
    found["seen"] = train(endpoint, mesh)
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def plain() -> list[int]:
    """This rank's place, with meshes that say nothing against the default group."""
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    first = find_place(None, None, None)
    other = init_device_mesh("cpu", (1, 4, 1), mesh_dim_names=("pp", "dp", "tp"))
    second = find_place(None, None, None)
    assert (one.size(), other.size()) == (4, 4)
    return [first.dp_rank, second.dp_rank]


def complaint(make: Callable[[], object]) -> str:
    """What making it is refused with."""
    try:
        make()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def train(endpoint: str, mesh: DeviceMesh) -> list[list[int]]:
    """Each DP leader takes micro-batches and hands them to its TP peers; the token ids seen."""
    leads = mesh.get_local_rank("tp") == 0
    if not leads:
        return follow(mesh)
    seen: list[list[int]] = []
    with MicroBatchStream(endpoint, process_group=mesh["dp"].get_group()) as stream:
        for step in stream:
            for micro_batch in step:
                hand_on(mesh, micro_batch.input_ids)
                seen.append(micro_batch.input_ids.tolist())
            step.commit()
    hand_on(mesh, torch.empty(0, dtype=torch.int64))
    return seen


def hand_on(mesh: DeviceMesh, ids: torch.Tensor) -> None:
    group = mesh["tp"].get_group()
    leader = dist.get_global_rank(group, 0)
    dist.broadcast(torch.tensor(len(ids)), leader, group)
    if len(ids):
        dist.broadcast(ids, leader, group)


def follow(mesh: DeviceMesh) -> list[list[int]]:
    group, seen = mesh["tp"].get_group(), list[list[int]]()
    leader, count = dist.get_global_rank(group, 0), torch.tensor(0)
    while True:
        dist.broadcast(count, leader, group)
        if not count:
            return seen
        ids = torch.empty(int(count), dtype=torch.int64)
        dist.broadcast(ids, leader, group)
        seen.append(ids.tolist())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
