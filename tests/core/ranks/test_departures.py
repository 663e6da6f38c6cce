"""A DP rank that leaves or is lost: those that go on without it get an error, and no others."""

from typing import Any

import pytest

from rollout_dispatcher.core.effects import Effect, FailRanks, LimitSteps
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.waiting import Cause
from rollout_dispatcher.errors import DispatcherError, PeerLost
from tests.support.core.cores import Bench


class Trainer(Bench):
    """Two ranks, and a dispatcher that can be started again."""

    def leave(self, rank: int, *, for_good: bool) -> None:
        self.perform(self.core.leave(rank, f"r{rank}", self.now, for_good=for_good))

    def ask(self, rank: int) -> None:
        taken = self.core._ledger.ranks[rank].taken
        self.perform(self.core.demand(rank, taken, self.now, hungry=True))

    def take(self, rank: int, step: int) -> None:
        self.perform(self.core.demand(rank, step, self.now, hungry=False))

    def effects_of(self, kind: type[Effect]) -> list[Effect]:
        found = [effect for effect in self.log if isinstance(effect, kind)]
        self.log.clear()
        return found

    def error(self, rank: int) -> DispatcherError | None:
        """The last error sent to this rank alone, if any."""
        found = [
            effect.error
            for effect in self.log
            if isinstance(effect, FailRanks) and effect.client_ids == (f"r{rank}",)
        ]
        return found[-1] if found else None


def trainer(**options: Any) -> Trainer:
    """Step 0 is trained, step 1 is released, and no rank has begun it."""
    bench = Trainer(batch=4, window=4, capacity=12, **options)
    bench.join()
    bench.push_plain(12)
    bench.train(0)
    bench.hold(1)
    bench.log.clear()
    return bench


@pytest.mark.parametrize("asked_before", [True, False])
def test_after_a_goodbye_a_rank_that_asks_for_a_later_step_gets_its_name(
    asked_before: bool,
) -> None:
    bench = trainer()
    if asked_before:
        bench.ask(0)
    bench.leave(1, for_good=True)
    if not asked_before:
        assert bench.error(0) is None
        bench.ask(0)
    error = bench.error(0)
    assert isinstance(error, PeerLost)
    assert "DP rank 1 closed its stream after step 0" in str(error)


def test_who_begins_a_released_step_before_the_goodbye_arrives_trains_it_in_vain() -> None:
    bench = trainer()
    bench.take(0, 1)
    assert (
        bench.core._ledger.has_room is False
    )  # rank 1 has room for no step behind the released one
    bench.leave(1, for_good=True)
    assert bench.effects_of(LimitSteps) == [LimitSteps((0,), 0)]
    bench.perform(bench.core.commit(0, 1, bench.now))
    bench.ask(0)
    assert "DP rank 1 closed its stream after step 0" in str(bench.error(0))
    assert bench.core._ledger.steps.committed == 0
    assert len(bench.planned) == 2


def test_all_may_leave_after_the_same_step() -> None:
    bench = trainer()
    for rank in (1, 0):
        bench.leave(rank, for_good=True)
    bench.pass_time(600)
    assert bench.effects_of(FailRanks) == []
    assert bench.core.deserted


def test_a_lost_rank_has_time_to_come_back() -> None:
    bench = trainer(rank_timeout=30.0)
    bench.ask(0)
    bench.leave(1, for_good=False)
    bench.pass_time(29)
    bench.perform(bench.core.join(RankHello("r1", 1, 2, 1, taken=0, committed=0), bench.now))
    bench.pass_time(600)
    assert bench.effects_of(FailRanks) == []
    bench.leave(1, for_good=False)
    bench.pass_time(29)
    assert bench.error(0) is None
    assert bench.core.next_deadline() is not None
    bench.pass_time(2)
    assert "DP rank 1 was lost after step 0" in str(bench.error(0))
    assert "30 s (--rank-timeout)" in str(bench.error(0))
    assert bench.core.next_deadline() is None


def test_the_rank_that_left_first_is_named_to_all() -> None:
    bench = Trainer(batch=4, window=4, capacity=12)
    bench.core._ledger.generation.dp_size = 3
    bench.perform(bench.core.join(RankHello("r0", 0, 3, None), bench.now))
    for rank in (1, 2):
        bench.perform(bench.core.join(RankHello(f"r{rank}", rank, 3, 1), bench.now))
    bench.leave(2, for_good=True)
    for rank in (0, 1):
        bench.ask(rank)
        assert "DP rank 2 closed its stream before its first step" in str(bench.error(rank))


@pytest.mark.parametrize("comes_back", [True, False])
def test_after_a_restart_ranks_that_do_not_come_back_are_lost(comes_back: bool) -> None:
    before = trainer(durable=True)
    bench = Trainer(batch=4, window=4, capacity=12, durable=True, rank_timeout=30.0)
    bench.perform(bench.core.restore(before.memory.remembered(), bench.now))
    for rank in (0, 1) if comes_back else (0,):
        hello = RankHello(f"r{rank}", rank, 2, 1, taken=0, committed=0, hungry=True)
        bench.perform(bench.core.join(hello, bench.now))
    bench.pass_time(31)
    if comes_back:
        assert bench.effects_of(FailRanks) == []
    else:
        assert "DP rank 1 has not come back within 30 s" in str(bench.error(0))


def test_who_left_is_what_the_next_step_waits_for() -> None:
    bench = trainer()
    bench.leave(1, for_good=True)
    reasons = {each.cause: each.text for each in bench.core.reasons(bench.now)}
    assert reasons[Cause.LEFT_RANKS] == "DP rank 1 closed the stream"
