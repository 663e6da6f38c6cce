"""AReaL: `get_allocate_fn`, for `redistribute_trajectories` and for micro-batches.

The first has no capacity and one group a rank, the second a capacity. AReaL's
`balanced_greedy_partition(nums, K)` is `balanced_partition(nums, K, equal_size=True)`.
"""

from rollout_planner import pack


def allocate(values, capacity, min_groups, n_groups_divisor=1):
    limits = {"minimum": min_groups or 1, "multiple": n_groups_divisor}
    try:
        return pack(values, capacity, cost="tokens", fillers=False, **limits)
    except ValueError as error:
        raise RuntimeError(str(error)) from error  # as AReaL's own


def get_allocate_fn(algorithm="ffd"):
    if algorithm not in ("ffd", "kk"):
        raise ValueError(f"Unknown packing algorithm {algorithm!r}; use 'ffd' or 'kk'")
    return allocate
