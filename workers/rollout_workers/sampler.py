"""`LengthBucketSampler`: balance for offline data, by giving all ranks samples of like length.

Samples that are produced during training cannot be sorted beforehand: use the dispatcher's window.

Samples are sorted by length and cut into *runs* of like ones: a micro-batch for every rank. Runs
are cut into buckets, and each step takes runs from all over one bucket, so that its lengths are
spread as the bucket's, while ranks that work at the same time work on one run.

Example: lengths 9 8 7 6 5 4 3 2 for two ranks, two samples a rank and step, runs of 2: the runs are
98 76 54 32. In a bucket of two steps the upper half, 98 76, has a run for each of them, and so has
the lower: the steps are 98 54 and 76 32. In buckets of one step they are 98 76 and 54 32.

Ranks get a run's samples row by row, a sample each: the longest goes to the rank with the least
work so far. That does not change the longest of a row, and levels ranks by the end of the step.
Pure: the same arguments give the same order on every rank and machine.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from rollout_dispatcher.errors import ConfigError, UnequalPartitions
from rollout_planner.cost import Quadratic
from rollout_planner.public.arguments import as_lengths
from rollout_planner.types import FloatArray, IntArray
from rollout_workers.process_group import find_place
from rollout_workers.replica.join import place_in, refuse_contradiction

#: Shuffling moves a sample by at most so many runs in the sorted data, and two places more, so that
#: runs differ from epoch to epoch. Ranks that meet at every micro-step wait 1.0 to 1.2 times as
#: long as without it, and 1.2 to 1.7 times with a whole run.
JITTER = 0.25
#: And only past samples that are shorter by at most this share: the longest samples have few of
#: like length, and ranks would wait for one among shorter ones.
LIKE = 0.01

#: Of the algorithm: a new number for each change that gives another order to the same arguments.
VERSION = 2

_COST = Quadratic()


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of samples in an epoch, by its options.

    lengths: tokens[n]. bucket_batches: steps in a bucket; None: all are in one. The rest is as
    `LengthBucketSampler` has it.
    """

    lengths: IntArray
    batch_size: int
    micro_batch_size: int
    dp_size: int
    bucket_batches: int | None
    seed: int
    shuffle: bool
    drop_last: bool

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks."""
        return self.batch_size * self.dp_size

    @property
    def per_rank(self) -> int:
        """Indices that a rank yields in an epoch."""
        if self.drop_last:
            return self.lengths.size // self.global_batch * self.batch_size
        return -(-self.lengths.size // self.dp_size)

    @cached_property
    def shaping(self) -> dict[str, int | str]:
        """The options, in numbers and text."""
        return {
            "version": VERSION,
            "samples": self.lengths.size,
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "dp_size": self.dp_size,
            "drop_last": int(self.drop_last),
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "bucket_batches": self.bucket_batches or 0,
            "lengths": blake2b(self.lengths.astype("<i8").tobytes(), digest_size=8).hexdigest(),
        }

    def of_rank(self, epoch: int, dp_rank: int) -> IntArray:
        """Indices of the samples that this rank gets in an epoch."""
        random, run = _Random(self.seed, epoch), self.micro_batch_size * self.dp_size
        order = self._by_length(random, run)
        whole = order.size // self.global_batch * self.global_batch
        steps = self._steps(random, order[:whole].reshape(-1, run))
        mine = self._deal(steps)[:, :, dp_rank].ravel()
        if whole == order.size:
            return mine
        last = self._last(order, whole)
        return np.concatenate([mine, self._deal(last)[:, :, dp_rank].ravel()])

    def _by_length(self, random: "_Random", run: int) -> IntArray:
        """Samples by descending length, nearly so if shuffled, without dropped ones."""
        order: IntArray = np.argsort(-self.lengths, kind="stable")
        kept = order.size // self.global_batch * self.global_batch if self.drop_last else order.size
        if not self.shuffle:
            return order[:kept]
        if kept < order.size:
            order = order[np.sort(random.order(order.size)[:kept])]
        places = np.arange(kept)
        negative = -self.lengths[order]  # ascending, as a search needs it
        like = np.searchsorted(negative, negative * (1 - LIKE), side="right") - places
        moved = places + random.fractions(kept) * np.minimum(like, 2 + JITTER * run)
        return order[np.argsort(moved, kind="stable")]

    def _steps(self, random: "_Random", runs: IntArray) -> IntArray:
        """Steps [n, B] of runs [n * p, run]; in each step, and each run, the longest come first."""
        longest_first = np.argsort(-self.lengths[runs], axis=1, kind="stable")
        runs = np.take_along_axis(runs, longest_first, axis=1)
        count = runs.size // self.global_batch
        a_bucket = min(self.bucket_batches or count, count)
        full = count - count % max(1, a_bucket)
        border = full * self.global_batch // runs.shape[1]
        buckets = (runs[:border], a_bucket), (runs[border:], count - full)
        steps = np.concatenate([self._mix(random, part, size) for part, size in buckets])
        return self._ordered(random, steps)

    def _mix(self, random: "_Random", runs: IntArray, size: int) -> IntArray:
        """Steps of the runs of buckets of `size` steps each.

        A bucket is cut into as many equal parts as a step has runs, and each step gets one of each.
        """
        if not len(runs):
            return runs.reshape(0, self.global_batch)
        run = runs.shape[1]
        parts = runs.reshape(-1, self.global_batch // run, size, run)
        if self.shuffle:
            taken = random.order(*parts.shape[:3])
            parts = np.take_along_axis(parts, taken[..., None], axis=2)
        return parts.swapaxes(1, 2).reshape(-1, self.global_batch)

    def _ordered(self, random: "_Random", steps: IntArray) -> IntArray:
        """In random order, but for the one with the longest sample."""
        if not self.shuffle or not len(steps):
            return steps
        steps = steps[random.order(len(steps))]
        longest = int(self.lengths[steps].max(axis=1).argmax())
        steps[[0, longest]] = steps[[longest, 0]]
        return steps

    def _last(self, order: IntArray, whole: int) -> IntArray:
        """The step [1, r] of those that fill no whole one, filled up for all ranks.

        They are the shortest, and so are those that are repeated: the next longer ones.
        """
        missing = -(order.size - whole) % self.dp_size
        again = np.resize(order[max(0, whole - missing) : whole or None], missing)
        last = np.concatenate([order[whole:], again])
        return last[np.argsort(-self.lengths[last], kind="stable")][None]

    def _deal(self, steps: IntArray) -> IntArray:
        """Steps [n, B] to ranks [n, B / R, R]: the longest of a row to the rank of least work."""
        rows = steps.reshape(len(steps), steps.shape[1] // self.dp_size, self.dp_size)
        work = _COST(self.lengths)[rows]
        heaviest_first = np.argsort(-work, axis=2, kind="stable")
        load: FloatArray = np.zeros((len(rows), self.dp_size))
        dealt = np.empty_like(rows)
        for row in range(rows.shape[1]):
            least_first = np.argsort(load, axis=1, kind="stable")
            order = heaviest_first[:, row]
            given = np.empty_like(order)
            np.put_along_axis(given, least_first, order, axis=1)
            dealt[:, row] = np.take_along_axis(rows[:, row], given, axis=1)
            load += np.take_along_axis(work[:, row], given, axis=1)
        return dealt


class _Random:
    """Random orders from a bit stream that numpy promises never to change, as its methods' may."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))

    def fractions(self, count: int) -> FloatArray:
        """Float64[count] in [0, 1)."""
        whole = self._bits.random_raw(count) >> np.uint64(11)
        return whole.astype(np.float64) * 2.0**-53

    def order(self, *shape: int) -> NDArray[np.intp]:
        """Permutations of the last dimension."""
        keys = self._bits.random_raw(int(np.prod(shape))).reshape(shape)
        return np.argsort(keys, axis=-1, kind="stable")


@dataclass(slots=True)
class Position:
    """The position of an iteration. begun: whether an iterator has it.

    yielded: indices of the epoch that this rank got.
    """

    epoch: int
    yielded: int = 0
    begun: bool = False


class LengthBucketSampler(Sampler[int]):
    """Indices of this DP rank, in epochs; for `DataLoader(sampler=..., batch_size=...)`.

    lengths: tokens of each sample, one entry a sample of the dataset.
    batch_size: samples that one rank takes in one step.
    micro_batch_size: samples that one rank takes at once, a part of batch_size without remainder;
        where they are padded to each other, as many as are. These are of like length, on all ranks.
    bucket_batches: global batches in a bucket. With 1 the samples of a step are all of like length;
        the more, the more a step's lengths are as the data's. None: all data are one bucket.
    dp_rank, dp_size: default: of the process group or the environment, else a single process.
    mesh, dp_dims: the trainer's device mesh and the names of its data-parallel dimensions, in place
        of these; ranks of one model replica draw the same indices.
    seed, shuffle: an epoch's order depends on the seed and the epoch's number; with shuffle=False
        all epochs are alike, and the longest come first.
    drop_last: leave out samples that do not fill a last global batch, others in each epoch, rather
        than repeat some of the shortest so that all ranks get equally many.

    Every rank must use the same arguments. Each epoch begins with the step that has its longest
    sample, so that memory that does not suffice shows at once.

    Each iterator yields a whole epoch, whatever became of others; once all of an epoch was yielded
    the next iterator begins the next one. Only the first iterator after `load_state_dict` goes on
    in the middle. An iterator begins when it is first asked for an index.

    The state is where the latest iterator stands, or what was loaded or set since, the same on all
    ranks. It counts what was yielded, which with a prefetching DataLoader is ahead of what was
    trained on; torchdata's StatefulDataLoader asks in time. Raises ConfigError.
    """

    def __init__(
        self,
        lengths: Iterable[int] | NDArray[Any],
        *,
        batch_size: int,
        micro_batch_size: int = 1,
        bucket_batches: int | None = 16,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        dp_dims: str | Sequence[str] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        refuse_contradiction(mesh, dp_dims, dp_rank, dp_size)
        place = find_place(dp_rank, dp_size, None) if mesh is None else place_in(mesh, dp_dims).dp
        batch_size = _at_least("batch_size", batch_size, 1)
        micro_batch_size = _at_least("micro_batch_size", micro_batch_size, 1)
        if bucket_batches is not None:
            bucket_batches = _at_least("bucket_batches", bucket_batches, 1)
        seed = _at_least("seed", seed, 0)
        if batch_size % micro_batch_size:
            raise ConfigError(
                f"batch_size {batch_size} is no multiple of micro_batch_size {micro_batch_size}; "
                "a rank's step is whole micro-batches"
            )
        tokens = _tokens(lengths)
        self._dp_rank = place.dp_rank
        self._order = EpochOrder(
            tokens, batch_size, micro_batch_size, place.dp_size, bucket_batches, seed,
            bool(shuffle), bool(drop_last),
        )  # fmt: skip
        if not self._order.per_rank:
            raise ConfigError(
                f"{tokens.size} lengths make no batch of {batch_size} samples on each of "
                f"{place.dp_size} DP ranks; lower batch_size or set drop_last=False"
            )
        self._position = Position(0)

    @property
    def epoch(self) -> int:
        """The epoch at hand, from 0."""
        return self._position.epoch

    def __len__(self) -> int:
        """Indices that this rank yields in an epoch."""
        return self._order.per_rank

    def __iter__(self) -> Iterator[int]:
        """An epoch: from where a loaded state stood, else all of it."""
        position = self._begin()
        indices = self._order.of_rank(position.epoch, self._dp_rank)
        for found in indices[position.yielded :].tolist():
            position.yielded += 1
            yield found
        if position is self._position:  # else another one is counted by now
            self._position = Position(position.epoch + 1)

    def _begin(self) -> Position:
        """The position of a new iterator, which is counted from now on."""
        latest = self._position
        if latest.begun:
            over = latest.yielded == len(self)
            self._position = Position(latest.epoch + over)
        self._position.begun = True
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next iteration; epochs follow each other without it.

        The epoch of a state that was loaded goes on where it stood.
        """
        epoch = _at_least("epoch", epoch, 0)
        over = self._position.begun and self._position.yielded == len(self)
        if epoch != self.epoch or over:
            self._position = Position(epoch)

    def state_dict(self) -> dict[str, int | str]:
        """Where the latest iterator stands, and what its order depends on; of any rank for all."""
        return {
            "epoch": self._position.epoch,
            "yielded": self._position.yielded,
            **self._order.shaping,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where another sampler of the same arguments stood, in the next iteration.

        Raises ConfigError for any other state, and changes nothing then.
        """
        differs = [
            f"{name} {state.get(name)!r}, this one has {here!r}"
            for name, here in self._order.shaping.items()
            if state.get(name) != here
        ]
        if differs:
            raise ConfigError(
                f"the state is of a sampler with {'; '.join(differs)}: its samples come in another "
                "order, in which no state of the other holds; begin an epoch anew"
            )
        epoch = _at_least("the state's epoch", state.get("epoch"), 0)
        yielded = _at_least("the state's yielded", state.get("yielded"), 0)
        if yielded > len(self):
            raise ConfigError(f"the state has {yielded} indices of an epoch of {len(self)}")
        self._position = Position(epoch, yielded)


def _at_least(name: str, value: Any, least: int) -> int:
    try:
        number = index(value)
    except TypeError:
        raise ConfigError(f"{name} {value!r} is not a whole number") from None
    if number < least:
        raise ConfigError(f"{name} {number} must be at least {least}")
    return number


def _tokens(lengths: Iterable[int] | NDArray[Any]) -> IntArray:
    """Int64[n], a copy: later changes of the argument do not change the order."""
    try:
        return as_lengths(lengths)
    except UnequalPartitions as error:
        raise ConfigError(str(error)) from None
