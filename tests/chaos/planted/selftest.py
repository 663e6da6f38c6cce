"""Planted bugs: each is run with faults that bring it out, and the checker must name its effect.

A bug counts as caught only by the verdict that it deserves, not because the run stalled. Each run
stops at the first of its faults after which the histories show the bug.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.run import run
from tests.chaos.settings import Settings
from tests.chaos.verdict.check import Verdict

ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """Faults that bring a bug out, and how the verdict shows it."""

    faults: tuple[str, ...]
    shows: Callable[[Verdict], bool]


def _not_fenced(verdict: Verdict) -> bool:
    return any("was not fenced" in text for text in verdict.disagreements)


TRIALS: dict[str, Trial] = {
    "acknowledge-before-durable": Trial(("kill_dispatcher_and_ranks",) * 3, lambda v: bool(v.lost)),
    "drop-a-redelivery": Trial(("kill_rank",) * 3, lambda v: bool(v.lost)),
    "skip-fencing": Trial(("old_rank_returns",), _not_fenced),
    "forget-duplicates": Trial(("cut_connections",) * 4, lambda v: bool(v.duplicated)),
    "forget-commits": Trial(("kill_dispatcher_and_ranks",) * 2, lambda v: bool(v.duplicated)),
}


def is_caught(bug: str, folder: Path, seed: int) -> bool:
    """Whether the checker finds this planted bug, in one of a few runs.

    When processes are busy, none of a run's faults may hit the moment in which the bug shows.
    """
    return any(_shows(bug, folder / str(seed), seed) for seed in range(seed, seed + ATTEMPTS))


def _shows(bug: str, folder: Path, seed: int) -> bool:
    trial = TRIALS[bug]
    # Patience is short, since a bug may well stall the run; a long rank timeout keeps the old
    # rank's connection, by which it would be told.
    settings = Settings(dp_size=2, bug=bug, patience_s=6.0, rank_timeout_s=30.0)
    result = run(folder, settings, trial.faults, Random(seed))
    return trial.shows(result.verdict)
