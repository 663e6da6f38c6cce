"""The README's loops, on ranks of which one is slow, with clocks of their own round their work.

    torchrun --standalone --nproc-per-node 4 tests/e2e/timed_trainer.py --model ddp --slow 1.4 \
        --endpoint E --out DIR

The loop says nothing of times. Each rank writes DIR/rank<r>.jsonl, a line a step: seconds that its
work took by micro-batch. Work is in proportion to a micro-batch's tokens, and slept, as it has to
take as long however many ranks share a core.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch, MicroBatchStream
from tests.e2e.trainer import await_file
from tests.workers.timing.ranks import WIDTH, Net, Work, shard

#: Seconds a token: long beside what a machine with fewer cores than ranks takes for all the rest,
#: which all ranks have alike.
PACE_S = 2e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--work", choices=["sleep", "matmul"], default="sleep")
    parser.add_argument("--slow", type=float, default=1.4, help="of DP rank 1")
    parser.add_argument("--linger-until", type=Path, required=True, help="stay till this exists")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    work = Work(args.work)
    with (args.out / f"rank{dist.get_rank()}.jsonl").open("w", buffering=1) as lines:
        train(args, work, lines)
    dist.destroy_process_group()


def train(args: argparse.Namespace, work: Work, lines: Any) -> None:
    pace = PACE_S * (args.slow if dist.get_rank() == 1 else 1.0)
    model: Any = Net(work)
    if args.model == "ddp":
        model = DistributedDataParallel(model)
    else:
        shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MicroBatchStream(args.endpoint) as stream:
        for step in stream:
            spent = []
            for micro_batch in step:
                waits = micro_batch.is_last or args.model == "fsdp2"
                with nullcontext() if waits else model.no_sync():
                    losses(model, micro_batch, pace).sum().backward()  # type: ignore[no-untyped-call]
                spent.append(work.take())
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
            lines.write(json.dumps({"step": step.number, "spent_s": spent}) + "\n")
        await_file(args.linger_until)  # while a rank is here its dispatcher stays


def losses(model: Any, micro_batch: MicroBatch, pace: float) -> torch.Tensor:
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    out: torch.Tensor = model(hidden, micro_batch.input_ids.numel() * pace)
    return out * micro_batch.loss_scale


if __name__ == "__main__":
    main()
