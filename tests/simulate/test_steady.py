"""Steady arrivals: the core sees a full window each time, and the plans say what it did."""

import io
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.replay import Setting, VirtualStep, run_steady, warm_up_steps
from rollout_dispatcher.simulate.run import Scenario, simulate
from rollout_dispatcher.simulate.trace import Epochs, Trace, load_trace
from rollout_planner.types import Grouping, Oversize, Strategy
from tests.simulate.bench import make_setting, make_trace, shared_trace
from tests.simulate.checker import Account, Key, check_books

HEAVY = [int(tokens) for tokens in np.geomspace(20, 20_000, 150)]


def steps_of(setting: Setting, trace: Trace, steps: int, core_ranks: int = 1) -> list[VirtualStep]:
    found: list[VirtualStep] = []
    epochs = Epochs(trace, 0, whole_groups=setting.core.groups_matter)
    run_steady(setting, epochs, steps, found.append, core_ranks)
    return found


def books_of(
    trace: Trace, settings: Iterable[Setting], steps: int, tmp_path: Path, max_skips: int = 6
) -> tuple[dict[Key, Account], list[float]]:
    """Checked accounts, and the excess that each row reports."""
    path = tmp_path / "plans.jsonl"
    with path.open("w") as file:
        runs = simulate(trace, list(settings), Scenario(steps=steps), plans=file)
    tokens = dict(zip(trace.row.tolist(), trace.tokens.tolist(), strict=True))
    return check_books(path, tokens, max_skips=max_skips), [run.excess for run in runs]


@pytest.mark.parametrize("budget", [None, 16_384])
def test_the_books_balance_and_give_the_excess_that_is_reported(
    tmp_path: Path, budget: int | None
) -> None:
    settings = [make_setting(1, strategy, tokens=budget) for strategy in Strategy]
    settings += [make_setting(window, tokens=budget) for window in (1.25, 2)]
    accounts, reported = books_of(make_trace(HEAVY), settings, 30, tmp_path)
    assert list(accounts) == [(each.window, str(each.strategy)) for each in settings]
    for (window, _), account, excess in zip(accounts, accounts.values(), reported, strict=True):
        assert set(account.sizes) == {8}
        assert set(account.held) == {int(8 * window)}
        assert account.excess == pytest.approx(excess)
        assert sum(account.delays.values()) == 30 * 8


@pytest.mark.parametrize(
    ("name", "budget"), [("lineage_open_reasoning", 131_072), ("reasoning_gym_rlvr_g3", 16_384)]
)
def test_the_books_of_real_traces_balance(
    root: Path, tmp_path: Path, name: str, budget: int
) -> None:
    trace = load_trace(str(shared_trace(root, name)))
    settings = [
        make_setting(window, ranks=16, batch=256, tokens=budget, max_skips=8)
        for window in (1, 1.25, 2)
    ]
    accounts, reported = books_of(trace, settings, 20, tmp_path, max_skips=8)
    for account, excess in zip(accounts.values(), reported, strict=True):
        assert set(account.sizes) == {256}
        assert account.excess == pytest.approx(excess)
    assert reported[1] < reported[0]


def test_every_rank_with_a_seat_of_its_own_gets_the_same_plans() -> None:
    setting, trace = make_setting(1.5, ranks=4), make_trace(HEAVY)
    one, four = steps_of(setting, trace, 10), steps_of(setting, trace, 10, core_ranks=4)
    for a, b in zip(one, four, strict=True):
        assert a.plan.chosen.tolist() == b.plan.chosen.tolist()
        assert [s.sample_id for s in a.arrived] == [s.sample_id for s in b.arrived]


def test_without_a_choice_there_is_no_warm_up_and_nobody_waits() -> None:
    setting = make_setting(1)
    assert warm_up_steps(setting) == 0
    assert all(set(step.skips) == {0} for step in steps_of(setting, make_trace(HEAVY), 5))


def test_the_warm_up_outlasts_two_generations_of_the_window() -> None:
    setting = make_setting(2, max_skips=6)
    assert warm_up_steps(setting) == 14
    assert len(steps_of(setting, make_trace(HEAVY), 3)) == 17


def test_warm_up_steps_are_written_with_negative_numbers() -> None:
    plans = io.StringIO()
    (run,) = simulate(make_trace(HEAVY), [make_setting(2)], Scenario(steps=2), plans=plans)
    numbers = [json.loads(line)["step"] for line in plans.getvalue().splitlines()]
    assert numbers == list(range(-14, 2))
    assert (run.warm_up_steps, run.steps, run.samples) == (14, 2, 16)


@pytest.mark.parametrize("strategy", [Strategy.ROUND_ROBIN, Strategy.GREEDY, Strategy.KK])
def test_the_others_take_what_came_first(strategy: Strategy) -> None:
    trace = make_trace(HEAVY)
    in_turn = [unit[0].sample_id for unit in islice(Epochs(trace, 0, whole_groups=False), 24)]
    steps = steps_of(make_setting(1, strategy), trace, 3)
    gone = [{sample.sample_id for sample in step.samples} for step in steps]
    assert gone == [set(in_turn[at : at + 8]) for at in (0, 8, 16)]


def test_groups_go_whole_and_a_step_that_they_cannot_fill_is_counted(tmp_path: Path) -> None:
    trace = make_trace(HEAVY, group=[row // 3 for row in range(150)])
    settings = [make_setting(window, grouping=Grouping.STEP) for window in (1, 2)]
    accounts, _ = books_of(trace, settings, 20, tmp_path)
    for account in accounts.values():
        assert set(account.sizes) == {6}
    (run, _) = simulate(trace, settings, Scenario(steps=20))
    assert run.small_steps == 20


def test_samples_longer_than_the_budget_go_alone_or_are_dropped(tmp_path: Path) -> None:
    trace = make_trace([100] * 40 + [900, 950])
    alone, _ = books_of(trace, [make_setting(1, tokens=800)], 21, tmp_path)
    assert len(alone[1, "window"].gone) == 168
    setting = make_setting(1, tokens=800, oversize=Oversize.DROP)
    dropped, _ = books_of(trace, [setting], 20, tmp_path)
    account = dropped[1, "window"]
    assert set(account.dropped.values()) == {"oversize"}
    assert {key.partition("-")[2] for key in account.dropped} == {"40", "41"}
    with pytest.raises(ConfigError, match="every sample"):
        simulate(make_trace([900, 901]), [setting], Scenario(steps=1))


def test_the_same_seed_gives_the_same_books_and_another_one_others() -> None:
    def written(seed: int) -> str:
        plans = io.StringIO()
        simulate(make_trace(HEAVY), [make_setting(1.5)], Scenario(seed, steps=5), plans=plans)
        return plans.getvalue()

    assert written(1) == written(1)
    assert written(1) != written(2)


def test_a_group_larger_than_a_step_is_refused() -> None:
    trace = make_trace(range(1, 19), group=[row // 9 for row in range(18)])
    with pytest.raises(ConfigError, match="--global-batch-size"):
        simulate(trace, [make_setting(2, grouping=Grouping.STEP)], Scenario(steps=1))
