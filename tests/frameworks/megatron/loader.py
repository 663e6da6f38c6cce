"""One rank of Megatron-Core's loader with `BlockScheduler`, on a CPU that stands in for CUDA.

    torchrun ... loader.py FOLDER

Writes FOLDER/RANK.json: groups, the lengths of all samples, and of the samples that this rank has
received their ids and lengths. Tokens are compared with those that the sample's owner has made.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

LENGTHS = [[512, 64, 32], [128, 64, 64], [32, 32, 64, 96], [64, 64]]
LONGEST = 256


def main() -> None:
    """Pull one batch through the loader."""
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self: self
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper  # noqa: PLC0415

    from rollout_planner import BlockScheduler  # noqa: PLC0415

    dist.init_process_group("gloo")
    rank, alone = dist.get_rank(), [dist.new_group([each]) for each in range(dist.get_world_size())]
    groups = SimpleNamespace(dp_cp=dist.group.WORLD, dp=dist.group.WORLD, tp=alone[rank])
    config = SimpleNamespace(max_seqlen_per_dp_cp_rank=LONGEST)
    first = sum(map(len, LENGTHS[:rank]))
    lengths = torch.tensor(LENGTHS[rank])
    tokens = torch.repeat_interleave(first + torch.arange(len(lengths)), lengths)
    edges = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    packed = {"tokens": tokens, "cu_seqlens": edges}

    wrapper = HybridCPDataLoaderWrapper(iter([[packed]]), config, groups)
    wrapper.cp_balancing_scheduler = BlockScheduler(LONGEST, wrapper.dp_cp_group)

    samples, planned = next(wrapper)
    for number, sample in samples.items():
        assert (sample["tokens"] == number).all()
    found = {
        "groups": planned,
        "lengths": [length for each in LENGTHS for length in each],
        "samples": {str(number): len(sample["tokens"]) for number, sample in samples.items()},
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
