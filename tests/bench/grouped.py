"""`LengthBucketSampler` beside transformers' grouped sampler: what ranks wait for, and distance.

    python -m tests.bench.grouped [--steps 80] [--json FILE]

Theirs is called as their Trainer does, with a global batch at a time, from the wheel that `make
bench-peers` unpacks; each rank gets every R-th index. Excess is over the unpadded work / R, of all
steps together: ranks that meet once a step, at every packed micro-batch, at every padded one.
Distance is the Kolmogorov-Smirnov distance of a step's lengths from the data's, the mean. Ours has
rows for several sizes of buckets: the one to compare is that with a distance no larger than theirs.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rollout_planner import Quadratic
from rollout_planner.types import IntArray
from rollout_workers import LengthBucketSampler
from tests.bench.approaches import distance
from tests.peers.adapters import transformers
from tests.peers.lengths import available, draw
from tests.peers.loading import UNPACKED

LENGTHS = ("lineage", "reasoning_gym", "azure_conv", "lognormal")
#: Ranks, samples of a rank in a step, and of a micro-batch.
SHAPES = ((8, 8, 1), (8, 8, 4), (4, 16, 4), (16, 4, 2))
BUCKETS = (1, 4, 16, None)
SEED = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One sampler on one data set; excess as ratios."""

    lengths: str
    ranks: int
    batch: int
    micro_batch: int
    sampler: str
    step_excess: float
    packed_excess: float
    padded_excess: float
    distance: float


def rows(name: str, ranks: int, batch: int, micro_batch: int, steps: int) -> Iterator[Row]:
    """Theirs if it is there, then ours in buckets of each size."""
    lengths = draw(name, ranks * batch * steps, 2718)
    found = {f"ours {size or 'all'}": _ours(lengths, ranks, batch, micro_batch, size)
             for size in BUCKETS}  # fmt: skip
    if (module := transformers.module(UNPACKED)) is not None:
        found = {"transformers": _theirs(module, lengths, ranks, batch)} | found
    for sampler, taken in found.items():
        yield Row(name, ranks, batch, micro_batch, sampler, *measure(lengths[taken], micro_batch))


def _ours(
    lengths: IntArray, ranks: int, batch: int, micro_batch: int, buckets: int | None
) -> IntArray:
    """Indices of the data, int64[step, rank, sample]."""
    taken = [
        list(LengthBucketSampler(
            lengths, batch_size=batch, micro_batch_size=micro_batch, bucket_batches=buckets,
            dp_rank=rank, dp_size=ranks, seed=SEED,
        ))
        for rank in range(ranks)
    ]  # fmt: skip
    return np.array(taken).reshape(ranks, -1, batch).swapaxes(0, 1)


def _theirs(module: Any, lengths: IntArray, ranks: int, batch: int) -> IntArray:
    generator = torch.Generator().manual_seed(SEED)
    found = module.get_length_grouped_indices(lengths.tolist(), ranks * batch, generator=generator)
    return np.array(found).reshape(-1, batch, ranks).swapaxes(1, 2)


def measure(tokens: IntArray, micro_batch: int) -> tuple[float, float, float, float]:
    """What a row says of tokens[step, rank, sample], micro-batches of so many side by side."""
    steps, ranks, _ = tokens.shape
    work = Quadratic()(tokens.ravel()).reshape(steps, ranks, -1, micro_batch)
    even = float(work.sum()) / ranks
    times = (
        work.sum(axis=(2, 3)).max(axis=1),
        work.sum(axis=3).max(axis=1),
        micro_batch * work.max(axis=3).max(axis=1),
    )
    step, packed, padded = (float(time.sum()) / even - 1 for time in times)
    data = np.sort(tokens.ravel())
    return step, packed, padded, fmean(distance(each.ravel(), data) for each in tokens)


HEADING = (
    f"{'lengths':14} {'ranks':>5} {'batch':>5} {'micro':>5} {'sampler':13} {'step %':>8}"
    f" {'packed %':>9} {'padded %':>9} {'distance':>9}"
)


def line(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.lengths:14} {row.ranks:5} {row.batch:5} {row.micro_batch:5} {row.sampler:13}"
        f" {100 * row.step_excess:8.2f} {100 * row.packed_excess:9.2f}"
        f" {100 * row.padded_excess:9.2f} {row.distance:9.3f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=80, help="global batches of the data")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    if transformers.module(UNPACKED) is None:
        print("transformers is not in build/bench/peers; `make bench-peers` fetches it")
    print(HEADING)
    found = []
    for name in filter(available, LENGTHS):
        for shape in SHAPES:
            for row in rows(name, *shape, given.steps):
                found.append(row)
                print(line(row), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
