"""Ranks of which one is slow, and then another; run under torchrun.

    torchrun --standalone --nproc-per-node 4 tests/e2e/uneven_trainer.py --model ddp \
        --slow 1.5 --until 40 --endpoint E --out DIR

Rank 1 takes `--slow` times as long for the same work up to a step, and rank 2 from there on. It
is slept, as it has to take as long however many ranks share a core. Each rank writes
DIR/rank<r>.jsonl, a line a step: seconds and tokens of each micro-batch; and under DDP a diary of
its gradients.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatchStream, Step
from tests.e2e.trainer import await_file
from tests.support.gradients import Diary
from tests.workers.support.tiny_model import TinyModel
from tests.workers.timing.ranks import Net, Work, shard

#: Seconds a token: long beside what a machine with fewer cores than ranks takes for all the rest.
PACE_S = 2e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["ddp", "fsdp2", "unseen"], required=True)
    parser.add_argument("--slow", type=float, default=1.5)
    parser.add_argument("--until", type=int, required=True, help="step")
    parser.add_argument("--linger-until", type=Path, required=True, help="stay till this exists")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    made: dict[str, Callable[[], Replicated | Sharded | Unseen]] = {
        "ddp": Replicated,
        "fsdp2": Sharded,
        "unseen": Unseen,
    }
    trainer = made[args.model]()
    with (
        (args.out / f"rank{rank}.jsonl").open("w", buffering=1) as lines,
        MicroBatchStream(args.endpoint, weights_dtype=torch.float64) as stream,
    ):
        for step in stream:
            slow = rank == (1 if step.number < args.until else 2)
            spent, tokens = trainer.train(step, PACE_S * (args.slow if slow else 1.0))
            step.commit()
            told = {"step": step.number, "spent_s": spent, "tokens": tokens}
            lines.write(json.dumps(told) + "\n")
        await_file(args.linger_until)  # while a rank is here its dispatcher stays
    if isinstance(trainer, Replicated):
        trainer.diary.save(args.out, rank)
    dist.destroy_process_group()


class Replicated:
    """A model that learns, under DDP: gradients are reduced once a step."""

    def __init__(self) -> None:
        self.model, self.diary = TinyModel(), Diary()
        self._ranks = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def train(self, step: Step, pace: float) -> tuple[list[float], list[int]]:
        spent, tokens = [], []
        for batch in step:
            began = time.perf_counter()
            time.sleep(batch.tokens * pace)
            spent.append(time.perf_counter() - began)
            tokens.append(batch.tokens)
            with nullcontext() if batch.is_last else self._ranks.no_sync():
                losses = self._ranks(batch.input_ids, batch.cu_seqlens.tolist())
                ((losses * batch.loss_weights).sum() * batch.loss_scale).backward()
        self.diary.note(step, self.model)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return spent, tokens


class Sharded:
    """A model whose ranks gather its parameters in every micro-batch, and wait for each other."""

    def __init__(self) -> None:
        self._work = Work("sleep")
        self._model: Any = Net(self._work)
        shard(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def train(self, step: Step, pace: float) -> tuple[list[float], list[int]]:
        spent, tokens = [], []
        for batch in step:
            hidden = torch.randn(4, 64, requires_grad=True)
            out = self._model(hidden, batch.tokens * pace)
            (out * batch.loss_scale).sum().backward()
            spent.append(self._work.take())
            tokens.append(batch.tokens)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return spent, tokens


class Unseen:
    """Collectives in every micro-batch that nobody is told of; work is that of attention alone."""

    def train(self, step: Step, pace: float) -> tuple[list[float], list[int]]:
        spent, tokens = [], []
        for batch in step:
            began = time.perf_counter()
            time.sleep(sum(length * length for length in batch.lengths) * pace / 100)
            spent.append(time.perf_counter() - began)
            dist.all_reduce(torch.ones(1))
            tokens.append(batch.tokens)
        return spent, tokens


if __name__ == "__main__":
    main()
