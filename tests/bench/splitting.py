"""What ranks wait for each other where long samples are split over them, measured, and where not.

    python -m tests.bench.splitting [--rounds 3] [--json FILE]

Four torchrun ranks train a small transformer (FSDP2 over gloo) on lengths of real reasoning
rollouts, in order of arrival, with a dispatcher; with `--set max-split` of 1 and 4 by turns. The
attention of a block is real: keys and values are gathered, and the queries of a rank meet those
before them. As four ranks do not compute at once on two cores, a rank's clock is the processor time
of its thread, and a micro-step takes as long as its slowest rank. Waiting is the share of the
ranks' time that this leaves; tokens a second are what ranks with a core each would train.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from examples.context_parallel import VOCABULARY, Transformer
from rollout_workers import MicroBatch, MicroBatchStream
from rollout_workers.micro_batch.blocks import gather_block, rows_in_block
from tests.bench.cells import TRACES, read_trace
from tests.bench.rows import report
from tests.examples.run import finish, push, torchrun
from tests.support.server import ServeProcess

RANKS, STEPS, BATCH, BUDGET, MEAN = 4, 8, 16, 8192, 1024
#: Steps at the start that do not count: memory is reserved in them.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the rounds; split: share of the tokens that are on several ranks."""

    max_split: int
    waiting: float
    waiting_of_each: list[float]
    tokens_per_second: float
    tokens_per_second_of_each: list[float]
    split: float


def measure(rounds: int) -> Iterator[Row]:
    """A row without splitting and one with it."""
    cost = f"quadratic:1,{_linear():.0f},0"
    found: dict[int, list[tuple[float, float, float]]] = {1: [], RANKS: []}
    for _ in range(rounds):
        for max_split, each in found.items():
            each.append(_run(max_split, cost))
    for max_split, each in found.items():
        waiting, speed, split = (list(values) for values in zip(*each, strict=True))
        yield Row(max_split, median(waiting), waiting, median(speed), speed, median(split))


def _run(max_split: int, cost: str) -> tuple[float, float, float]:
    """Waiting, tokens a second, and the share of tokens that were split."""
    with (
        tempfile.TemporaryDirectory() as name,
        ServeProcess(
            Path(name), dp_size=RANKS, global_batch_size=BATCH, micro_batch_tokens=BUDGET,
            window=1, buffer_capacity=STEPS * BATCH, max_split=max_split, cost=cost,
        ) as server,
    ):  # fmt: skip
        push(server, _rollouts())
        with torchrun(Path(name), RANKS, __file__, server.endpoint, name, max_split) as trainers:
            finish(trainers, within=600)
        ranks = [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(RANKS)]
    seconds, tokens, split = np.array(ranks).transpose(2, 1, 0)  # each [micro-step, rank]
    took = seconds.max(axis=1).sum()
    return (
        float(1 - seconds.mean(axis=1).sum() / took),
        float(tokens.sum() / took),
        float((tokens * split).sum() / tokens.sum()),
    )


def _rollouts() -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(1)
    lengths = random.permutation(read_trace(TRACES / "lineage_open_reasoning.csv.gz"))
    for tokens in np.maximum(lengths * MEAN / lengths.mean(), 2)[: STEPS * BATCH].astype(int):
        yield {
            "input_ids": random.integers(0, VOCABULARY, tokens),
            "loss_mask": np.arange(tokens) > 0,
        }


# -- the ranks -------------------------------------------------------------------------------------


def train(endpoint: str, folder: Path, max_split: int) -> None:
    """Train until the stream ends; writes processor seconds, tokens and whether they were split."""
    torch.manual_seed(0)
    model: Any = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), []
    # Without splitting a block of one rank is what the same attention is for.
    with MicroBatchStream(endpoint, max_split=max(max_split, 2)) as stream:
        for step in stream:
            for micro_batch in step:
                began = thread_time()
                model.set_requires_gradient_sync(micro_batch.is_last)
                _loss(model, micro_batch).backward()  # type: ignore[no-untyped-call]
                took = thread_time() - began
                if step.number >= WARM_UP:
                    found.append([took, micro_batch.tokens, micro_batch.cp_size > 1])
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def _loss(model: Any, micro_batch: MicroBatch) -> Tensor:
    logits = model(micro_batch.input_ids, micro_batch.position_ids, partial(attend, micro_batch))
    losses = cross_entropy(logits, micro_batch.next_input_ids, reduction="none")
    return (losses * micro_batch.next_loss_weights).sum() * micro_batch.loss_scale


def attend(micro_batch: MicroBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention inside each sample; of a block each piece of it meets what is before."""
    keys, values = gather_block(torch.stack((key, value), dim=1), micro_batch).unbind(1)
    own, size = rows_in_block(micro_batch), micro_batch.cp_size
    found, at = list[Tensor](), 0
    for start, end in pairwise(micro_batch.cu_seqlens.tolist()):
        for rows in own[start // size : end // size].chunk(2 if size > 1 else 1):
            before, stop = int(rows[0]) - start, int(rows[-1]) + 1
            mask = torch.arange(stop - start) <= torch.arange(before, stop - start)[:, None]
            queries, before_them, their_values = (
                each.transpose(0, 1)[None]
                for each in (query[at : at + len(rows)], keys[start:stop], values[start:stop])
            )
            seen = scaled_dot_product_attention(
                queries, before_them, their_values, attn_mask=mask if before else None,
                is_causal=not before,
            )  # fmt: skip
            found.append(seen[0].transpose(0, 1))
            at += len(rows)
    return torch.cat(found)


def _linear() -> float:
    """K of the work s * s + k * s of a sample: from what a short and a long one take here."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, lengths, took = Transformer(), (MEAN // 4, 4 * MEAN), []

    def causal(*tensors: Tensor) -> Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in tensors)
        return scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)

    for tokens in lengths:
        ids, each = torch.zeros(tokens, dtype=torch.int64), []
        for _ in range(7):
            began = thread_time()
            model(ids, torch.arange(tokens), causal).sum().backward()
            each.append(thread_time() - began)
        took.append(min(each))
    (s, z), (t, u) = lengths, took
    return max((t * z * z - u * s * s) / (u * s - t * z), 0.0)


def _line(row: Row) -> str:
    each = ", ".join(f"{100 * one:.1f}" for one in row.waiting_of_each)
    return (
        f"max-split {row.max_split}: waiting {row.waiting:6.1%} ({each}), "
        f"{row.tokens_per_second:7,.0f} tokens/s, {row.split:.1%} of tokens on several ranks"
    )


def main() -> None:
    """Measure and print; under torchrun, train."""
    if len(sys.argv) == 4 and sys.argv[3].isdecimal():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
        dist.destroy_process_group()
        return
    parser = argparse.ArgumentParser(prog="python -m tests.bench.splitting")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report(measure(options.rounds), _line, options.json)


if __name__ == "__main__":
    main()
