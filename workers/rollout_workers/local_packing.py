"""Each rank packs its own samples, and all agree on how many micro-batches there are.

For trainers whose ranks got their samples already: `plan_step`, which sees all ranks' lengths,
waits less. Invariant: every rank of the group returns as many micro-batches, or every rank raises.

Example, budget 10: rank 0 has lengths 9 8, rank 1 has 5 4; by itself rank 1 would need one
micro-batch, rank 0 needs two, so rank 1 makes 5 | 4.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from rollout_dispatcher.errors import PeerFailed
from rollout_planner import pack
from rollout_planner.public.arguments import as_groups, as_lengths
from rollout_planner.types import CostModel, IntArray, MicroBatchOrder, Oversize
from rollout_workers.process_group import device_of, initialised


def pack_local(
    lengths: Any,
    budget: int,
    *,
    group: dist.ProcessGroup | None = None,
    cost: CostModel | str | None = None,
    groups: Any = None,
    multiple: int = 1,
    minimum: int = 1,
    pad_to: int = 1,
    oversize: str = Oversize.ERROR,
    order: str = MicroBatchOrder.PEAK_FIRST,
    fillers: bool = True,
) -> list[list[int]]:
    """Indices of this rank's `lengths` in micro-batches, as many as on every rank of `group`.

    A collective: every rank of the group calls it, with its own lengths and otherwise the same
    arguments, which are those of `rollout_planner.pack`. group: the ranks that agree, by default
    all of the process group; without a process group this rank packs by itself. A rank that has
    fewer samples than micro-batches gets empty ones, fillers; with `fillers=False` every rank
    raises instead.

    Raises the errors of `pack`, and PeerFailed if another rank's samples cannot be packed: then
    every rank raises.
    """

    @cache
    def own() -> tuple[IntArray, IntArray | None]:
        """Lengths and groups, read once: an iterator is empty the second time."""
        found = as_lengths(lengths)
        return found, None if groups is None else as_groups(groups, len(found))

    def packed(at_least: int) -> list[list[int]]:
        tokens, names = own()
        return pack(
            tokens, budget, cost=cost, groups=names, multiple=multiple, minimum=at_least,
            pad_to=pad_to, oversize=oversize, order=order, fillers=fillers,
        )  # fmt: skip

    if not initialised():
        return packed(minimum)
    found, count = _agreed(lambda: packed(minimum), group)

    def as_many() -> list[list[int]]:
        return found if len(found) == count else packed(count)

    # Without fillers as many as the others have may be too many for some rank.
    return as_many() if fillers else _agreed(as_many, group)[0]


def _agreed(
    packed: Callable[[], list[list[int]]], group: dist.ProcessGroup | None
) -> tuple[list[list[int]], int]:
    """This rank's micro-batches, and the largest number of them on any rank."""
    found, error = [], None
    try:
        found = packed()
    except Exception as failure:  # of any kind: the other ranks wait in the collective
        error = failure
    largest = torch.tensor([len(found), int(error is not None)], device=device_of(group))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    count, failed = largest.tolist()
    if error is not None:
        raise error
    if failed:
        raise PeerFailed(
            "another rank's samples cannot be packed, so there are no micro-batches on any; "
            "its own error says why"
        )
    return found, count
