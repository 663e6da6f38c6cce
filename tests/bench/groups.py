"""Groups that stay on one rank, beside KK on their sums: `python -m tests.bench.groups`.

75 cases: lengths of each kind, groups of 4, 8 and 16 samples, 4 to 16 groups a rank. The other side
shares groups out by equal-count KK on the sums of their work, cuts each rank's samples into runs
(or packs them by unequal KK, in as many micro-batches as it takes) and sorts these by cost.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rollout_planner import Quadratic, plan
from rollout_planner.types import Grouping, Plan, PlanConfig, Sync, Window, straggler_excess
from tests.support.groups import (
    KINDS,
    cut_by_count,
    cut_by_tokens,
    lengths_of,
    window_of,
)

#: Groups and ranks.
SHAPES = [(64, 8), (128, 32), (256, 64), (256, 16), (512, 64)]


#: Shares of a step that make no difference.
_SAME = 1e-4
HEADING = "sync       micro-batches   ours %  worst   kk %  worst  behind  fewer  more    ms"


@dataclass(frozen=True, slots=True)
class Row:
    """Excess in % over the cases. behind: cases in which KK waits less with as many micro-batches;
    fewer, more: those in which ours has another number of them. ms: of the processor, a plan; None
    if not measured.
    """

    sync: str
    micro_batches: str
    ours: float
    worst: float
    kk: float
    kk_worst: float
    behind: int
    fewer: int
    more: int
    ms: float | None


def line(row: Row) -> str:
    """A row of the table."""
    ms = "-" if row.ms is None else f"{row.ms:.1f}"
    return (
        f"{row.sync:11}{row.micro_batches:14}{row.ours:8.2f}{row.worst:7.1f}{row.kk:7.2f}"
        f"{row.kk_worst:7.1f}{row.behind:8d}{row.fewer:7d}{row.more:6d}{ms:>6}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    found = []
    print(HEADING)
    for sync in Sync:
        for by_tokens in (False, True):
            found.append(_row(sync, by_tokens))
            print(line(found[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")


def _row(sync: Sync, by_tokens: bool) -> Row:
    cases = list(_cases(sync, by_tokens))
    ours, theirs = [case[0] for case in cases], [case[1] for case in cases]
    return Row(
        sync=sync.value,
        micro_batches="token budget" if by_tokens else "4 samples",
        ours=100 * statistics.median(ours),
        worst=100 * max(ours),
        kk=100 * statistics.median(theirs),
        kk_worst=100 * max(theirs),
        behind=sum(case[2] == 0 and case[0] > case[1] + _SAME for case in cases),
        fewer=sum(case[2] < 0 for case in cases),
        more=sum(case[2] > 0 for case in cases),
        ms=1e3 * statistics.median(case[3] for case in cases),
    )


def _cases(sync: Sync, by_tokens: bool) -> Iterator[tuple[float, float, int, float]]:
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
