"""What verl logs about a batch before and after it is balanced, under the same names.

Invariant: for a batch that divides by the number of parts the figures are those of verl's
`log_seqlen_unbalance`.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from rollout_planner.errors import UnequalPartitions
from rollout_planner.numbers import as_plain


def log_seqlen_unbalance(
    seqlen_list: Any, partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """How far sums of lengths differ: as the batch came, cut in order, and as it is split.

    seqlen_list: tokens of each sample. partitions: indices of each part, as `balanced_partition` or
    `get_seqlen_balanced_partitions` give them. Returns, each with `prefix/` before it: `min`, `max`
    and `minmax_diff` of the parts that the batch falls into if it is cut in order, `balanced_min`
    and `balanced_max` of `partitions`, and the `mean` of both. It returns and logs nothing itself:
    trainers update their metrics with it. Raises UnequalPartitions if there are no parts, or
    an index is none of a length's.
    """
    lengths, k = as_plain(seqlen_list), len(partitions)
    if not k:
        raise UnequalPartitions("there are no partitions to describe")
    for i in chain.from_iterable(partitions):
        if not 0 <= i < len(lengths):
            raise UnequalPartitions(
                f"a partition has index {i}, and there are {len(lengths)} lengths"
            )
    cuts = [len(lengths) * i // k for i in range(k + 1)]
    before = [sum(lengths[a:b]) for a, b in pairwise(cuts)]
    after = [sum(lengths[i] for i in part) for part in partitions]
    figures = {
        "min": min(before),
        "max": max(before),
        "minmax_diff": max(before) - min(before),
        "balanced_min": min(after),
        "balanced_max": max(after),
        "mean": sum(before) / k,
    }
    return {f"{prefix}/{name}": value for name, value in figures.items()}
