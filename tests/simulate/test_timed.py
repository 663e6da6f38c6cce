"""Timed arrivals: samples come when they come, ranks take their time, and none is lost."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.replay import Setting, VirtualStep, run_timed
from rollout_dispatcher.simulate.result import RankTime
from rollout_dispatcher.simulate.run import Scenario, simulate
from rollout_dispatcher.simulate.trace import Trace, load_trace
from rollout_planner.types import Grouping, Oversize, Strategy
from tests.simulate.bench import make_setting, make_trace, shared_trace
from tests.simulate.checker import check_books


def replay(
    setting: Setting, trace: Trace, load: float = 0.5, steps: int | None = None
) -> tuple[list[VirtualStep], RankTime]:
    found: list[VirtualStep] = []
    return found, run_timed(setting, trace, load, steps, found.append)


def even(count: int, tokens: int = 100, every: float = 1.0) -> Trace:
    return make_trace([tokens] * count, arrival=[at * every for at in range(count)])


def test_every_sample_is_trained_once_and_the_last_step_may_be_smaller(tmp_path: Path) -> None:
    trace = even(43)
    path = tmp_path / "plans.jsonl"
    with path.open("w") as file:
        (run,) = simulate(trace, [make_setting(1.5)], Scenario(load=0.5), plans=file)
    account = check_books(path, dict.fromkeys(range(43), 100), max_skips=6)[1.5, "window"]
    assert len(account.gone) == 43
    assert (run.steps, run.small_steps) == (6, 1)
    assert run.triggers["flush"] == 1


def test_a_trainer_with_time_to_spare_waits_for_data() -> None:
    steps, timing = replay(make_setting(1), even(80), load=0.5)
    assert timing.waiting_for_stragglers == 0
    # 79 s of arrivals, half of that at work; the first batch is there after 7 s.
    assert timing.elapsed == pytest.approx(79 - 7 + 79 * 0.5 / 10)
    assert timing.busy == pytest.approx(79 * 0.5 / timing.elapsed)
    assert [step.at for step in steps] == [7.0 + 8 * step for step in range(10)]
    assert timing.wait.mean == pytest.approx(3.5)


def test_a_trainer_that_is_too_slow_never_waits_and_samples_do() -> None:
    _, timing = replay(make_setting(1), even(80), load=4.0)
    assert timing.waiting_for_data == 0
    assert timing.elapsed == pytest.approx(4 * 79)
    assert timing.wait.max > 79


def test_ranks_that_wait_for_each_other_are_told_from_ranks_that_wait_for_data() -> None:
    trace = make_trace([100, 300] * 40, arrival=[float(at) for at in range(80)])
    one_rank_gets_all_that_is_long = make_setting(1, Strategy.ROUND_ROBIN)
    _, plain = replay(one_rank_gets_all_that_is_long, trace)
    _, balanced = replay(make_setting(1), trace)
    assert plain.waiting_for_stragglers > 0.1
    assert balanced.waiting_for_stragglers < 0.02


def test_the_next_step_is_planned_while_one_is_trained() -> None:
    steps, timing = replay(make_setting(1), even(32, every=0.001), load=1000)
    assert steps[1].at < 0.05
    assert timing.elapsed > 20


def test_hungry_ranks_take_an_unbalanced_batch_after_max_wait() -> None:
    lengths = [int(tokens) for tokens in np.geomspace(10, 5000, 32)]  # no two alike
    trace = make_trace(lengths, arrival=[float(at) for at in range(32)])
    steps, _ = replay(make_setting(2, max_wait=8.5), trace, load=0.01)
    assert steps[0].trigger is Trigger.MAX_WAIT
    assert steps[0].at == pytest.approx(8.5, abs=1e-5)
    steps, _ = replay(make_setting(2, max_wait=60.0), trace, load=0.01)
    assert steps[0].trigger is Trigger.WINDOW_FULL
    steps, _ = replay(make_setting(2, max_wait=60.0, target_excess=99.0), trace, load=0.01)
    assert steps[0].trigger is Trigger.TARGET_EXCESS


def test_the_run_can_stop_after_some_steps() -> None:
    steps, timing = replay(make_setting(1), even(80), steps=3)
    assert [len(step.samples) for step in steps] == [8] * 3
    assert timing.wait.max == pytest.approx(7.0)


def test_groups_wait_for_their_last_member_and_are_dropped_whole() -> None:
    lengths = [10, 10, 10, 900, 10, 10, 10, 10, 10, 10]
    groups = [0, 1, 2, 2, 0, 1, 3, 3, 4, 4]
    trace = make_trace(lengths, groups, [float(at) for at in range(10)])
    setting = make_setting(
        1, grouping=Grouping.STEP, oversize=Oversize.DROP, tokens=100, batch=4, ranks=1
    )
    steps, _ = replay(setting, trace)
    gone = [[sample.group_id for sample in step.samples] for step in steps]
    assert [sorted(map(str, step)) for step in gone] == [
        ["0-0", "0-0", "0-1", "0-1"],
        ["0-3", "0-3", "0-4", "0-4"],
    ]
    assert [key for step in steps for key in step.dropped] == ["0-2", "0-3"]


def test_members_of_a_begun_group_pass_those_that_wait_for_room(tmp_path: Path) -> None:
    count = 20
    groups = [*range(count)] * 3  # all the first members come, then all the second
    trace = make_trace(range(100, 160), groups, [float(at) for at in range(60)])
    setting = make_setting(1.5, grouping=Grouping.STEP, batch=9, ranks=3)
    path = tmp_path / "plans.jsonl"
    with path.open("w") as file:
        (run,) = simulate(trace, [setting], Scenario(load=0.9), plans=file)
    tokens = {row: 100 + row for row in range(60)}
    account = check_books(path, tokens, max_skips=6)[1.5, "window"]
    assert run.samples == len(account.gone) == 60
    assert account.excess == pytest.approx(run.excess)


@pytest.mark.parametrize("times", [None, [3.0, 3.0]])
def test_a_trace_that_does_not_say_when_is_refused(times: list[float] | None) -> None:
    trace = make_trace([1, 2], arrival=times)
    with pytest.raises(ConfigError, match="--arrivals steady"):
        simulate(trace, [make_setting(1)], Scenario(load=0.9))


def test_work_that_costs_nothing_takes_no_time_and_is_refused() -> None:
    setting = make_setting(1)
    free = replace(setting, plan=replace(setting.plan, cost=lambda s: np.zeros(len(s))))
    with pytest.raises(ConfigError, match="--cost"):
        replay(free, even(8))


def test_a_real_service_trace_keeps_nine_tenths_busy(root: Path) -> None:
    trace = load_trace(str(shared_trace(root, "azure2023_conv")))
    setting = make_setting(1.25, ranks=16, batch=256, tokens=32_768, max_wait=10.0)
    (run,) = simulate(trace, [setting], Scenario(load=0.9))
    assert run.timing is not None
    assert run.timing.busy == pytest.approx(0.9, abs=0.03)
    assert run.samples == len(trace)
    shares = (run.timing.busy, run.timing.waiting_for_data, run.timing.waiting_for_stragglers)
    assert sum(shares) == pytest.approx(1)
