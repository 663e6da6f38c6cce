"""A DP rank of the benchmark: trains one small model for each row, the rows taking turns.

    torchrun --standalone --nproc-per-node 2 -m tests.bench.training.ranks FOLDER

FOLDER/job.json says what is trained on and which rows there are. All rows have the same samples, in
memory beforehand; what a row is measured for begins when a step asks for its first micro-batch.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from rollout_workers import MicroBatchStream
from rollout_workers.demo.data import leave_with_starter, rollout
from rollout_workers.demo.model import Meter, token_losses
from rollout_workers.demo.train import LEARNING_RATE, build_model
from tests.bench.training.orders import ORDERS, Work, packed

Fields = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a row trains on at a time, whoever made it."""

    input_ids: Tensor
    position_ids: Tensor
    bounds: list[int]
    weights: Tensor
    scale: float
    is_last: bool
    tokens: int


class Arrived(Dataset[Fields]):
    """The samples, each there from its time on. rate: samples a second; None: all from the start.

    Every rank has to begin at the same `began`, of the monotonic clock.
    """

    def __init__(self, work: Work, rate: float | None, began: float) -> None:
        self._rate, self._began = rate, began
        self._fields = [
            {name: torch.from_numpy(values) for name, values in fields.items()}
            for fields in (rollout(i, n, work.seed) for i, n in enumerate(work.lengths))
        ]

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: int) -> Fields:
        if self._rate is not None:
            time.sleep(max(0.0, self._began + index / self._rate - time.monotonic()))
        return self._fields[index]


def steps_of_an_order(name: str, work: Work, arrived: Arrived) -> Iterator[Iterator[MicroBatch]]:
    """This rank's steps as a torch DataLoader gives them."""
    rank = dist.get_rank()
    for shares in ORDERS[name](work):
        batches = packed(shares[rank], work)
        loss_tokens = sum(
            work.lengths[index] - max(1, work.lengths[index] // 4)
            for share in shares
            for index in share.tolist()
        )
        loader = DataLoader(arrived, batch_sampler=batches, collate_fn=_cat)
        yield _of_a_loader(loader, len(batches), work.ranks / loss_tokens)


def _of_a_loader(loader: Any, count: int, scale: float) -> Iterator[MicroBatch]:
    for index, (fields, bounds) in enumerate(loader):
        yield MicroBatch(
            fields["input_ids"],
            fields["position_ids"],
            bounds,
            fields["loss_mask"].float(),
            scale,
            index == count - 1,
            bounds[-1],
        )


def _cat(samples: list[Fields]) -> tuple[Fields, list[int]]:
    lengths = [len(sample["input_ids"]) for sample in samples]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    fields = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    return fields | {"position_ids": torch.cat([torch.arange(n) for n in lengths])}, bounds


def steps_of_a_stream(endpoint: str) -> Iterator[Iterator[MicroBatch]]:
    """This rank's steps as the dispatcher gives them."""
    with MicroBatchStream(endpoint, epochs=1) as stream:
        for step in stream:
            yield _of_a_step(step)
            step.commit()


def _of_a_step(step: Any) -> Iterator[MicroBatch]:
    for batch in step:
        yield MicroBatch(
            batch.input_ids,
            batch.position_ids,
            batch.cu_seqlens.tolist(),
            batch.loss_weights,
            batch.loss_scale,
            batch.is_last,
            0 if batch.is_filler else batch.tokens,
        )


class Row:
    """One model, and where its steps come from."""

    def __init__(self, folder: Path, name: str, steps: Iterator[Iterator[MicroBatch]]) -> None:
        self._output = (folder / f"{name}.rank{dist.get_rank()}.jsonl").open("w")
        self._meter = Meter(self._output)
        self._model: DistributedDataParallel = build_model(self._meter, seed=0)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._steps = steps

    def train_step(self) -> bool:
        """One optimizer step; False once there is none left."""
        meter = self._meter
        meter.begin_step()
        step = meter.waited(lambda: next(self._steps, None))
        if step is None:
            self._output.close()
            return False
        for batch in meter.waiting_for(step):
            with contextlib.nullcontext() if batch.is_last else self._model.no_sync():
                logits = self._model(batch.input_ids, batch.position_ids, batch.bounds)
                losses = token_losses(logits, batch.input_ids) * batch.weights
                (losses.sum() * batch.scale).backward()  # type: ignore[no-untyped-call]
            if batch.is_last:
                meter.reduced()
            meter.times.tokens += batch.tokens
        self._optimizer.step()
        self._optimizer.zero_grad()
        meter.end_step()
        return True


def main() -> None:
    """Train every row to its end."""
    leave_with_starter()
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    work = Work(**job["work"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rate = job["rate"]
        samples = Arrived(work, rate, 0.0)
        began = [time.monotonic() + 0.2]
        dist.broadcast_object_list(began)
        (folder / "began").write_text(repr(began[0]))
        samples._began = began[0]
        rows = [
            Row(folder, name, _steps(name, endpoint, work, samples))
            for name, endpoint in job["rows"]
        ]
        take_turns(rows)
        dist.barrier()  # who leaves first may end the others' last reduction with an abort
    finally:
        dist.destroy_process_group()


def _steps(
    name: str, endpoint: str | None, work: Work, samples: Arrived
) -> Iterator[Iterator[MicroBatch]]:
    if endpoint is None:
        return steps_of_an_order(name, work, samples)
    return steps_of_a_stream(endpoint)


def take_turns(rows: list[Row]) -> None:
    """A step of each row a round; who begins moves on, so that nobody is always first."""
    left, first = list(rows), 0
    while left:
        at = first % len(left)
        for row in left[at:] + left[:at]:
            if not row.train_step():
                left.remove(row)
        first += 1


if __name__ == "__main__":
    main()
