"""Bugs in what ranks say, in a message or in their next hello."""

from dataclasses import replace
from typing import Any

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Effect
from rollout_dispatcher.core.steps.generation import Generation
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.rank_state import RankHello, RankState
from tests.chaos.planted.plant import forget_facts, mishear_hello, plant, planted, redeliver


@planted
def one_commit_is_enough() -> None:
    """P1, Commit: a step is committed when the first of its ranks says so."""

    def by_anybody(generation: Generation, step: int) -> bool:
        return any(rank.committed >= step for rank in generation.ranks.values())

    plant(Generation, "has_committed", by_anybody)


@planted
def forget_commits() -> None:
    """P1, Commit: it is not made durable, so a restart brings committed steps back."""
    forget_facts("Committed")


@planted
def lose_commits() -> None:
    """P8, Commit: one that was lost is not heard in the rank's next hello."""
    mishear_hello(committed=-1)


@planted
def count_commits_twice() -> None:
    """P1, Commit: what a rank says again in a hello is counted again."""
    join = DispatcherCore.join

    def counting(core: DispatcherCore, hello: RankHello, now: float) -> Any:
        decision = join(core, hello, now)
        core._totals.samples_committed += hello.committed >= 0
        return decision

    plant(DispatcherCore, "join", counting)


@planted
def lose_demands() -> None:
    """P8, Demand: one that was lost is not heard in the rank's next hello."""
    reconnected = RankState.reconnected

    def deaf(rank: RankState, hello: RankHello, now: float) -> None:
        reconnected(rank, replace(hello, taken=-1, hungry=False), now)

    plant(RankState, "reconnected", deaf)


@planted
def lose_checkpoints() -> None:
    """P7, CheckpointSaved: one that was lost is not heard in the rank's next hello."""
    mishear_hello(saved=-1)


@planted
def skip_known_headers() -> None:
    """P8, Prepared: who holds a step's header is not asked for its word once more."""
    redeliver(lambda hello, effect: None if effect.step in hello.received else effect)


@planted
def skip_micro_batches() -> None:
    """P8, MicroBatch: what was under way when a connection ended is not sent again."""
    redeliver(lambda _, effect: replace(effect, first_micro_batch=1 << 20))


@planted
def release_once() -> None:
    """P8, Release: a rank that missed it is not told again."""
    prepared = StepLedger.prepared

    def once(ledger: StepLedger, dp_rank: int, number: int, *said: Any) -> list[Effect]:
        released = number in ledger.steps and ledger.steps[number].state == "released"
        effects = prepared(ledger, dp_rank, number, *said)
        return [] if released else effects

    plant(StepLedger, "prepared", once)
