"""The order in which samples arrive: epoch after epoch, each a seeded permutation of the trace.

Invariant: the order depends on the trace, the seed and whether groups stay together, and on
nothing else, so every strategy and window of a run is given the same samples in the same order.
A sample's id is "epoch-row": "0-17" is row 17 of the file, in the first epoch.
"""

from collections.abc import Iterator

import numpy as np

from rollout_dispatcher.core.buffer.entry import NO_LIMITS, MicroBatchLimits
from rollout_dispatcher.sample import Sample, Schema
from rollout_dispatcher.simulate.trace import Trace
from rollout_planner.types import BoolArray, IntArray, round_up

#: Samples that arrive together: one, or a whole group.
Unit = tuple[Sample, ...]
#: Every run of a table is given the same samples, so they are kept; beyond this they are made
#: again, as a million samples take some 200 MB.
KEPT_SAMPLES = 1_000_000

_NO_FIELDS = Schema(())
_NO_PAYLOAD = memoryview(b"")


class Epochs:
    """An endless supply of the samples of a trace."""

    def __init__(self, trace: Trace, seed: int, *, whole_groups: bool) -> None:
        self._trace = trace
        self._seed = seed
        self._units = _units(trace.group) if whole_groups else None
        self._kept: dict[int, list[Unit]] = {}

    def __iter__(self) -> Iterator[Unit]:
        epoch = 0
        while True:
            yield from self._epoch(epoch)
            epoch += 1

    def once_in_order_of_arrival(self) -> Iterator[tuple[float, Sample]]:
        """Arrival time and sample, as epoch 0, for a trace whose arrival times are all known."""
        trace = self._trace
        sizes = np.bincount(trace.group[trace.group >= 0], minlength=1)
        for at in np.argsort(trace.arrival, kind="stable").tolist():
            group = int(trace.group[at])
            size = int(sizes[group]) if group >= 0 else 1
            yield float(trace.arrival[at]), self._sample(0, at, group, size)

    def _epoch(self, epoch: int) -> list[Unit]:
        if epoch in self._kept:
            return self._kept[epoch]
        rng = np.random.default_rng((self._seed, epoch))
        if self._units is None:
            order = rng.permutation(len(self._trace)).tolist()
            units: list[Unit] = [(self._sample(epoch, at, -1, 1),) for at in order]
        else:
            units = []
            for which in rng.permutation(len(self._units)).tolist():
                members = self._units[which].tolist()
                group = int(self._trace.group[members[0]])
                units.append(tuple(self._sample(epoch, at, group, len(members)) for at in members))
        if (len(self._kept) + 1) * len(self._trace) <= KEPT_SAMPLES:
            self._kept[epoch] = units
        return units

    def _sample(self, epoch: int, at: int, group: int, size: int) -> Sample:
        tokens = int(self._trace.tokens[at])
        return Sample(
            f"{epoch}-{self._trace.row[at]}",
            tokens,
            tokens - 1,  # the first is never a target
            _NO_FIELDS,
            _NO_PAYLOAD,
            None if group < 0 else f"{epoch}-{group}",
            size,
        )


def doomed(
    trace: Trace,
    longest: int | None,
    *,
    whole_groups: bool,
    micro_batch: MicroBatchLimits = NO_LIMITS,
) -> BoolArray:
    """Samples of more than `longest` tokens (None: none are), where groups matter with theirs.

    micro_batch: what groups have to fit; those that are dropped else are among them.
    """
    gone: BoolArray = np.zeros(len(trace), np.bool_) if longest is None else trace.tokens > longest
    if micro_batch.drops and micro_batch.tokens is not None:
        tokens = round_up(trace.tokens, micro_batch.length_multiple)
        _, inverse = np.unique(trace.group, return_inverse=True)
        gone |= (trace.group >= 0) & (np.bincount(inverse, tokens)[inverse] > micro_batch.tokens)
    if whole_groups:
        gone |= (trace.group >= 0) & np.isin(trace.group, trace.group[gone])
    return gone


def _units(group: IntArray) -> list[IntArray]:
    """Positions of each group's samples, in order of its first; without a group, each its own."""
    own = np.where(group < 0, group.max(initial=0) + 1 + np.arange(len(group)), group)
    _, first, inverse, counts = np.unique(
        own, return_index=True, return_inverse=True, return_counts=True
    )
    by_group = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return [by_group[at] for at in np.argsort(first, kind="stable").tolist()]
