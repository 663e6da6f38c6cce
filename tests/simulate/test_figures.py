"""Figures: sums before ratios, and the distances that are promised."""

from dataclasses import replace

import numpy as np
import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.figures import selection_bias, step_mix, summary
from rollout_dispatcher.simulate.result import Result, Run, Spread
from rollout_dispatcher.simulate.run import Scenario, simulate
from rollout_dispatcher.simulate.table import DELAY_PRICE, recommend, signed
from rollout_dispatcher.simulate.trace import Trace
from rollout_planner.cost import Quadratic
from rollout_planner.types import IntArray, Layout, Strategy, Sync
from tests.simulate.bench import make_setting, make_trace
from tests.support.simulated import result_of

HEAVY = [int(tokens) for tokens in np.geomspace(20, 20_000, 150)]
TRACE = make_trace(HEAVY)


def runs_of(trace: Trace = TRACE, steps: int = 20) -> list[Run]:
    settings = [make_setting(1, strategy) for strategy in Strategy]
    return simulate(trace, [*settings, make_setting(1.5), make_setting(2)], Scenario(steps=steps))


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return runs_of()


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_a_choice_waits_less_than_a_plain_split_and_never_less_than_the_bound(
    runs: list[Run],
) -> None:
    plain, *_, larger, largest = runs
    assert largest.excess < plain.excess
    assert all(run.lower_bound <= run.excess + 1e-9 for run in runs)
    assert larger.delay.mean == pytest.approx(0.5, abs=0.25)


def test_per_step_sync_reports_the_most_loaded_rank() -> None:
    (run,) = simulate(TRACE, [make_setting(1, Strategy.KK, sync=Sync.STEP)], Scenario(steps=5))
    assert run.excess == pytest.approx(run.imbalance)


def test_a_step_that_costs_more_weighs_more() -> None:
    cheap, dear = [10, 20] * 4, [5000, 5000] * 4
    setting = make_setting(1, Strategy.ROUND_ROBIN)
    trace = make_trace([*cheap, *dear], arrival=[float(at) for at in range(16)])
    (run,) = simulate(trace, [setting], Scenario(load=0.5))
    assert run.steps == 2
    assert run.step_excess.max > 0.3
    assert run.excess < 0.01


def test_a_pipeline_takes_its_largest_micro_batch_once_more_for_each_further_stage() -> None:
    """So it waits more, on the clock too, and nothing is below its bound."""
    one = make_setting(1, sync=Sync.STEP)
    four = replace(one, plan=replace(one.plan, pipeline_stages=4))
    plain, run = simulate(TRACE, [one, four], Scenario(steps=20))
    assert run.excess > plain.excess
    assert run.lower_bound <= run.excess
    timed = make_trace(HEAVY, arrival=[0.0] * 149 + [100.0])
    took = [
        run.timing.elapsed
        for run in simulate(timed, [one, four], Scenario(load=0.9))
        if run.timing is not None
    ]
    assert took[1] > took[0]


def test_the_distance_is_that_of_20_dispatches_and_chance_is_measured_alike() -> None:
    whole = ints(1, 2, 3, 4)
    steps = [ints(1, 2), ints(3, 4)]
    assert selection_bias(whole, steps, ints(9, 9, 1, 1, 1, 1), before=2) == (0.0, 0.75)
    assert selection_bias(whole, steps[:1], ints(1, 2, 3, 4), before=0) == (0.5, 0.5)
    often = [ints(1, 4)] * 30
    assert selection_bias(whole, often, ints(*[1, 2, 3, 4] * 15), before=0) == (0.25, 0.0)


def test_no_values_spread_over_nothing() -> None:
    assert Spread.of([]).max == 0.0
    assert Spread.of([1.0, 2.0, 6.0]).mean == 3.0


def test_the_trace_is_summed_up_without_losing_a_sample() -> None:
    found = summary(TRACE)
    assert (found.samples, found.tokens.max) == (150, HEAVY[-1])


def test_a_result_survives_being_saved(runs: list[Run]) -> None:
    timed = make_trace(HEAVY, arrival=[float(at) for at in range(150)])
    both = [*runs, *simulate(timed, [make_setting(1)], Scenario(load=0.9))]
    result = Result(summary(TRACE), {"seed": 0}, both, recommend(runs))
    assert result_of(result.to_json()) == result


def with_excess(run: Run, *rows: tuple[float, float]) -> list[Run]:
    return [replace(run, strategy="window", window=w, excess=e, timing=None) for w, e in rows]


@pytest.mark.parametrize(
    ("rows", "window"),
    [
        ([(1, 0.58), (1.25, 0.01), (2, 0.005)], 1.25),
        ([(2, 0.14), (1, 0.71), (1.25, 0.31)], 2),
        ([(1, 0.0038), (1.25, 0.0027), (2, 0.0019)], 1),
        ([(1, 0.10), (1.25, 0.10 - 1.2 * DELAY_PRICE / 4), (1.5, 0.0939)], 1.25),
        ([(1, 0.0), (2, 0.0)], 1),
    ],
)
def test_a_window_is_worth_it_if_it_saves_two_per_cent_a_dispatch(
    runs: list[Run], rows: list[tuple[float, float]], window: float
) -> None:
    assert recommend(with_excess(runs[-1], *rows)).window == window


def test_the_reason_is_two_sentences_with_figures(runs: list[Run]) -> None:
    rows = with_excess(runs[-1], (1, 0.58), (1.25, 0.01), (2, 0.005))
    why = recommend([runs[0], *rows]).why
    assert why.count(". ") == 1
    assert "--window 1.25" in why
    assert "58.0 %" in why
    assert "round-robin" in why
    assert "window of 2 would save 0.50 %" in why
    assert "larger one may save more" in recommend(rows[:2]).why
    with pytest.raises(ConfigError, match="--strategy window"):
        recommend(runs[:2])


def test_where_less_waiting_for_each_other_is_more_waiting_for_data_the_reason_says_so() -> None:
    trace = make_trace(HEAVY, arrival=[float(at) for at in range(150)])
    run = simulate(trace, [make_setting(1)], Scenario(load=0.9))[0]
    rows = [
        replace(run, strategy="window", window=w, excess=e) for w, e in ((1, 0.164), (1.25, 0.151))
    ]
    why = recommend(rows).why
    assert "window of 1.25 would save nothing" in why
    assert "Its excess is 15.1 %, against 16.4 %" in why
    assert "ask with --arrivals steady" in why
    assert "Its excess" not in recommend([rows[0], replace(rows[0], window=1.25)]).why


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0024, "0.24 %"), (0.024, "2.40 %"), (0.24, "24.0 %"), (2.4, "240 %"), (-1e-9, "0.00 %")],
)
def test_shares_are_shown_with_about_three_digits(ratio: float, text: str) -> None:
    assert signed(ratio) == text


def test_weights_and_distances_of_single_steps() -> None:
    trace = ints(*[100] * 99, 5000)
    alike = [trace, trace]
    mix, expected = step_mix(trace, alike, np.array([2.0, 2.0]), np.array([147.99, 147.99]))
    assert expected == pytest.approx(1.0)
    assert (mix.long_weight, mix.without_long) == pytest.approx((1.0, 0.0))
    assert (mix.work_variation, mix.ks_step) == pytest.approx((0.0, 0.0))
    apart = [ints(*[100] * 98), ints(*[100] * 100, 5000, 5000)]
    mix, expected = step_mix(trace, apart, np.array([1.0, 3.0]), np.array([99.0, 99.0]))
    in_a_long_step, of_all = 2 * 4999 / 102, (98 * 99 / 98 + (100 * 99 + 2 * 4999) / 102)
    assert expected == pytest.approx(in_a_long_step / 9998 * (99 * 198 + 9998) / of_all)
    assert mix.long_weight == pytest.approx((99 * 198 + 2 * 4999) / 2 / (99 * 100 + 2 * 4999))
    assert (mix.without_long, mix.work_variation) == pytest.approx((0.5, 0.5))
    assert mix.ks_step == pytest.approx((0.01 + 2 / 102 - 0.01) / 2)


@pytest.mark.parametrize("layout", Layout)
def test_what_a_wrong_cost_would_lose_is_what_these_plans_take_by_the_right_one(
    layout: Layout,
) -> None:
    trace = make_trace([20, 50, 90, 130, 400, 700, 1100, 2500] * 40)
    setting = make_setting(1.25, batch=32)
    plan = replace(
        setting.plan, cost=Quadratic(1, 1000), layout=layout, micro_batch_size=4,
        micro_batch_tokens=None,
    )  # fmt: skip
    setting = replace(setting, plan=plan, cost_errors=(1, 3))
    (run,) = simulate(trace, [setting], Scenario(steps=20))
    assert run.cost_errors["1"] == pytest.approx(run.excess)
    right = replace(setting, plan=replace(plan, cost=Quadratic(1, 3000)))
    (known,) = simulate(trace, [right], Scenario(steps=20))
    assert run.cost_errors["3"] > known.excess, "plans by the right cost wait less by it"
    linear = replace(setting, plan=replace(plan, cost=Quadratic(0, 1)))
    (run,) = simulate(trace, [linear], Scenario(steps=20))
    assert run.cost_errors["3"] == pytest.approx(run.excess), "all of it is larger then"


def test_a_bound_on_loss_tokens_keeps_the_weight_of_the_longest() -> None:
    """Of rare samples that cost more than a rank's share, and leave together where they may."""
    trace = make_trace([100] * 990 + [2000] * 10)
    weights = []
    for variation in (None, 0.25):
        setting = make_setting(1.5, batch=64)
        setting = replace(setting, plan=replace(setting.plan, max_step_variation=variation))
        (run,) = simulate(trace, [setting], Scenario(steps=200))
        weights.append(run.mix.long_weight)
        assert run.long_weight_expected == pytest.approx(1, abs=0.03)
    assert weights[0] < weights[1]
    assert weights[1] > 0.8 * 0.95
