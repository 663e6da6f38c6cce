"""Settings that change while a run goes on: the next plan heeds them, what is open stays."""

from dataclasses import replace

from rollout_dispatcher.core.effects import PlanWanted
from rollout_planner.planner import plan
from tests.support.core.cores import Bench


def configure(bench: Bench, **changes: float) -> None:
    tuning = replace(bench.core.config.tuning, **changes)  # type: ignore[arg-type]
    bench.perform(bench.core.configure(tuning, bench.now))


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
