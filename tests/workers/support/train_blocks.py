"""What torchrun starts on each of four ranks: a 2 x 2 mesh whose DP ranks train samples together.

    train_blocks.py ENDPOINT DIRECTORY

Writes DIRECTORY/RANK.json: of each micro-batch who trains it, its samples, and their sums.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rollout_workers import MicroBatchStream
from rollout_workers.micro_batch.blocks import block_sum


def main(endpoint: str, directory: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    with MicroBatchStream(endpoint, mesh=mesh, dp_dims="dp", max_split=2) as stream:
        for step in stream:
            for batch in step:
                group = dist.get_process_group_ranks(batch.cp_group) if batch.cp_group else []
                sums = block_sum(batch.input_ids, batch).tolist()
                found.append([group, batch.cp_rank, batch.sample_ids, sums])
            step.commit()
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
