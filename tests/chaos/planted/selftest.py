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
from tests.chaos.planted.bugs.samples import FED_AFTER, REPEATED
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


def duplicated(verdict: Verdict) -> bool:
    """A sample was trained twice."""
    return bool(verdict.duplicated)


def leaked(verdict: Verdict) -> bool:
    """An object was left in the payload store."""
    return bool(verdict.leaked)


def stuck(verdict: Verdict) -> bool:
    """Ranks waited for what was here."""
    return bool(verdict.stuck)


def harmed(verdict: Verdict) -> bool:
    """A rank, none of which did anything wrong, ended with an error, or waits."""
    ended = (says(f"rank {rank} of group") for rank in range(SETTINGS.dp_size))
    return stuck(verdict) or any(says_so(verdict) for says_so in ended)


def says(words: str) -> Callable[[Verdict], bool]:
    """A disagreement says so."""
    return lambda verdict: any(words in text for text in verdict.disagreements)


TRIALS: dict[str, Trial] = {
    "acknowledge-before-durable": Trial(f.kill_after_an_answer, lost),
    "forget-duplicates": Trial(f.lose_answers, duplicated),
    "forget-ids": Trial(f.lose_an_answer_and_its_producer, duplicated),
    "forget-the-end": Trial(f.kill_after_the_end, stuck),
    "ignore-caps": Trial(f.fill_the_buffer, lambda verdict: bool(verdict.overfull)),
    "hold-for-ever": Trial(f.hold_everybody_back, stuck),
    "starve-a-sample": Trial(f.steps(FED_STEPS), lambda verdict: bool(verdict.starved)),
    "repeat-a-step": Trial(f.steps(REPEATED + 1), duplicated),
    "miscount-loss-tokens": Trial(f.steps(1), says("loss tokens")),
    "skip-fencing": Trial(lambda cluster: old_rank_returns(cluster, Random(0)), says("not fenced")),
    "believe-a-stranger": Trial(f.claim_a_place, harmed),
    "drop-a-redelivery": Trial(f.kill_with_a_rank_behind(), lost),
    "change-a-redelivery": Trial(f.kill_with_a_rank_behind(), says("with another plan")),
    "lose-a-sample-for-another-size": Trial(f.kill_with_a_rank_behind(size=3), lost),
    "forget-a-rewound-step": Trial(f.rewind_committed_steps, lost, RETAINING),
    "one-commit-is-enough": Trial(f.kill_with_a_rank_behind(), lost),
    "forget-commits": Trial(f.kill_after_commits, duplicated),
    "lose-commits": Trial(f.lose_all("rank-1", m.Commit), stuck),
    "count-commits-twice": Trial(f.lose("rank-0", m.Commit), says("/statusz says")),
    "lose-demands": Trial(f.lose_all("rank-1", m.Demand), stuck),
    "lose-checkpoints": Trial(f.lose_every_checkpoint, says("steps_retained"), RETAINING),
    "skip-known-headers": Trial(f.lose("rank-1", m.Prepared), stuck),
    "skip-micro-batches": Trial(f.lose("rank-1", m.MicroBatch), stuck),
    "release-once": Trial(f.lose("rank-1", m.Release), stuck),
    "release-when-planned": Trial(f.kill_with_a_rank_behind(), lost, REFERRING),
    "ignore-unresolved": Trial(f.delete_an_object, stuck, REFERRING),
    "keep-the-attempt": Trial(f.delete_an_object, harmed, REFERRING),
    "split-a-group": Trial(f.delete_part_of_a_group, says("not trained whole"), REFERRING),
    "forget-what-was-put": Trial(f.kill_with_an_object_put, leaked, REFERRING),
}

#: Only `make chaos` tries these, which take longest: some stall, or need a moment that has to be
#: waited for.
SLOW = frozenset(
    {
        "acknowledge-before-durable",
        "forget-the-end",
        "forget-what-was-put",
        "hold-for-ever",
        "ignore-unresolved",
        "keep-the-attempt",
        "lose-commits",
        "lose-demands",
        "release-once",
        "skip-fencing",
        "skip-known-headers",
        "split-a-group",
    }
)


def is_caught(bug: str, folder: Path, seed: int) -> bool:
    """Whether the checker finds this planted bug."""
    return TRIALS[bug].shows(try_out(bug, folder, seed).verdict)


def try_out(bug: str, folder: Path, seed: int, *, plant: bool = True) -> Result:
    """What comes of the fault that brings this bug out, with it or without."""
    trial, random = TRIALS[bug], Random(seed)

    def disturb(cluster: Cluster) -> None:
        cluster.await_steps(random.randint(FEWEST_STEPS, MOST_STEPS))
        trial.fault(cluster)
        if not cluster.stream_ended:
            cluster.disturb()
            cluster.await_recovery()
            cluster.look()

    return live(folder, replace(trial.settings, bug=bug if plant else None), disturb)
