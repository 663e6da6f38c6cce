"""Ranks that all pause in their second step, and of which one hangs in the third; under torchrun.

    torchrun ... tests/e2e/hanging_trainer.py --model ddp --endpoint E --out DIR

Until DIR/go exists all ranks pause; until DIR/wake does rank 1 hangs, within a step's last
micro-batch: the others wait for it in a collective of that same micro-batch.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from rollout_workers import MicroBatchStream
from tests.e2e.trainer import await_file
from tests.workers.timing.ranks import WIDTH, Net, Work, wrapped

PAUSE, HANG, HUNG = 1, 2, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, sync = wrapped(args.model, Net(Work("sleep")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MicroBatchStream(args.endpoint) as stream:
        for step in stream:
            for micro_batch in step:
                if step.number == PAUSE:
                    await_file(args.out / "go")
                if step.number == HANG and micro_batch.is_last and dist.get_rank() == HUNG:
                    await_file(args.out / "wake")
                with sync(micro_batch.is_last):
                    hidden = torch.randn(4, WIDTH, requires_grad=True)
                    (model(hidden, 0.0).sum() * micro_batch.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
