"""The splitters: each serves one kind of limit, as a function of the chosen samples and the config.

Packed micro-batches of a fixed number of samples, packed ones under a budget of tokens, padded ones
of a number of samples at most or under a budget of padded tokens; whole groups are in groups.py.
A new one is a function here and a line in `splitter_for`.
"""

from collections.abc import Iterator

import numpy as np

from rollout_planner import tuning
from rollout_planner.objective import micro_batches_for, rank_bound
from rollout_planner.order import by_label
from rollout_planner.split.assign import (
    fill_sets,
    first_fit,
    kk_sets,
    lpt_budget,
    num_bins,
    places_of,
)
from rollout_planner.split.groups import by_neighbours, cut_ranks, split_by_rank
from rollout_planner.split.packing import (
    count_ranks,
    fewest_micro_batches,
    is_ruled,
    level_columns,
    pack,
    pack_by_count,
    pack_ranks,
)
from rollout_planner.split.padded import (
    Counts,
    Items,
    begin_cost,
    begin_of,
    fewest_runs,
    most_in_run,
    padded_runs,
)
from rollout_planner.split.parts import (
    Batch,
    Parts,
    Splitter,
    Work,
    by_falling_load,
    matrix,
    time_of,
)
from rollout_planner.types import IntArray, Layout, PlanConfig, Sync, cut


def splitter_for(batch: Batch, config: PlanConfig) -> Splitter:
    """Who cuts this batch: the first that its limits ask for."""
    if batch.group is not None:
        return split_by_rank
    if batch.padded is not None:
        return split_padded_groups
    if config.layout is Layout.PADDED and config.micro_batch_size != 1:
        return split_padded
    return split_packed


def split_packed(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Ranks of equal cost, or micro-steps whose micro-batches cost about the same.

    Where a micro-batch has room for so many samples, each takes one of it. Of a pipeline
    micro-batches are alike on each rank as well, if it takes less.
    """
    R, x, s, order = config.dp_size, batch.x, batch.s, batch.order
    budget, per_step = config.micro_batch_tokens, config.sync is Sync.STEP
    if budget is None:
        x, s, order = batch.falling, np.ones_like(s), batch.dearest_first
        budget = config.micro_batch_size or 1
    ways, stages = list[Parts](), config.pipeline_stages
    M = micro_batches_for(len(x), config)
    if per_step and config.micro_batch_size is not None:
        ways.append(Parts.of_labels(order, count_ranks(x, R, M, budget), M, R))
    elif per_step:
        ways.append(Parts.of_labels(order, *pack_ranks(x, s, R, budget, config.micro_batches), R))
    if not per_step or stages > 1:
        if config.micro_batch_size is None or M == 1 or per_step:
            labels, M = pack(x, s, R, budget, config.micro_batches)
        else:
            labels = pack_by_count(x, R, M, budget)
        if per_step:
            labels = level_columns(labels, x, s, R=R * M, M=1, budget=budget)
        ways.append(_placed(order, labels, M, batch, config))
    if len(ways) == 1:
        return ways[0]
    return min(ways, key=lambda parts: time_of(batch, parts, config))


def packed_plainly(batch: Batch, config: PlanConfig, price: float) -> Iterator[Parts]:
    """Under a budget, as others have it: LPT over all micro-batches, as few as it needs; and ranks
    of equally many samples.

    price: of what is known, with what it costs to begin; what cannot take less is left out.
    """
    R, x, budget = config.dp_size, batch.x, config.micro_batch_tokens or 1
    fewest = config.micro_batches(fewest_micro_batches(batch.s, R, budget))
    begin, alike = begin_of(batch, config), config.slowness is None
    least, most = rank_bound(x, R) * (1 + tuning.ROUNDING), price - begin * fewest
    if alike and least >= most:
        return
    # Where no sample rules, packing levels what LPT fills, unless that needs one more.
    covered = alike and config.pipeline_stages == 1 and not is_ruled(x, R, fewest)
    if not covered or least + begin < most:
        M = fewest
        while (labels := lpt_budget(x, batch.s, R * M, budget)) is None:
            M = config.micro_batches(M + 1)
        yield _placed(batch.order, labels, M, batch, config)
    yield from ranks_of_equal_counts(batch, config, most)


def ranks_of_equal_counts(
    batch: Batch, config: PlanConfig, most: float = np.inf
) -> Iterator[Parts]:
    """Karmarkar-Karp over ranks of equally many samples; over the micro-batches of each, as verl
    does, or LPT, or first fit. None if a rank takes `most` then.
    """
    R, x, order, budget = config.dp_size, batch.x, batch.order, config.micro_batch_tokens or 1
    s = np.minimum(batch.tokens, budget)
    ranks = by_neighbours(batch.cost, s, R, len(x))
    of, slowness = ranks[order], 1.0 if config.slowness is None else np.array(config.slowness)
    if (np.bincount(of, x, R) * slowness).max() >= most:
        return

    def falling(sequence: IntArray, labels: IntArray) -> Parts:
        parts = Parts.of_labels(sequence, ranks[sequence] * M + labels, M, R)
        return by_falling_load(parts, matrix(batch, parts, config.layout))

    M = config.micro_batches(int(-(-np.bincount(ranks, s).max() // budget)))
    labels = kk_sets(batch.cost, s, ranks, M, budget)
    if labels.min() >= 0:
        yield falling(np.arange(len(x)), labels)
    while (labels := fill_sets(x, s[order], of, M, budget, tightly=False)).min() < 0:
        M = config.micro_batches(M + 1)
    yield falling(order, labels)
    own = cut(order[by_label(of, R)], np.bincount(of, minlength=R).tolist())
    yield cut_ranks(own, M, batch, config)


def split_padded(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Sorted runs, which pad least, of like cost in each micro-step."""
    n, R, budget = len(batch), config.dp_size, config.micro_batch_tokens
    if budget is None:
        order, longest, M = batch.dearest_first, batch.falling, micro_batches_for(n, config)
        most, counts = np.full(n, config.micro_batch_size or 1), Counts(R, M, M)
    else:
        order, longest, most = batch.order, batch.x, most_in_run(batch.s, budget)
        M = config.micro_batches(-(-max(fewest_runs(batch.s, budget), 1) // R))
        last = max(min(tuning.TIMES_FEWEST * M, n // R), M)
        multiple = config.micro_batches(M + 1) - M
        begin = begin_cost(longest, batch.s, budget, config.cost)
        counts = Counts(R, M, last - last % multiple, multiple, begin)
    starts = padded_runs(Items.of(longest, most), counts, per_step=waits_once(config))
    assert starts is not None, "samples fit one by one"
    M = max(-(-(len(starts) - 1) // R), counts.fewest)
    return _placed(order, np.repeat(np.arange(len(starts) - 1), np.diff(starts)), M, batch, config)


def split_padded_groups(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Groups of several lengths and sizes, under a budget of samples: neighbours if they fit.

    As few micro-batches come first, and for these what shares one may have to be far apart: first
    fit.
    """
    assert batch.padded is not None, "see split_padded for samples"
    packed = split_packed(batch, config, work)
    R, M, most = config.dp_size, packed.num_micro_batches, config.micro_batch_tokens or 1
    longest, size, found = batch.padded.longest, batch.padded.size, [packed]
    by_length = np.lexsort((-size, -longest))
    items = Items.of(longest[by_length], np.full(len(size), most), size[by_length])
    starts = padded_runs(items, Counts(R, M, M), per_step=waits_once(config))
    if starts is not None:
        labels = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        found.append(_placed(by_length, labels, M, batch, config))
    for order in (batch.dearest_first, by_length, np.arange(len(size))):
        fits = first_fit(size[order], np.full(len(size), most))
        if num_bins(fits) <= R * M:
            found.append(_placed(order, fits, M, batch, config))
    return min(found, key=lambda parts: time_of(batch, parts, config))


def waits_once(config: PlanConfig) -> bool:
    """Whether ranks meet once a step; or there is one, which waits for nobody."""
    return config.sync is Sync.STEP or config.dp_size == 1


def _placed(order: IntArray, labels: IntArray, M: int, batch: Batch, config: PlanConfig) -> Parts:
    """Micro-batches dealt to ranks. labels: the one of each item in this order."""
    R, stages = config.dp_size, config.pipeline_stages
    load = matrix(batch, Parts.of_labels(order, labels, M, R), config.layout).ravel()
    place = places_of(load, R, M, config.sync is Sync.STEP, stages)
    return Parts.of_labels(order, place[labels], M, R)
