"""Groups that stay on one rank, beside KK on their sums: `python -m tests.bench.groups`.

75 cases: lengths of each kind, groups of 4, 8 and 16 samples, 4 to 16 groups a rank. The other side
shares groups out by equal-count KK on the sums of their work, cuts each rank's samples into runs
(or packs them by unequal KK, in as many micro-batches as it takes) and sorts these by cost.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from rollout_dispatcher.balance import Quadratic, plan
from rollout_dispatcher.plan import Grouping, Plan, PlanConfig, Sync, Window, straggler_excess
from tests.support.groups import (
    KINDS,
    cut_by_count,
    cut_by_tokens,
    lengths_of,
    window_of,
)

SHAPES = [(64, 8), (128, 32), (256, 64), (256, 16), (512, 64)]


def main() -> None:
    """Print the median and the worst of the cases, in % of waiting, and of the time of a plan."""
    print("sync, micro-batches        ours %  worst   kk %  worst  behind  fewer  more    ms")
    for sync in Sync:
        for by_tokens in (False, True):
            rows = list(_rows(sync, by_tokens))
            ours, theirs = [row[0] for row in rows], [row[1] for row in rows]
            fewer, more = sum(row[2] < 0 for row in rows), sum(row[2] > 0 for row in rows)
            behind = sum(row[2] >= 0 and row[0] > row[1] + 1e-4 for row in rows)
            print(
                f"{sync.value:10} {'token budget' if by_tokens else '4 samples':14}"
                f"{100 * statistics.median(ours):8.2f}{100 * max(ours):7.1f}"
                f"{100 * statistics.median(theirs):7.2f}{100 * max(theirs):7.1f}"
                f"{behind:8d}{fewer:7d}{more:6d}"
                f"{1e3 * statistics.median(row[3] for row in rows):6.1f}"
            )


def _rows(sync: Sync, by_tokens: bool) -> Iterator[tuple[float, float, int, float]]:
    """Waiting of ours and of theirs, how many micro-batches more ours has, seconds."""
    for kind, budget in KINDS.items():
        for size in (4, 8, 16):
            for groups, ranks in SHAPES:
                lengths = lengths_of(kind, groups, size)
                config = PlanConfig(
                    dp_size=ranks, dispatch_batch_size=lengths.size, cost=Quadratic(),
                    micro_batch_size=4, sync=sync, grouping=Grouping.RANK,
                )  # fmt: skip
                theirs = cut_by_count(lengths, ranks, 4)
                if by_tokens:
                    room = max(budget, int(lengths.max()))
                    config = replace(config, micro_batch_size=None, micro_batch_tokens=room)
                    theirs = cut_by_tokens(lengths, ranks, room)
                ours, seconds = _timed(window_of(lengths), config)
                more = ours.num_micro_batches - theirs.shape[1]
                yield ours.excess, straggler_excess(theirs, sync), more, seconds


def _timed(window: Window, config: PlanConfig) -> tuple[Plan, float]:
    begun = time.process_time()
    found = plan(window, config)
    return found, time.process_time() - begun


if __name__ == "__main__":
    main()
