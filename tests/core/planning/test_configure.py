"""Settings that change while a run goes on: the next plan heeds them, what is open stays."""

from dataclasses import replace

import pytest

from rollout_dispatcher.core.effects import PlanWanted
from rollout_dispatcher.core.facts import Configured, PostedSetting
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.sample import Outcome
from rollout_planner.planner import plan
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def configure(bench: Bench, **changes: float) -> None:
    tuning = replace(bench.core.config.tuning, **changes)  # type: ignore[arg-type]
    bench.perform(bench.core.configure(tuning, (), bench.now))


def push_uneven(bench: Bench, count: int) -> None:
    """Samples that no four of make a good step."""
    for at in range(count):
        bench.push(make_sample(f"s{at}", 1 + 5**at))


def test_a_smaller_window_that_is_full_is_planned_at_once() -> None:
    bench = Bench()
    bench.join()
    push_uneven(bench, 5)
    assert bench.planned == []
    configure(bench, window=5)
    assert bench.triggers == [Trigger.WINDOW_FULL]


def test_a_larger_window_is_waited_for_and_what_was_held_back_comes_in() -> None:
    bench = Bench(capacity=6)
    bench.push_plain(6)
    assert bench.push(make_sample("held", 4)) is None
    configure(bench, window=8, buffer=8)
    assert bench.core.statistics().buffered == 7
    bench.push_plain(1)
    bench.join()
    assert bench.core.statistics().steps[0].num_samples == 4


def test_a_looser_target_lets_a_batch_go_that_was_tried_before() -> None:
    bench = Bench()
    bench.join()
    push_uneven(bench, 4)
    assert bench.planned == []
    configure(bench, target_excess=9.0)
    assert bench.triggers == [Trigger.TARGET_EXCESS]


def test_a_shorter_wait_counts_from_when_ranks_became_hungry() -> None:
    bench = Bench()
    bench.join()
    push_uneven(bench, 4)
    bench.hungry()
    bench.pass_time(1.0)
    assert bench.planned == []
    configure(bench, max_wait=0.5)
    assert bench.triggers == [Trigger.MAX_WAIT]


def test_a_plan_that_is_asked_for_goes_on_as_it_was_asked_for() -> None:
    bench = Bench()
    bench.push_plain(6)
    bench.perform = lambda decision: bench.log.extend(decision.effects)  # type: ignore[method-assign]
    bench.join()
    (wanted,) = [effect for effect in bench.log if isinstance(effect, PlanWanted)]
    configure(bench, window=4, buffer=4)
    assert [effect for effect in bench.log if isinstance(effect, PlanWanted)] == [wanted]
    answer = plan(wanted.window, bench.plan_config, wanted.take)
    bench.core.planned(wanted, answer, bench.now)
    assert bench.core.statistics().balanced


def test_a_smaller_buffer_drops_nothing_and_holds_back_until_it_is_below() -> None:
    bench = Bench(window=6, capacity=6)
    bench.push_plain(6)
    configure(bench, window=4, buffer=4)
    assert bench.push(make_sample("held", 4)) is None
    assert bench.core.statistics().buffered == 6


@pytest.mark.parametrize("durable", [True, False])
def test_a_restart_is_told_of_what_was_posted(*, durable: bool) -> None:
    bench = Bench(durable=durable)
    posted = (PostedSetting("max_wait", 0.5, 2.0, "somebody"),)
    tuning = bench.core.config.tuning
    bench.perform(bench.core.configure(tuning, posted, bench.now))
    assert bench.facts == ([Configured(posted)] if durable else [])
    assert bench.push(make_sample("s", 4)) == (Outcome.ACCEPTED,)
