"""The groups of a step by numbers, and the loss tokens of each over all DP ranks.

A group goes into a step whole, but its members may go to different ranks: what is averaged over the
tokens of a group needs a total that no single rank can count. A sample without a group is a group
of its own. Numbers are given in the order of the plan, so that they are the same whenever a step is
told of.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from typing import Self

from rollout_dispatcher.core.steps.step import MicroBatches


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """numbers[dp rank][micro-batch]: of the group of each sample. loss_tokens: by that number."""

    numbers: tuple[tuple[tuple[int, ...], ...], ...]
    loss_tokens: tuple[int, ...]

    @classmethod
    def of(cls, micro_batches: MicroBatches) -> Self | None:
        """Of a step; None if no sample of it has a group."""
        samples = [entry.sample for rank in micro_batches for part in rank for entry in part]
        if not any(sample.group_id for sample in samples):
            return None
        following = count()
        known: defaultdict[str, int] = defaultdict(following.__next__)
        given = [known[s.group_id] if s.group_id else next(following) for s in samples]
        totals = [0] * next(following)
        for number, sample in zip(given, samples, strict=True):
            totals[number] += sample.loss_tokens
        taken = iter(given)
        numbers = tuple(
            tuple(tuple(next(taken) for _ in part) for part in rank) for rank in micro_batches
        )
        return cls(numbers, tuple(totals))
