"""`LengthBucketSampler`: balance for offline data, by putting samples of like length together.

Samples are sorted by length and cut into buckets; each epoch shuffles inside every bucket, cuts
global batches from it, and shuffles the batches. All DP ranks of a step then draw from one bucket.
Inside a global batch the samples are dealt out by length, to and fro, so that ranks get as much
work each and work on samples of like length at the same time. Where samples are produced while
training goes on there is nothing to sort beforehand: that is what the dispatcher's window is for.

Example: a global batch of lengths 9 7 6 5 3 1 for two ranks: 9 | 7, then 5 | 6, then 3 | 1, so rank
0 takes 9 5 3 and rank 1 takes 7 6 1.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from rollout_dispatcher.errors import ConfigError
from rollout_workers.process_group import find_place
from rollout_workers.replica.places import place_in, refuse_contradiction


class LengthBucketSampler(Sampler[int]):
    """Indices of this DP rank, in epochs; for `DataLoader(sampler=..., batch_size=...)`.

    lengths: tokens of each sample, one entry a sample of the dataset.
    batch_size: samples that one rank takes in one step.
    bucket_batches: global batches in a bucket; 1 is the best balance and the least shuffling.
    dp_rank, dp_size: default: of the process group or the environment, else a single process.
    mesh, dp_dims: the trainer's device mesh and the names of its data-parallel dimensions, in place
        of these; ranks of one model replica draw the same indices.
    drop_last: leave out the samples that do not fill a last global batch, rather than repeat
        some from the beginning of the epoch so that all ranks get equally many.

    Every rank must use the same arguments. Resumable: `state_dict()` counts what was yielded,
    which with a prefetching DataLoader is ahead of what was trained on. Raises ConfigError.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        *,
        batch_size: int,
        bucket_batches: int = 16,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        dp_dims: str | Sequence[str] | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        refuse_contradiction(mesh, dp_dims, dp_rank, dp_size)
        place = find_place(dp_rank, dp_size, None) if mesh is None else place_in(mesh, dp_dims).dp
        self._lengths = np.asarray(lengths, np.int64)
        if batch_size < 1 or bucket_batches < 1:
            raise ConfigError(
                f"batch_size {batch_size} and bucket_batches {bucket_batches} must be at least 1"
            )
        self._dp_rank, self._dp_size = place.dp_rank, place.dp_size
        self._batch_size = batch_size
        self._global_batch = batch_size * place.dp_size
        self._bucket = bucket_batches * self._global_batch
        self._seed, self._drop_last = seed, drop_last
        if self._lengths.ndim != 1 or not self._per_rank:
            raise ConfigError(
                f"{self._lengths.size} lengths make no batch of {batch_size} samples on each of "
                f"{place.dp_size} DP ranks; lower batch_size or set drop_last=False"
            )
        self.epoch = 0
        self._yielded = 0

    def __len__(self) -> int:
        """Indices that this rank yields in an epoch."""
        return self._per_rank

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of this epoch, which is all of it unless it was resumed."""
        indices = self._indices()
        while self._yielded < len(indices):
            self._yielded += 1
            yield int(indices[self._yielded - 1])
        self.epoch += 1
        self._yielded = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next iteration; epochs follow each other without it."""
        if epoch != self.epoch:
            self.epoch, self._yielded = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where this sampler stands."""
        return {"epoch": self.epoch, "yielded": self._yielded, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where another sampler stood. Raises ConfigError if it shuffled otherwise."""
        if state["seed"] != self._seed:
            raise ConfigError(
                f"the state is of seed {state['seed']}, this sampler has seed {self._seed}"
            )
        self.epoch, self._yielded = state["epoch"], state["yielded"]

    @property
    def _per_rank(self) -> int:
        count = self._lengths.size
        if self._drop_last:
            return count // self._global_batch * self._batch_size
        return -(-count // self._dp_size)

    def _indices(self) -> NDArray[np.int64]:
        """This rank's indices of the current epoch, in order."""
        rng = np.random.default_rng([self._seed, self.epoch])
        order = self._shuffled(rng)
        whole = order.size // self._global_batch * self._global_batch
        rows = order[:whole].reshape(-1, self._global_batch)
        rows = rows[rng.permutation(len(rows))]
        mine = self._deal(rows).ravel()
        if self._drop_last:
            return mine
        rest = order[whole:]
        missing = -rest.size % self._dp_size
        rest = np.concatenate([rest, np.resize(rows if rows.size else rest, missing)])
        return np.concatenate([mine, rest[self._dp_rank :: self._dp_size]])

    def _deal(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's part of global batches [n, R * b] -> [n, b], longest first."""
        longest_first = np.argsort(-self._lengths[rows], axis=1, kind="stable")
        table = np.take_along_axis(rows, longest_first, axis=1)
        table = table.reshape(-1, self._batch_size, self._dp_size)
        table[:, 1::2] = table[:, 1::2, ::-1].copy()
        return table[:, :, self._dp_rank]

    def _shuffled(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """All indices by length, shuffled inside buckets; the shortest come last.

        What does not fill a global batch is then short, and so is any repetition of it.
        """
        order = np.argsort(-self._lengths, kind="stable")
        for start in range(0, order.size, self._bucket):
            rng.shuffle(order[start : start + self._bucket])
        return order
