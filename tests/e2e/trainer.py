"""A real trainer for the end-to-end tests: DDP over gloo, and a diary of all that it was given.

    torchrun --standalone --nproc-per-node 2 tests/e2e/trainer.py --endpoint E --out DIR

Each rank writes DIR/rank<r>.attempt<a>.jsonl: a line when it takes a step and one when it has
committed it, so that a test can tell what was seen from what was applied.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatchStream
from tests.support.ddp import learn, network, process_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="extra time a step takes")
    parser.add_argument("--die-at-step", type=int, help="SIGKILL in mid-step, first attempt only")
    parser.add_argument("--die-rank", type=int, default=1)
    parser.add_argument("--linger-until", type=Path, help="hold the stream open till this exists")
    args = parser.parse_args()
    with process_group():
        train(args)


def train(args: argparse.Namespace) -> None:
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = DistributedDataParallel(network(width=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mortal = attempt == 0 and rank == args.die_rank
    with (
        (args.out / f"rank{rank}.attempt{attempt}.jsonl").open("w", buffering=1) as diary,
        MicroBatchStream(args.endpoint) as stream,
    ):
        waited, burned = time.monotonic(), time.process_time()
        for step in stream:
            seen = {
                "event": "taken",
                "step": step.number,
                "digest": step.digest,
                "count": len(step),
                "generation": stream.generation,
                "wait_s": time.monotonic() - waited,
                "cpu_s": time.process_time() - burned,
            }
            diary.write(json.dumps(seen) + "\n")
            samples: list[list[str]] = []
            for micro_batch in step:
                if mortal and step.number == args.die_at_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                learn(model, micro_batch)
                samples.append([] if micro_batch.is_filler else list(micro_batch.sample_ids))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(args.step_seconds)
            step.commit()
            done = {"event": "committed", "step": step.number, "samples": samples}
            diary.write(json.dumps(done) + "\n")
            waited, burned = time.monotonic(), time.process_time()
        if args.linger_until is not None:
            await_file(args.linger_until)


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
