"""A real trainer for the end-to-end tests: DDP over gloo, and a diary of all that it was given.

    torchrun --standalone --nproc-per-node 2 tests/e2e/trainer.py --endpoint E --out DIR

Each rank writes DIR/rank<r>.attempt<a>.jsonl: a line when it takes a step and one when it has
committed it, so that a test can tell what was seen from what was applied. With `--every` it saves
checkpoints with torch.distributed.checkpoint, goes on from the last, and DP rank 0 writes the
weights to DIR/final.pt at the end of the stream.
"""

import argparse
import json
import os
import signal
import time
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
    parser.add_argument("--attempt", type=int, help="default: torchrun's")
    parser.add_argument("--every", type=int, help="steps between checkpoints; default: none")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="extra time a step takes")
    parser.add_argument("--die-at-step", type=int, help="SIGKILL of rank 1, first attempt only")
    parser.add_argument("--linger-until", type=Path, help="hold the stream open till this exists")
    args = parser.parse_args()
    if args.attempt is None:
        args.attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
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
        for step in stream:
            seen = {
                "event": "taken",
                "step": step.number,
                "digest": step.digest,
                "count": len(step),
                "generation": stream.generation,
            }
            diary.write(json.dumps(seen) + "\n")
            samples: list[list[str]] = []
            for micro_batch in step:
                if args.attempt == 0 and rank == 1 and step.number == args.die_at_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                learn(model, micro_batch)
                samples.append([] if micro_batch.is_filler else list(micro_batch.sample_ids))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.step_seconds)
            step.commit()
            done = {"event": "committed", "step": step.number, "samples": samples}
            diary.write(json.dumps(done) + "\n")
            if args.every and (step.number + 1) % args.every == 0:
                save(args.out / f"step-{step.number}", state, latest)
                stream.checkpoint_saved(stream.state_dict())
        if args.linger_until is not None:
            await_file(args.linger_until)
    if args.every and rank == 0:
        torch.save(learned.state_dict(), args.out / "final.pt")


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
