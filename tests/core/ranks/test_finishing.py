"""The DP ranks finish the run: producers get that, the books balance, a restart stands by it."""

from typing import Any

import pytest

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.effects import (
    Drained,
    EndProducers,
    EndRanks,
    FailRanks,
    LimitSteps,
    PlanRequested,
    PushAnswered,
)
from rollout_dispatcher.core.facts import DropReason, Finished
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.waiting import Cause
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import PeerLost, ProtocolError, RunFinished, StepContractError
from rollout_dispatcher.sample import Outcome
from rollout_planner.planner import plan
from tests.core.ranks.test_departures import Trainer
from tests.support.samples import make_sample


class Finisher(Trainer):
    """Two ranks that finish."""

    def finish(self, rank: int, step: int, *, discard: bool = False) -> None:
        self.perform(self.core.finish(rank, step, self.now, discard=discard))

    def finished(self) -> bool:
        return self.core.finished

    def failure(self) -> Exception | None:
        """The last error sent to all ranks."""
        found = [e.error for e in self.log if isinstance(e, FailRanks) and len(e.client_ids) == 2]
        return found[-1] if found else None


def trainer(**options: Any) -> Finisher:
    """Step 0 is trained, step 1 is released; 4 samples and a beginning are left, one push waits."""
    bench = Finisher(batch=4, window=4, capacity=4, **options)
    bench.perform(bench.core.producer_connected("p"))
    bench.join()
    bench.push_plain(4)
    bench.train(0)
    bench.push_plain(4)
    bench.hold(1)
    bench.push(make_sample("beginning", group_id="g", group_size=3))
    bench.push_plain(4)
    assert bench.push(make_sample("late")) is None
    bench.log.clear()
    return bench


@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_when_all_finish_producers_are_sent_that_and_what_is_left_is_kept_or_counted(
    durable: bool, discard: bool
) -> None:
    bench = trainer(durable=durable)
    bench.finish(0, 0, discard=discard)
    assert not bench.finished()
    bench.finish(1, 0, discard=discard)
    assert bench.finished()
    answers = [effect for effect in bench.log if isinstance(effect, PushAnswered)]
    assert [(a.outcomes, a.reasons) for a in answers] == [((Outcome.REFUSED,), {0: "run-finished"})]
    assert any(isinstance(e, EndProducers) and isinstance(e.error, RunFinished) for e in bench.log)
    assert EndRanks((0, 1), EndReason.FINISHED) in bench.log
    assert Drained("finished") in bench.log
    at = bench.core.statistics()
    assert at.balanced
    keeps = durable and not discard
    left = (at.buffered, at.in_flight, at.dropped[DropReason.UNUSED])
    assert left == ((5, 4, 0) if keeps else (0, 0, 9))
    assert bench.push(make_sample("later")) == (Outcome.REFUSED,)
    assert bench.core.next_deadline() is None or keeps


def test_nothing_is_planned_any_more() -> None:
    bench = Finisher(batch=4, window=8, capacity=8, durable=True)
    bench.join()
    asked: list[PlanRequested] = []
    decision = bench.core.push(push_of(bench, 8), bench.now)
    asked += [effect for effect in decision.effects if isinstance(effect, PlanRequested)]
    assert asked, "the planner is at work when the ranks finish"
    for rank in (0, 1):
        bench.finish(rank, -1)
    answer = plan(asked[0].window, bench.plan_config, asked[0].take)
    bench.perform(bench.core.planned(asked[0], answer, bench.now))
    at = bench.core.statistics()
    assert (at.buffered, at.in_flight, at.balanced) == (8, 0, True)
    assert bench.core.drained


def push_of(bench: Finisher, count: int) -> Any:
    return Push("p", 0, tuple(make_sample(f"p/{at}", 4) for at in range(count)))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            (1, False),
            "after step 0 with discard=False, and DP rank 1 finished the run after step 1",
        ),
        ((0, True), "DP rank 1 finished the run after step 0 with discard=True"),
    ],
)
def test_ranks_that_differ_all_fail(second: tuple[int, bool], words: str) -> None:
    bench = trainer()
    if second[0] == 1:
        bench.take(0, 1)  # and leaves it alone
        bench.take(1, 1)
        bench.perform(bench.core.commit(1, 1, bench.now))
    bench.finish(0, 0)
    bench.finish(1, second[0], discard=second[1])
    assert isinstance(bench.failure(), StepContractError)
    assert words in str(bench.failure())
    assert not bench.finished()


def test_a_rank_that_goes_on_is_an_error_on_all() -> None:
    bench = trainer()
    bench.finish(0, 0)
    assert LimitSteps((0, 1), 0) in bench.log
    assert bench.failure() is None
    bench.ask(1)
    assert isinstance(bench.failure(), StepContractError)
    assert "DP rank 0 finished the run after step 0, and DP rank 1 goes on after step 0" in str(
        bench.failure()
    )


def test_a_step_that_was_begun_to_see_that_it_is_one_too_many_is_not_used() -> None:
    bench = trainer(durable=True)
    bench.take(0, 1)
    bench.finish(0, 0)
    bench.take(1, 1)
    bench.finish(1, 0)
    assert bench.finished()
    assert bench.failure() is None


def test_a_rank_that_waits_for_one_that_left_fails() -> None:
    bench = trainer(rank_timeout=30.0)
    bench.finish(0, 0)
    bench.leave(1, for_good=True)
    assert isinstance(bench.error(0), PeerLost)


def test_the_word_of_a_rank_that_died_after_it_counts() -> None:
    bench = trainer(rank_timeout=30.0)
    bench.finish(1, 0)
    bench.leave(1, for_good=False)
    bench.pass_time(60)
    bench.finish(0, 0)
    assert bench.finished()
    assert bench.error(0) is None


def test_the_end_names_whom_it_waits_for() -> None:
    bench = trainer()
    bench.finish(0, 0)
    reasons = {each.cause: each.text for each in bench.core.reasons(bench.now)}
    assert (
        reasons[Cause.UNFINISHED_RANKS] == "DP rank 0 finished the run, and DP rank 1 did not yet"
    )


def test_a_step_that_it_did_not_commit_last_is_a_fault_of_the_protocol() -> None:
    bench = trainer()
    with pytest.raises(ProtocolError, match="finished after step 1, and has committed step 0"):
        bench.core.finish(0, 1, bench.now, discard=False)


def test_after_the_end_of_the_stream_it_changes_nothing() -> None:
    bench = Finisher(batch=4, window=4, capacity=8)
    bench.join()
    bench.push_plain(4)
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.train(0)
    for rank in (0, 1):
        bench.finish(rank, 0)
    assert not bench.finished()
    assert EndRanks((0, 1), EndReason.ENDED) in bench.log


def test_ranks_that_finish_before_the_last_steps_are_sent_that_too() -> None:
    bench = Finisher(batch=4, window=4, capacity=12)
    bench.join()
    bench.push_plain(8)
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.train(0)
    assert EndRanks((0, 1), EndReason.ENDED) in bench.log  # step 1 is planned, and the last
    for rank in (0, 1):
        bench.finish(rank, 0)
    assert EndRanks((0, 1), EndReason.FINISHED) in bench.log
    assert bench.dropped(DropReason.UNUSED) == 4
    assert bench.core.statistics().balanced


def restarted(before: Finisher, **options: Any) -> Finisher:
    bench = Finisher(batch=4, window=4, capacity=4, durable=True, **options)
    bench.perform(bench.core.restore(before.memory.remembered(), bench.now))
    bench.memory = before.memory
    bench.perform(bench.core.tick(bench.now))
    return bench


@pytest.mark.parametrize("discard", [False, True])
def test_a_restart_before_everybody_knows_stands_by_it(discard: bool) -> None:
    before = trainer(durable=True)
    before.take(0, 1)
    for rank in (0, 1):
        before.finish(rank, 0, discard=discard)
    bench = restarted(before)
    assert bench.finished()
    assert bench.core.drained
    assert not bench.core.deserted  # its ranks may wait for the word
    hello = RankHello("r0", 0, 2, 1, taken=1, committed=0, finished=0, discards=discard)
    bench.perform(bench.core.join(hello, bench.now))
    assert EndRanks((0,), EndReason.FINISHED) in bench.log
    bench.leave(0, for_good=True)
    assert bench.push(make_sample("later"), by="q") == (Outcome.REFUSED,)
    assert bench.core.statistics().balanced
    assert bench.core.deserted


def test_a_process_group_that_begins_after_the_end_is_awaited_whole() -> None:
    bench = trainer()
    for rank in (0, 1):
        bench.finish(rank, 0)
        bench.leave(rank, for_good=True)
    bench.perform(bench.core.join(RankHello("r0", 0, 2, None), bench.now))
    bench.leave(0, for_good=True)
    assert not bench.core.deserted  # DP rank 1 had to wait for the generation of DP rank 0
    hello = RankHello("r1", 1, 2, bench.core.statistics().generation)
    bench.perform(bench.core.join(hello, bench.now))
    bench.leave(1, for_good=True)
    assert bench.core.deserted


def test_a_restart_between_two_finishing_ranks_receives_the_first_again() -> None:
    before = trainer(durable=True)
    before.finish(0, 0)
    bench = restarted(before)
    assert not bench.finished()
    for rank, finished in ((0, 0), (1, None)):
        hello = RankHello(f"r{rank}", rank, 2, 1, taken=0, committed=0, finished=finished)
        bench.perform(bench.core.join(hello, bench.now))
    bench.finish(1, 0)
    assert bench.finished()


def test_once_everybody_knows_the_next_start_goes_on_with_what_is_left() -> None:
    before = trainer(durable=True)
    for rank in (0, 1):
        before.finish(rank, 0)
        before.leave(rank, for_good=True)
    before.perform(before.core.finish_carried_out())
    assert before.facts[-1] == Finished(pending=False)
    bench = restarted(before)
    assert not bench.finished()
    at = bench.core.statistics()
    assert (at.buffered, at.in_flight, at.steps_committed, at.run_state) == (5, 4, 1, "running")
    bench.perform(bench.core.join(RankHello("n0", 0, 2, None), bench.now))
    bench.perform(bench.core.join(RankHello("n1", 1, 2, 2), bench.now))
    bench.train(1)
    assert bench.core.statistics().balanced
