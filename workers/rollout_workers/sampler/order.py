"""The order of an epoch: which samples make a step, which of them a rank gets, and when.

Samples are sorted by length and cut into *runs* of like ones: a micro-batch for every rank. Runs
are cut into buckets, and each step takes runs from all over one bucket, so that its lengths are
spread as the bucket's, while ranks that work at the same time work on one run.

Example: lengths 9 8 7 6 5 4 3 2 for two ranks, two samples a rank and step, runs of 2: the runs are
98 76 54 32. In a bucket of two steps the upper half, 98 76, has a run for each of them, and so has
the lower: the steps are 98 54 and 76 32. In buckets of one step they are 98 76 and 54 32.

Ranks get a run's samples row by row, a sample each: the longest goes to the rank with the least
work so far. What all ranks meet for in a row is not changed by that, and at the end of the step
they are level. Pure: the same arguments give the same order on every rank and machine.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_planner.cost import Quadratic
from rollout_planner.types import FloatArray, IntArray

#: How far shuffling moves a sample at most in the sorted data, in runs, and two places more: what
#: makes runs differ from epoch to epoch. Ranks that meet at every micro-step wait 1.0 to 1.2 times
#: as long as without it, and 1.2 to 1.7 times with a whole run.
JITTER = 0.25
#: And past samples that are shorter by at most this share: where few are of like length, as the
#: longest are, ranks would wait for a sample among shorter ones.
LIKE = 0.01

_COST = Quadratic()


@dataclass(frozen=True, slots=True, eq=False)
class EpochOrder:
    """What shapes the order of samples, beside the number of ranks.

    lengths: tokens[n]. global_batch: samples of a step. bucket_batches: steps in a bucket; None:
    all are in one. The rest is as `LengthBucketSampler` has it.
    """

    lengths: IntArray
    global_batch: int
    bucket_batches: int | None
    seed: int
    shuffle: bool
    longest_first: bool
    drop_last: bool

    def of_rank(self, epoch: int, run: int, dp_rank: int, dp_size: int) -> IntArray:
        """Indices of the samples that this rank gets in an epoch, in runs of so many samples.

        `run` and `dp_size` divide the global batch. Which samples a step has depends on the run,
        and not on the number of ranks.
        """
        random = _Random(self.seed, epoch)
        order = self._by_length(random, run)
        whole = order.size // self.global_batch * self.global_batch
        steps = self._steps(random, order[:whole].reshape(-1, run))
        mine = self._deal(steps, dp_size)[:, :, dp_rank].ravel()
        if whole == order.size:
            return mine
        last = self._last(order, whole, dp_size)
        return np.concatenate([mine, self._deal(last, dp_size)[:, :, dp_rank].ravel()])

    def _by_length(self, random: "_Random", run: int) -> IntArray:
        """Samples by descending length, nearly so if shuffled; what is dropped left out."""
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
        if self.longest_first:
            longest = int(self.lengths[steps].max(axis=1).argmax())
            steps[[0, longest]] = steps[[longest, 0]]
        return steps

    def _last(self, order: IntArray, whole: int, dp_size: int) -> IntArray:
        """The step [1, r] of those that fill no whole one, filled up for all ranks.

        They are the shortest, and so are those that are repeated: the next longer ones.
        """
        missing = -(order.size - whole) % dp_size
        again = np.resize(order[max(0, whole - missing) : whole or None], missing)
        last = np.concatenate([order[whole:], again])
        return last[np.argsort(-self.lengths[last], kind="stable")][None]

    def _deal(self, steps: IntArray, dp_size: int) -> IntArray:
        """Steps [n, B] to ranks [n, B / R, R]: of each row the longest to whom has least to do."""
        rows = steps.reshape(len(steps), steps.shape[1] // dp_size, dp_size)
        work = _COST(self.lengths)[rows]
        heaviest_first = np.argsort(-work, axis=2, kind="stable")
        load: FloatArray = np.zeros((len(rows), dp_size))
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
