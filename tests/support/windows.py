"""Windows to plan from, of lengths alone or with what else a test is about."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from rollout_planner.planner import plan
from rollout_planner.types import IntArray, Plan, PlanConfig, Window


def window_of(
    lengths: Sequence[int] | IntArray,
    group: Sequence[int] | IntArray | None = None,
    *,
    skips: IntArray | None = None,
) -> Window:
    """Samples of these lengths that nobody has passed over and that belong to no group."""
    none = np.zeros(len(lengths), dtype=np.int64)
    members = none - 1 if group is None else np.array(group)
    return Window(np.array(lengths), none if skips is None else skips, members, none > 0)


def refilled(
    lengths: Iterable[int], size: int, config: PlanConfig
) -> Iterator[tuple[Window, Plan]]:
    """Windows of `size` samples in order of arrival, and the plan of each, whose samples leave.

    Until the last sample has left, or without end.
    """
    arriving = iter(lengths)
    tokens, skips = np.zeros(0, np.int64), np.zeros(0, np.int64)
    while True:
        fresh = np.fromiter(islice(arriving, size - len(tokens)), np.int64)
        tokens = np.concatenate([tokens, fresh])
        skips = np.concatenate([skips, np.zeros(len(fresh), np.int64)])
        if not len(tokens):
            return
        window = window_of(tokens, skips=skips)
        found = plan(window, config)
        yield window, found
        left = np.delete(np.arange(len(tokens)), found.chosen)
        tokens, skips = tokens[left], skips[left] + 1
