"""Windows to plan from, of lengths alone or with what else a test is about."""

from collections.abc import Sequence

import numpy as np

from rollout_planner.types import IntArray, Window


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
