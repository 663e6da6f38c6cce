"""A DP rank of the demo: trains small transformers on what dispatchers stream, one for each run.

    torchrun --standalone --nproc-per-node 2 -m rollout_workers.demo.train
        --stream FOLDER ENDPOINT HTTP ...

Runs take turns, a step each, so that whatever else the machine does slows all of them alike. Every
rank writes a line of measurements a step into the run's folder; rank 0 also prints a line, for the
progress line, and saves the dispatcher's metrics before it leaves.
"""

import argparse
import contextlib
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch, MicroBatchStream
from rollout_workers.demo.data import leave_with_starter
from rollout_workers.demo.model import Meter, Transformer, token_losses

LEARNING_RATE = 2e-3


def main() -> None:
    """Train until every stream has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stream", nargs=3, action="append", required=True, metavar=("FOLDER", "ENDPOINT", "HTTP")
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    leave_with_starter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(Run(Path(f), e, h, args.seed)) for f, e, h in args.stream]
            take_turns(runs)
            if dist.get_rank() == 0:  # while a rank is here its dispatcher stays
                for run in runs:
                    run.save_metrics()
    finally:
        dist.destroy_process_group()


def take_turns(runs: Sequence["Run"]) -> None:
    """A step of each run a round; each round begins with another run."""
    left, first = list(runs), 0
    while left:
        for run in left[first % len(left) :] + left[: first % len(left)]:
            if not run.train_step():
                left.remove(run)
        first += 1


class Run:
    """One model that trains on one stream."""

    def __init__(self, folder: Path, endpoint: str, http: str, seed: int) -> None:
        self._folder, self._http = folder, http
        with contextlib.ExitStack() as stack:
            output = stack.enter_context((folder / f"rank{dist.get_rank()}.jsonl").open("w"))
            self._meter = Meter(output)
            self._model = build_model(self._meter, seed)
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
            self._stream = stack.enter_context(MicroBatchStream(endpoint))
            self._stack = stack.pop_all()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def train_step(self) -> bool:
        """One optimizer step; but for the meter it is any trainer's. False: the stream is over."""
        meter = self._meter
        meter.begin_step()
        step = meter.waited(lambda: next(self._stream, None))
        if step is None:
            return False
        for micro_batch in meter.waiting_for(step):
            with contextlib.nullcontext() if micro_batch.is_last else self._model.no_sync():
                losses = self._losses(micro_batch)
                loss = (losses * micro_batch.loss_weights).sum() * micro_batch.loss_scale
                loss.backward()  # type: ignore[no-untyped-call]
            if micro_batch.is_last:
                meter.reduced()
            _count(meter, micro_batch, losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        step.commit()
        meter.times.step = step.number
        meter.end_step()
        if dist.get_rank() == 0:
            mean_loss = meter.times.loss_sum / max(1, meter.times.loss_tokens)
            print(f"step {self._folder.name} {step.number} {mean_loss:.3f}", flush=True)  # noqa: T201
        return True

    def save_metrics(self) -> None:
        """Keep what the dispatcher measured of this run."""
        with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=10) as answer:
            (self._folder / "metrics.txt").write_bytes(answer.read())

    def _losses(self, micro_batch: MicroBatch) -> Tensor:
        bounds = micro_batch.cu_seqlens.tolist()
        logits = self._model(micro_batch.input_ids, micro_batch.position_ids, bounds)
        return token_losses(logits, micro_batch.input_ids)


def build_model(meter: Meter, seed: int) -> DistributedDataParallel:
    """The model under DDP, its gradients in one bucket as the meter needs it, warmed up."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Transformer(), bucket_cap_mb=1024)
    model.register_comm_hook(meter, Meter.before_reduce)
    for _ in range(2):  # the first pass allocates, the second rebuilds DDP's buckets
        ids = torch.zeros(256, dtype=torch.long)
        loss = token_losses(model(ids, torch.arange(256), [0, 256]), ids).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return model


def _count(meter: Meter, micro_batch: MicroBatch, losses: Tensor) -> None:
    if micro_batch.is_filler:
        return
    counted = micro_batch.loss_weights > 0
    meter.times.tokens += micro_batch.tokens
    meter.times.loss_sum += float(losses.detach()[counted].sum())
    meter.times.loss_tokens += int(counted.sum())


if __name__ == "__main__":
    main()
