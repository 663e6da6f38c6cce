"""Starts a dispatcher with a small journal and, if asked, a planted bug that the checker must find.

    python -m tests.chaos.planted.dispatcher BUG|none JUMPS serve ...

JUMPS is the file by which its clock is told to jump (`clock`). What is changed is changed here
before `serve` begins: production code has no switch. The journal's segments are small so that a run
of minutes fills, empties and reuses many of them.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import FailRanks, Redelivered
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.ranks.generation import Generation
from rollout_dispatcher.core.ranks.rank_state import RankHello
from rollout_dispatcher.core.steps.open_steps import OpenSteps
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.store import Store
from rollout_dispatcher.service.durability.barrier import DurabilityBarrier
from rollout_workers.demo import lifeline
from tests.chaos.actors.clock import follow_jumps

SEGMENT_BYTES = 1 << 20
INDEX_BYTES = 32 << 20
#: A slow disk: what is acknowledged early is in danger for so long.
SYNC_S = 0.05


def acknowledge_before_durable() -> None:
    """Answers leave at once, while their facts are on the way to a slow disk."""
    sync = Store.sync

    def slow_sync(store: Store) -> None:
        sleep(SYNC_S)
        sync(store)

    def at_once(_: DurabilityBarrier, then: Callable[[], None]) -> None:
        then()

    _plant(Store, "sync", slow_sync)
    _plant(DurabilityBarrier, "after", at_once)


def drop_a_redelivery() -> None:
    """A new generation is not given the oldest open step again."""
    start_over = OpenSteps.start_over

    def forgetful(steps: OpenSteps, dp_size: int) -> list[Redelivered]:
        effects = start_over(steps, dp_size)
        if steps:
            steps.commit(min(steps))
        return effects

    _plant(OpenSteps, "start_over", forgetful)


def skip_fencing() -> None:
    """An older generation is neither told that it is over nor refused when it comes again."""
    begin = Generation.begin

    def believing(_: Generation, number: int) -> None:
        """Whatever number it says."""

    def quiet(generation: Generation, hello: RankHello) -> list[FailRanks]:
        begin(generation, hello)
        return []

    _plant(Generation, "_check_number", believing)
    _plant(Generation, "begin", quiet)


def forget_duplicates() -> None:
    """A push that is sent again is stored again."""

    def never(_: DuplicateMemory, producer: str, seq: int, given_id: str | None) -> bool:
        return False

    _plant(DuplicateMemory, "seen", never)


def forget_commits() -> None:
    """Commits are not made durable, so a restart brings committed steps back."""
    take = Dispatch.take_facts

    def selective(core: Dispatch) -> list[object]:
        return [fact for fact in take(core) if type(fact).__name__ != "Committed"]

    _plant(Dispatch, "take_facts", selective)


def _plant(owner: type, name: str, method: Callable[..., object]) -> None:
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: plant elsewhere"
    setattr(owner, name, method)


BUGS: dict[str, Callable[[], None]] = {
    "acknowledge-before-durable": acknowledge_before_durable,
    "drop-a-redelivery": drop_a_redelivery,
    "skip-fencing": skip_fencing,
    "forget-duplicates": forget_duplicates,
    "forget-commits": forget_commits,
}


def shrink_journal() -> None:
    """Use a small journal."""
    opening = Journal.open.__func__  # type: ignore[attr-defined]
    opening.__kwdefaults__ |= {"segment_bytes": SEGMENT_BYTES, "map_bytes": INDEX_BYTES}


if __name__ == "__main__":
    lifeline.hold()  # whatever becomes of the run, its dispatcher ends with it
    shrink_journal()
    if sys.argv[1] != "none":
        BUGS[sys.argv[1]]()
    follow_jumps(Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
