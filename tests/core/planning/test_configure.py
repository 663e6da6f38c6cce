"""Settings that change while a run goes on: the next plan heeds them, what is open stays."""

from dataclasses import replace

from rollout_dispatcher.core.effects import PlanRequested
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_planner.planner import plan
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def configure(bench: Bench, **changes: float) -> None:
    tuning = replace(bench.core.config.tuning, **changes)  # type: ignore[arg-type]
    bench.perform(bench.core.configure(tuning, bench.now))


def test_a_plan_that_is_asked_for_goes_on_as_it_was_asked_for() -> None:
    bench = Bench()
    bench.push_plain(6)
    bench.perform = lambda decision: bench.log.extend(decision.effects)  # type: ignore[method-assign]
    bench.join()
    (wanted,) = [effect for effect in bench.log if isinstance(effect, PlanRequested)]
    configure(bench, window=4, buffer=4)
    assert [effect for effect in bench.log if isinstance(effect, PlanRequested)] == [wanted]
    answer = plan(wanted.window, bench.plan_config, wanted.take)
    bench.core.planned(wanted, answer, bench.now)
    assert bench.core.statistics().balanced


def push_uneven(bench: Bench, count: int) -> None:
    """Samples that no four of make a good step."""
    for at in range(count):
        bench.push(make_sample(f"s{at}", 1 + 5**at))


def test_a_shorter_wait_counts_from_when_ranks_became_hungry() -> None:
    bench = Bench()
    bench.join()
    push_uneven(bench, 4)
    bench.hungry()
    bench.pass_time(1.0)
    assert bench.planned == []
    configure(bench, max_wait=0.5)
    assert bench.triggers == [Trigger.MAX_WAIT]
