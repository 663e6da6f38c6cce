"""One step: who trains on what, and in which micro-batch, for lengths that are all at hand.

Invariant: every index is in one micro-batch, and every rank has the same number of them, none empty
if there are samples enough. It is the dispatcher's own planner, with all samples chosen.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from rollout_planner.cost import LONGEST
from rollout_planner.errors import UnequalPartitions, problems
from rollout_planner.planner import plan
from rollout_planner.public.arguments import (
    as_groups,
    as_lengths,
    at_least,
    check_fillers,
    check_fits,
    cost_model,
    costs_of,
    option,
    token_budget,
)
from rollout_planner.public.equal_counts import with_equal_counts
from rollout_planner.types import (
    CostModel,
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    Oversize,
    Plan,
    PlanConfig,
    Sync,
    Window,
    round_up,
)


def plan_step(
    lengths: Any,
    *,
    dp_size: int,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    sync: str = Sync.MICRO_STEP,
    layout: str = Layout.PACKED,
    groups: Any = None,
    grouping: str = Grouping.RANK,
    multiple: int = 1,
    minimum: int = 1,
    cost: CostModel | str | None = None,
    pad_to: int = 1,
    oversize: str = Oversize.ERROR,
    equal_counts: bool = False,
) -> list[list[list[int]]]:
    """Indices of `lengths` as `[dp rank][micro-batch][indices]`: as little waiting as can be.

    lengths: tokens of each sample (0 counts as 1): a list, an array or a tensor. Exactly one of
    micro_batch_size (samples, at most) and micro_batch_tokens (a budget) is given. sync: ranks
    wait for each other at every `micro-step` (FSDP, ZeRO-3), or once a `step`. layout: `packed`, or
    `padded` to the longest of a micro-batch. groups: one name a sample (None: in no group); samples
    of one name share what `grouping` says, a `rank` or a `micro-batch`. multiple, minimum: the
    number of micro-batches is a multiple of the one (virtual pipeline) and at least the other.
    cost: work of a length; by default quadratic. pad_to: a sample takes as many tokens as the next
    multiple of it. oversize: a sample above the budget is an `error` or goes `alone`.
    equal_counts: every rank has as many samples, as verl needs, of packed ones without groups; of a
    micro_batch_size they fill all.

    An empty micro-batch is a filler, which is there only if there are fewer samples than
    micro-batches (or fewer groups, where each stays in one; or fewer on a rank than it has, where
    groups stay on one): its rank has to take part with something that weighs nothing. Raises
    SampleTooLong, GroupTooLong, and UnequalPartitions for a group of more samples than a
    micro-batch has, for no lengths at all, for arguments that ask for more than `MOST_FILLERS` and
    for others that cannot be (all ValueErrors).
    """
    dp_size, multiple, minimum = at_least(1, dp_size=dp_size, multiple=multiple, minimum=minimum)
    [pad_to] = at_least(1, LONGEST, pad_to=pad_to)
    if micro_batch_size is not None:
        [micro_batch_size] = at_least(1, micro_batch_size=micro_batch_size)
    if micro_batch_tokens is not None:
        micro_batch_tokens = token_budget(micro_batch_tokens=micro_batch_tokens)
    tokens = np.maximum(as_lengths(lengths), 1)
    n = len(tokens)
    if not n:
        raise UnequalPartitions("there are no lengths, so there is no step to plan")
    together = option("grouping", grouping, Grouping.RANK, Grouping.MICRO_BATCH)
    if micro_batch_size is not None:
        micro_batch_size = min(micro_batch_size, n)  # what is never full needs no room
    per_micro_step = dp_size * (micro_batch_size or 1)
    check_fillers(dp_size * round_up(minimum, multiple), n, "dp_size, minimum and multiple")
    micro_steps = round_up(max(-(-n // per_micro_step), minimum), multiple)
    config = PlanConfig(
        dp_size=dp_size,
        dispatch_batch_size=per_micro_step * micro_steps,  # if all were full
        cost=cost_model(cost),
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=micro_batch_tokens,
        sync=option("sync", sync, *Sync),
        layout=option("layout", layout, *Layout),
        grouping=Grouping.IGNORE if groups is None else together,
        micro_batch_multiple=multiple,
        min_micro_batches=minimum,
        sample_length_multiple=pad_to,
        oversize=option("oversize", oversize, Oversize.ERROR, Oversize.ALONE),
    )
    group = np.full(n, -1, dtype=np.int64) if groups is None else as_groups(groups, n)
    if equal_counts:
        _check_equal_counts(n, config)
    computed = round_up(tokens, pad_to)
    costs = _checked_costs(computed, group, config)
    if not equal_counts:
        found = _planned(tokens, group, config)
        return list(map(list, found.laid_out(found.chosen.tolist())))

    def freely(least: int) -> Plan:
        return _planned(tokens, group, replace(config, min_micro_batches=max(least, minimum)))

    return with_equal_counts(freely, computed, costs, config)


def _check_equal_counts(n: int, config: PlanConfig) -> None:
    """Raise UnequalPartitions where ranks cannot, or are not made to, have as many samples."""
    if config.layout is not Layout.PACKED or config.grouping is not Grouping.IGNORE:
        raise UnequalPartitions("equal_counts is for packed samples, without groups")
    size = config.micro_batch_size or 1
    if n % (config.dp_size * size):
        by = f"dp_size {config.dp_size}" + (f" x micro_batch_size {size}" if size > 1 else "")
        raise UnequalPartitions(
            f"{n} samples do not divide by {by}; pad the batch, or leave equal_counts out"
        )


def _planned(tokens: IntArray, group: IntArray, config: PlanConfig) -> Plan:
    n = len(tokens)
    window = Window(tokens, np.zeros(n, dtype=np.int64), group, np.zeros(n, dtype=np.bool_))
    return plan(window, config, take=n)


def _checked_costs(tokens: IntArray, group: IntArray, config: PlanConfig) -> FloatArray:
    """Of each sample; raises what `plan_step` does for lengths and settings that cannot be."""
    costs, budget, most = costs_of(tokens, config.cost), config.micro_batch_tokens, 0
    together = config.grouping is Grouping.MICRO_BATCH
    if budget is not None and config.oversize is not Oversize.ALONE:
        check_fits(tokens, budget, group if together else None)
    if config.micro_batch_size is not None and together:
        most = int(np.bincount(group).max())
    if most > (config.micro_batch_size or 0):
        raise UnequalPartitions(
            f"a group has {most} samples and micro_batch_size is {config.micro_batch_size}; raise "
            "it to the size of a group, or pass grouping='rank'"
        )
    if wrong := next(problems(config), None):
        raise UnequalPartitions(wrong)
    return costs
