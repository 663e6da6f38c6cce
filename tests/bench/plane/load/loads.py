"""What is pushed: sizes, lengths and contents, the same for us, the floors and the peers.

A load has a pool of distinct samples that a producer repeats. Contents follow from the pool index
and the token's position, so a receiver knows what has to be there without having seen it:

    input_ids  int64    SPACING * index + position
    logprobs   float32  (index + position) modulo 1024
    loss_mask  bool     position modulo 4 is not 0
    features   float16  [tokens, width], (index + position) modulo 512; only with a width

Needs numpy only: the peers' environments import it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
IntArray = NDArray[np.int64]

#: More than any sample has tokens, so that a token id names its sample.
SPACING = 1 << 24
#: Bytes a token of each field that every load has: int64, float32 and bool.
PLAIN_FIELD_BYTES = (8, 4, 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """The samples of a load.

    tokens: the mean. spread: sigma of the lognormal lengths, 0: all equal. least: tokens of the
    shortest.
    """

    tokens: int
    width: int = 0
    spread: float = 0.0
    least: int = 16

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one token over all fields."""
        return sum(PLAIN_FIELD_BYTES) + 2 * self.width


@dataclass(frozen=True)
class Load:
    """A load of one size.

    pool: distinct samples. batch: samples a step. micro_batch: samples a micro-batch. push: samples
    a push. steps: steps a run.
    """

    name: str
    shape: Shape
    pool: int
    batch: int
    micro_batch: int
    push: int
    steps: int

    @property
    def samples(self) -> int:
        """Samples of one run."""
        return self.batch * self.steps

    @cached_property
    def lengths(self) -> IntArray:
        """Tokens of each sample of the pool."""
        shape = self.shape
        if not shape.spread:
            return np.full(self.pool, shape.tokens, np.int64)
        rng = np.random.default_rng(5)
        drawn = rng.lognormal(-(shape.spread**2) / 2, shape.spread, self.pool)
        longest = 8 * shape.tokens
        return np.asarray(
            np.clip(shape.tokens * drawn / drawn.mean(), shape.least, longest), np.int64
        )

    @cached_property
    def nbytes(self) -> IntArray:
        """Payload bytes of each sample of the pool."""
        return np.multiply(self.lengths, self.shape.token_bytes)

    @property
    def run_bytes(self) -> int:
        """Payload bytes of one run, which goes through the pool from its start."""
        whole, rest = divmod(self.samples, self.pool)
        return int(whole * self.nbytes.sum() + self.nbytes[:rest].sum())

    def stepping(self, batch: int, push: int) -> "Load":
        """As many samples in steps and pushes of other sizes, as far as whole steps go."""
        return replace(self, batch=batch, push=push, steps=max(1, self.samples // batch))

    @property
    def quick(self) -> "Load":
        """The same in a tenth of the steps, to see that it works."""
        return replace(self, steps=-(-self.steps // QUICK))

    def order(self) -> dict[str, object]:
        """What a process has to be told to find this load."""
        return {"load": self.name, **{size: getattr(self, size) for size in SIZES}}

    def fields(self, index: int) -> dict[str, Array]:
        """The tensors of one sample of the pool."""
        tokens, width = int(self.lengths[index]), self.shape.width
        position = np.arange(tokens)
        made: dict[str, Array] = {
            "input_ids": SPACING * index + position,
            "logprobs": ((index + position) % 1024).astype(np.float32),
            "loss_mask": position % 4 != 0,
        }
        if width:
            made["features"] = np.repeat(_feature(index, position)[:, None], width, axis=1)
        return made


def _feature(index: int, position: IntArray) -> NDArray[np.float16]:
    return ((index + position) % 512).astype(np.float16)


#: 26 kB in the mean, as reasoning rollouts of some thousand tokens are.
LOGNORMAL = Shape(2000, spread=0.8)

#: What may be another than `LOADS` has it, where a load is run in other sizes.
SIZES = ("batch", "push", "steps")

#: One step in so many of a run is left when it is to be quick.
QUICK = 10

#: Samples of one size, in KiB, by one and by eight a push: `16k-by-1` to `16384k-by-8`.
SIZES_KIB, PUSHES = (16, 64, 256, 512, 1024, 2048, 4096, 16384), (1, 8)
#: Bytes of a run of those, and its steps at the least and at the most.
SIZED_RUN_BYTES, LEAST_STEPS, MOST_STEPS = 256 << 20, 2, 64


def sized(kib: int, push: int) -> Load:
    """Samples of so many KiB, a few bytes more, most of them features; so many a push."""
    width, batch = 64, 16
    tokens = -(-(kib << 10) // Shape(1, width).token_bytes)
    steps = max(LEAST_STEPS, min(MOST_STEPS, SIZED_RUN_BYTES // (batch * kib << 10)))
    shape = Shape(tokens, width)
    return Load(f"{kib}k-by-{push}", shape, 16, batch, micro_batch=4, push=push, steps=steps)


LOADS = {
    load.name: load
    for load in (
        Load("1k", Shape(77), pool=4096, batch=1024, micro_batch=64, push=256, steps=40),
        Load("26k", LOGNORMAL, pool=512, batch=256, micro_batch=8, push=64, steps=80),
        Load("1m", Shape(7424, width=64), pool=32, batch=16, micro_batch=1, push=4, steps=48),
        Load("50m", Shape(4096, width=6144), pool=4, batch=2, micro_batch=1, push=1, steps=12),
        # One step a push, so that no sample waits for others.
        Load("hop", LOGNORMAL, pool=512, batch=16, micro_batch=8, push=16, steps=300),
        Load("512x8", LOGNORMAL, pool=512, batch=512, micro_batch=8, push=64, steps=40),
        Load("crowd", Shape(77), pool=4096, batch=4096, micro_batch=8, push=64, steps=10),
        # No sample is smaller than a page.
        Load(
            "held",
            Shape(2000, spread=0.8, least=316),
            pool=512,
            batch=4096,
            micro_batch=8,
            push=64,
            steps=3,
        ),
        *(sized(kib, push) for kib in SIZES_KIB for push in PUSHES),
    )
}


def find(order: Mapping[str, Any]) -> Load:
    """The load of an `order`."""
    return replace(LOADS[order["load"]], **{size: order[size] for size in SIZES})
