"""The self-test: each planted bug is run with the fault that brings it out, and must be caught.

A bug counts as caught only by the verdict that it deserves, not because the run stalled: the
checker has to name its effect. The fault leaves nothing to chance (`faults.forced`); a seed says
after how many steps it comes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from rollout_dispatcher.protocol import messages as m
from tests.chaos.cluster.cluster import Cluster
from tests.chaos.faults import forced as f
from tests.chaos.faults.groups import old_rank_returns
from tests.chaos.planted.bugs import FED_AFTER
from tests.chaos.run import Result, live
from tests.chaos.settings import Settings
from tests.chaos.verdict.check import Verdict

#: Patience is short, since a bug may well stall the run; a long rank timeout keeps the old rank's
#: connection, by which it would be told. Without producer 2 no push is given up: whatever comes in
#: is acknowledged to whom it is from, so that of no sample it is in doubt whether it may be lost.
SETTINGS = Settings(dp_size=2, producers=2, patience_s=10.0, rank_timeout_s=30.0)
RETAINING = replace(SETTINGS, retain=True)
REFERRING = replace(SETTINGS, references=True)
#: Steps that go by before the fault.
FEWEST_STEPS, MOST_STEPS = 1, 8
#: Steps within which a sample that starves is fed at last.
FED_STEPS = FED_AFTER // SETTINGS.batch + 1


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault that brings a bug out, and how the verdict shows it."""

    fault: f.Forced
    shows: Callable[[Verdict], bool]
    settings: Settings = field(default=SETTINGS)


def lost(verdict: Verdict) -> bool:
    """A sample was lost."""
    return bool(verdict.lost)


def says(words: str) -> Callable[[Verdict], bool]:
    """A disagreement says so."""
    return lambda verdict: any(words in text for text in verdict.disagreements)


TRIALS: dict[str, Trial] = {
    "acknowledge-before-durable": Trial(f.kill_after_an_answer, lost),
    "forget-duplicates": Trial(f.lose_answers, lambda verdict: bool(verdict.duplicated)),
    "ignore-caps": Trial(f.fill_the_buffer, lambda verdict: bool(verdict.overfull)),
    "starve-a-sample": Trial(f.steps(FED_STEPS), lambda verdict: bool(verdict.starved)),
    "miscount-loss-tokens": Trial(f.steps(1), says("loss tokens")),
    "skip-fencing": Trial(lambda cluster: old_rank_returns(cluster, Random(0)), says("not fenced")),
    "drop-a-redelivery": Trial(f.kill_with_a_rank_behind, lost),
    "change-a-redelivery": Trial(f.kill_with_a_rank_behind, says("with another plan")),
    "forget-a-rewound-step": Trial(f.rewind_committed_steps, lost, RETAINING),
    "skip-micro-batches": Trial(
        f.lose("rank-1", m.MicroBatch), lambda verdict: bool(verdict.stuck)
    ),
    "forget-what-was-put": Trial(
        f.kill_with_an_object_put, lambda verdict: bool(verdict.leaked), REFERRING
    ),
}

#: Only `make chaos` tries these, which take longest: they need a moment that has to be waited for.
SLOW = frozenset({"acknowledge-before-durable", "forget-what-was-put", "skip-fencing"})


def is_caught(bug: str, folder: Path, seed: int) -> bool:
    """Whether the checker finds this planted bug."""
    return TRIALS[bug].shows(try_out(bug, folder, seed).verdict)


def try_out(bug: str, folder: Path, seed: int, *, plant: bool = True) -> Result:
    """What comes of the fault that brings this bug out, with it or without."""
    trial, random = TRIALS[bug], Random(seed)

    def disturb(cluster: Cluster) -> None:
        cluster.await_steps(random.randint(FEWEST_STEPS, MOST_STEPS))
        trial.fault(cluster)
        cluster.disturb()
        cluster.await_recovery()
        cluster.look()

    return live(folder, replace(trial.settings, bug=bug if plant else None), disturb)
