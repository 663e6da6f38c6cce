"""A recorded run as its users look at it: simulated again, as a page, as a trace."""

import re
from pathlib import Path

import numpy as np
import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.cli.simulate_options import own_setting
from rollout_dispatcher.core.measuring.times import Pass
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.simulate import table
from rollout_dispatcher.simulate.page import page
from rollout_dispatcher.simulate.recorded import as_it_ran, rank_shares, slowness, trainer_load
from rollout_planner.cost import Quadratic, parse_cost
from tests.support.recorded import RANKS, SLOW_RANK, SPEED, STEPS, write_record
from tests.support.simulated import result_of


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "record"
    write_record(folder)
    return folder


def lost_on_the_clock(record: Path) -> float:
    """Straggler excess over all steps, from how long they took and what ranks computed."""
    steps = load_recording(record).trained()
    took = sum((step.committed or 0.0) - step.taken[0] for step in steps)
    compute = [step.measured["update"].compute(RANKS) for step in steps]
    return took / sum(float(each.sum()) / RANKS for each in compute if each is not None) - 1


def test_where_half_of_the_ranks_are_slow_it_is_these_as_in_metrics(record: Path) -> None:
    steps = load_recording(record).trained()
    for step in steps:
        step.measured = {"update": Pass()}
        for rank, cost in enumerate(step.cost):
            took = SPEED * cost * (1.4 if rank % 2 else 1.0)
            step.measured["update"].report(rank, took.tolist(), [0.0] * len(took))
    assert slowness(steps) == pytest.approx(np.array([1.0, 1.4, 1.0, 1.4]))


def test_how_it_ran_is_what_was_planned_and_what_the_clocks_say(record: Path) -> None:
    recording = load_recording(record)
    found = as_it_ran(recording, own_setting(recording))
    steps = recording.trained()
    assert found.run.steps == found.measured_steps == STEPS
    even = sum(float(step.cost.sum()) / RANKS for step in steps)
    planned = sum((1 + step.excess) * float(step.cost.sum()) / RANKS for step in steps)
    assert found.run.excess == pytest.approx(planned / even - 1)
    assert found.measured == pytest.approx(lost_on_the_clock(record), rel=0.02)
    assert found.measured is not None
    assert found.measured > found.run.excess
    assert found.run.timing is not None
    assert found.run.dropped == {"stale": 1}


def test_the_rank_that_others_wait_for_is_seen(record: Path) -> None:
    recording = load_recording(record)
    shares = rank_shares(recording, recording.trained(), own_setting(recording))
    assert all(share.measured_steps == share.steps == STEPS for share in shares)
    assert min(shares, key=lambda share: share.stragglers).rank == SLOW_RANK
    assert all(sum(share.shares) <= 1.001 for share in shares)
    assert [share.data for share in shares] == pytest.approx([0.12 * (STEPS - 1)] * RANKS, abs=0.2)


def test_the_trainer_is_as_fast_as_it_was(record: Path) -> None:
    recording = load_recording(record)
    setting = own_setting(recording)
    load = trainer_load(recording, setting)
    samples = list(recording.samples.values())
    cost = float(setting.plan.cost(np.array([sample.tokens for sample in samples])).sum())
    span = max(sample.at for sample in samples) - min(sample.at for sample in samples)
    assert load is not None
    assert load * span * RANKS / cost == pytest.approx(1.2 * SPEED, rel=0.25)


def test_costs_that_were_recorded_in_other_units_are_converted(
    record: Path, tmp_path: Path
) -> None:
    """A fit replaces the cost that auto begins with, and its units, in mid-run."""
    write_record(tmp_path, cost="auto:tokens")
    usual, other = load_recording(record), load_recording(tmp_path)
    load = trainer_load(other, own_setting(other))
    assert load == pytest.approx(trainer_load(usual, own_setting(usual)), rel=0.1)
    ran, expected = (as_it_ran(each, own_setting(each)).run for each in (other, usual))
    assert ran.padding == pytest.approx(0)
    assert ran.excess == pytest.approx(expected.excess, rel=0.1)


def test_simulate_takes_the_record_with_its_own_options(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(record), "--json", "--recommend"]) == 0
    result = result_of(capsys.readouterr().out)
    assert result.recorded is not None
    assert result.recorded.run.strategy == "as it ran"
    assert result.options["dp_size"] == RANKS
    assert result.options["arrivals"] == "trace"
    assert result.trace.samples == STEPS * 8
    assert {run.window for run in result.runs} == {1, 1.25, 1.5, 2}
    assert result.recommendation is not None
    assert "for each other and" in result.recommendation.why
    assert result_of(result.to_json()) == result


def test_calibrate_says_what_a_record_cost(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(record)]) == 0
    option, fitted, lost = capsys.readouterr().out.splitlines()
    cost = parse_cost(option.removeprefix("--cost "))
    assert isinstance(cost, Quadratic)
    assert cost.b / cost.a == pytest.approx(24576, rel=0.1)
    assert fitted.startswith(f"fitted to {STEPS} steps; typical residual of a micro-batch ")
    assert lost.endswith("has lost 0.0% of the ranks' time by it")
    assert main(["simulate", str(record), *option.split(), "--steps", "2", "--json"]) == 0


def test_a_cost_that_was_fitted_as_it_ran_is_simulated_as_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, cost="auto:tokens")
    assert main(["calibrate", str(tmp_path)]) == 0
    fitted = capsys.readouterr().out.splitlines()[0].removeprefix("--cost ")
    asked: tuple[tuple[list[str], str], ...] = (([], fitted), (["--cost", "tokens"], "tokens"))
    for flags, expected in asked:
        assert main(["simulate", str(tmp_path), "--steps", "12", "--json", *flags]) == 0
        said = capsys.readouterr()
        assert result_of(said.out).options["cost"] == expected
        assert ("without --cost" in said.err) == (not flags), "what is given is not fitted"


def test_calibrate_says_of_a_record_without_times_that_it_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, measured=False)
    assert main(["calibrate", str(tmp_path)]) == 1
    assert "of 12 steps 0 were measured, which is too little" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path), "--steps", "2"]) == 0
    assert "the one that auto begins with, as 0 measured steps" in capsys.readouterr().err


def test_of_several_runs_the_one_that_is_named_has_its_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, run="first", sync="step")
    write_record(tmp_path, run="second", sync="micro-step")
    for run, sync in ("first", "step"), ("second", "micro-step"):
        assert main(["simulate", str(tmp_path), "--run", run, "--json", "--steps", "2"]) == 0
        assert result_of(capsys.readouterr().out).options["sync"] == sync


def test_no_bound_is_below_the_work_itself(tmp_path: Path) -> None:
    """Records round bounds: one may be a hair below what even ranks would take."""
    write_record(tmp_path)
    recording = load_recording(tmp_path)
    for step in recording.trained():
        step.lower_bound = float(f"{step.lower_bound:.9g}") * (1 - 1e-9)
    assert as_it_ran(recording, own_setting(recording)).run.lower_bound == 0


def test_the_table_knows_no_negative_zero() -> None:
    assert [table.percent(ratio) for ratio in (-1e-9, 0.0, -0.012)] == ["0.00", "0.00", "-1.20"]


def test_the_table_begins_with_how_it_ran(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(record), "--steps", "3", "--window", "1"]) == 0
    shown = capsys.readouterr().out
    rows = shown.split("---\n")[1].splitlines()
    assert rows[0].startswith("as it ran")
    assert "as it ran: excess by that time's cost and speeds" in shown
    assert re.search(
        r"as it ran: 3 steps from 2023-11-14 22:13 UTC; excess planned .* measured", shown
    )


def test_a_run_that_is_not_there_is_named(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(record), "--run", "another"]) == 2
    assert "no such run" in capsys.readouterr().err
    assert main(["report", str(record), "--run", "made", "-o", str(record / "r.html")]) == 0


def test_the_report_says_of_how_many_steps_ranks_told(record: Path) -> None:
    recording = load_recording(record)
    recording.trained()[0].measured.clear()
    shown = page(recording, own_setting(recording))
    assert f"As ranks measured it in {STEPS - 1} of {STEPS} steps." in shown


@pytest.mark.parametrize("measured", [True, False])
def test_the_report_says_what_was_measured_and_what_was_not(tmp_path: Path, measured: bool) -> None:
    write_record(tmp_path / "record", measured=measured)
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "record"), "-o", str(report)]) == 0
    text = report.read_text()
    slow = f"DP rank {SLOW_RANK} is slower than the others: for the same planned cost it takes 1.40"
    assert (slow in text) == measured
    assert ("No rank reported how long" in text) != measured
    for words in ("over time?", "<th>window", "dropped: stale"):
        assert words in text
    assert ("Who waits for whom?" in text) == measured
    assert "nan" not in text
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
