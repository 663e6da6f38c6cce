"""A trainer that saves checkpoints with torch.distributed.checkpoint and goes on from the last.

    torchrun ... tests/e2e/resumable.py --endpoint E --out DIR --attempt 0 --every 5

Each rank writes DIR/rank<r>.attempt<a>.jsonl as `trainer.py` does; at the end of the stream DP rank
0 writes the weights to DIR/final.pt. `--die-at-step` ends DP rank 1 in mid-step by SIGKILL.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatchStream
from tests.support.ddp import learn, network, process_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between checkpoints")
    parser.add_argument("--die-at-step", type=int)
    parser.add_argument("--initial", action="store_true", help="save one before the first step")
    args = parser.parse_args()
    with process_group():
        train(args)


def save(folder: Path, state: dict[str, Any], latest: Path) -> None:
    dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        beside = latest.with_suffix(".part")
        beside.write_text(str(folder))
        beside.replace(latest)


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    learned = network(width=16, dtype=torch.float64)
    model = DistributedDataParallel(learned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    latest = args.out / "latest"
    with (
        (args.out / f"rank{rank}.attempt{args.attempt}.jsonl").open("w", buffering=1) as diary,
        MicroBatchStream(args.endpoint, weights_dtype=torch.float64) as stream,
    ):
        state = {"model": learned.state_dict(), "stream": stream}
        if latest.exists():
            dcp.load(state, checkpoint_id=latest.read_text())  # type: ignore[attr-defined]
        elif args.initial:
            save(args.out / "start", state, latest)
        for step in stream:
            seen = {
                "event": "taken",
                "step": step.number,
                "digest": step.digest,
                "count": len(step),
            }
            diary.write(json.dumps(seen) + "\n")
            samples: list[list[str]] = []
            for micro_batch in step:
                if rank == 1 and step.number == args.die_at_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                learn(model, micro_batch)
                samples.append([] if micro_batch.is_filler else list(micro_batch.sample_ids))
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
            done = {"event": "committed", "step": step.number, "samples": samples}
            diary.write(json.dumps(done) + "\n")
            if (step.number + 1) % args.every == 0:
                save(args.out / f"step-{step.number}", state, latest)
                stream.checkpoint_saved(stream.state_dict())
    if rank == 0:
        torch.save(learned.state_dict(), args.out / "final.pt")


if __name__ == "__main__":
    main()
