"""`dispatcher simulate` as it is typed: lists, sources, files written, and mistakes in one line."""

import io
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.cli.problems import flag_of
from rollout_dispatcher.cli.simulate_options import (
    SimulateOptions,
    own_environment,
)
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.simulate.result import Result
from rollout_planner.types import Strategy
from tests.simulate.checker import check_books
from tests.support.recorded import write_record
from tests.support.simulated import result_of
from tests.support.traces import write_example_trace

SMALL = shlex.split("--dp-size 2 --global-batch-size 8 --micro-batch-size 2 --steps 3")


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPATCHER_CONFIG", "DISPATCHER_DP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_example_trace(Path("trace.csv.gz"))


def output_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def simulated(argv: str, capsys: pytest.CaptureFixture[str]) -> Result:
    return result_of(output_of(f"simulate {argv} {shlex.join(SMALL)} --json", capsys))


def test_by_default_all_strategies_and_several_windows_are_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = simulated("trace.csv.gz", capsys)
    rows = [(run.strategy, run.window) for run in result.runs]
    plain = [("round-robin", 1), ("greedy", 1), ("kk", 1)]
    assert rows == [*plain, *(("window", window) for window in (1, 1.25, 1.5, 2))]
    assert result.options["groups"] == "ignore"
    assert result.options["on_oversize"] == "alone"
    assert result.options["max_imbalance"] == 0


def test_lists_are_written_after_one_flag_and_the_trace_first_or_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = simulated("trace.csv.gz --window 1 1.5 --strategy window kk --recommend", capsys)
    assert [run.window for run in result.runs] == [1, 1, 1.5]
    result = simulated("--window 1 --window 1.5 --strategy kk --seed 1 trace.csv.gz", capsys)
    assert [run.strategy for run in result.runs] == ["kk"]
    assert result.options["window"] == [1, 1.5]


def test_splitting_is_a_row_of_its_own_beside_windows_and_in_the_recommendation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    budget = "--dp-size 4 --global-batch-size 8 --micro-batch-tokens 4096 --steps 3"
    argv = f"simulate trace.csv.gz {budget} --window 1 --max-split 4 --recommend"
    found = result_of(output_of(f"{argv} --json", capsys))
    assert [run.strategy for run in found.runs][-2:] == ["window", "split 4"]
    plain, split = found.runs[-2:]
    assert split.excess < plain.excess
    assert split.padding == pytest.approx(0)
    assert (split.ks, split.delay.max) == (plain.ks, 0)
    assert found.recommendation is not None
    assert "With --set max-split=4 and --window 1 it is" in found.recommendation.why
    assert "split: so many DP ranks may train a sample together" in output_of(argv, capsys)
    assert main(shlex.split(f"simulate trace.csv.gz {budget} --max-split 3")) == 2
    assert "max_split is 3; ranks share a sample by twos" in capsys.readouterr().err


def test_a_row_is_run_with_what_serve_would_be_run_with() -> None:
    options = SimulateOptions(
        dp_size=2, global_batch_size=100, micro_batch_tokens=4096, max_delay=9
    )
    ours = options.serve_config(Strategy.WINDOW, 1.15)
    theirs = ServeConfig(
        dp_size=2,
        global_batch_size=100,
        micro_batch_tokens=4096,
        max_delay=9,
        window=1.15,
        groups="ignore",
        on_oversize="alone",
    )
    assert (ours.window_samples, ours.skips_bound) == (115, 9)
    assert ours.plan_config() == theirs.plan_config()


def test_options_come_from_the_environment_and_a_file_but_not_serves_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPATCHER_WINDOW", "1, 3")
    monkeypatch.setenv("DISPATCHER_LISTEN", "0.0.0.0:7077")
    monkeypatch.setenv("DISPATCHER_CONFIG", "serve.toml")
    Path("sim.toml").write_text('strategy = ["window"]\nseed = 4')
    result = simulated("trace.csv.gz --config sim.toml", capsys)
    assert [run.window for run in result.runs] == [1, 3]
    assert result.options["seed"] == 4
    assert own_environment({"DISPATCHER_LISTN": "x"}) == {"DISPATCHER_LISTN": "x"}


SERVE_TOML = """
dp_size = 2
global_batch_groups = 4
micro_batch_tokens = 131072
window = 1.25
strategy = "window"
journal_dir = "/var/lib/dispatcher"
listen = ["0.0.0.0:7077"]
[advanced]
drain_timeout = "25s"
max_split = 2
"""


def test_a_file_of_serve_is_read_and_steps_of_whole_groups_are_forecast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("serve.toml").write_text(SERVE_TOML)
    argv = "simulate lineage --config serve.toml --group-size 8 --steps 3"
    found = result_of(output_of(f"{argv} --json --plans plans.jsonl", capsys))
    assert [(run.strategy, run.window) for run in found.runs] == [("window", 1.25), ("split 2", 1)]
    assert found.options["groups"] == "step"
    for line in map(json.loads, Path("plans.jsonl").read_text().splitlines()):
        chosen = [
            int(each.split("-")[1]) for rank in line["ranks"] for part in rank for each in part
        ]
        groups = Counter(row // 8 for row in chosen) if line["strategy"] == "window" else {}
        assert line["strategy"] != "window" or list(groups.values()) == [8] * 4
    assert "\n4 groups a step over 2 DP ranks" in output_of(argv, capsys)


def test_groups_that_a_trace_names_are_counted_whatever_their_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [1, 2, 3, 4, 5] * 8
    rows = [f"{name},{100 + name}" for name, size in enumerate(sizes) for _ in range(size)]
    Path("groups.csv").write_text("\n".join(["group,response_tokens", *rows]))
    shape = "--dp-size 2 --global-batch-groups 4 --group-size 5 --micro-batch-tokens 1000"
    command = f"simulate groups.csv {shape} --window 1 2 --steps 5 --json --plans plans.jsonl"
    output_of(command, capsys)
    for line in map(json.loads, Path("plans.jsonl").read_text().splitlines()):
        chosen = [
            int(each.split("-")[1]) for rank in line["ranks"] for part in rank for each in part
        ]
        groups = Counter(int(rows[row].split(",")[0]) for row in chosen)
        assert len(groups) == 4
        assert all(count == sizes[name] for name, count in groups.items())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            "journal_dri = 'x'\n",
            "serve.toml:1: unknown key journal_dri (did you mean journal_dir?)",
        ),
        ("drain_timeout = '1s'\n", "serve.toml:1: drain_timeout stands in the table [advanced]"),
        ("", "lineage names none; add --group-size N"),
    ],
)
def test_of_a_file_of_serve_only_what_cannot_be_meant_is_refused(
    changed: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SERVE_TOML if "drain" not in changed else SERVE_TOML.partition("[advanced]")[0]
    Path("serve.toml").write_text(f"{changed}{text}")
    assert main(shlex.split("simulate lineage --config serve.toml --steps 3")) == 2
    assert problem in capsys.readouterr().err


def test_the_help_names_every_default_that_differs_from_serve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out.partition("defaults differ:")[2]
    ours, theirs = SimulateOptions.model_fields, ServeConfig.model_fields
    both = ours.keys() & theirs.keys() - {"strategy"}  # a list here, with the same one in it
    differ = {name for name in both if ours[name].default != theirs[name].default}
    assert set(re.findall(r"^  --([a-z-]+)  ", shown, flags=re.MULTILINE)) == {
        name.replace("_", "-") for name in differ
    }


def test_json_says_what_was_asked_and_the_plans_can_be_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = simulated("lineage --seed 3 --plans plans.jsonl --max-delay 5", capsys)
    assert result.options["trace"] == "lineage"
    assert result.options["max_delay"] == 5
    lines = Path("plans.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert list(first) == ["step", "window", "strategy", "arrived", "ranks", "skips", "dropped"]
    accounts = check_books(Path("plans.jsonl"), dict.fromkeys(range(32_768), 1), max_skips=5)
    assert len(accounts) == len(result.runs)
    for run, account in zip(result.runs, accounts.values(), strict=True):
        assert [account.delays[k] for k in range(len(run.delays))] == run.delays


def test_the_recommended_window_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output_of(f"simulate trace.csv.gz {shlex.join(SMALL)} --recommend", capsys)
    assert "\nRun --window " in shown
    result = simulated("trace.csv.gz --recommend", capsys)
    assert result.recommendation is not None
    assert " ".join(result.recommendation.why.split()) in " ".join(shown.split())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_is_one_line_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(Path("record"))
    for source, begins in ("trace.csv.gz", "round-robin, window 1"), ("record", "reading record"):
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["simulate", source, *SMALL]) == 0
        shown, *_ = terminal.getvalue().partition("dispatcher simulate: ")
        assert f"%  {begins}" in shown
        assert "\n" not in shown
        assert shown.endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("argv", "fact"),
    [
        ("nowhere.csv", "no trace file nowhere.csv"),
        ("trace.csv.gz other.csv", "unknown argument other.csv"),
        ("trace.csv.gz --windw 2", "--window"),
        ("trace.csv.gz --window 0.5", "--window"),
        ("trace.csv.gz --window 1 two", "--window"),
        ("trace.csv.gz --window", "--window"),
        ("trace.csv.gz --strategy magic", "--strategy"),
        ("trace.csv.gz --max-delay 0 --window 2", "max_delay"),
        ("trace.csv.gz --micro-batch-tokens 100", "--micro-batch-tokens"),
        ("trace.csv.gz --cost magic", "magic"),
        ("trace.csv.gz --steps 0", "--steps"),
        ("trace.csv.gz --run 7", "no such run"),
        ("lineage --arrivals trace", "--arrivals steady"),
        ("trace.csv.gz --strategy kk --recommend", "--strategy window"),
        ("trace.csv.gz --html r.html", "unknown argument --html"),
        ("trace.csv.gz --plans .", "cannot be written"),
        ("trace.csv.gz --groups step --global-batch-size 2 --micro-batch-size 1", "--global-b"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, *rest = shlex.split(argv)
    assert main(["simulate", source, *SMALL, *rest]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert fact in lines[0]


def test_without_a_trace_it_says_what_could_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL]) == 2
    assert "dispatcher simulate lineage" in capsys.readouterr().err


def test_the_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    assert all(flag_of(name)[2:] in shown for name in SimulateOptions.model_fields)
    assert "usage: dispatcher simulate TRACE|DIR --dp-size N" in shown


def examples(root: Path) -> list[str]:
    """Commands in the manual."""
    text = (root / "docs" / "operate.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [part.replace("\\\n", " ").partition("\n")[0] for part in parts]


def test_every_command_in_the_manual_works(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(Path("DIR"))
    commands = examples(root)
    assert len(commands) >= 5
    for command in commands:
        program, *argv = shlex.split(command.partition(" > ")[0])
        assert program == "dispatcher"
        assert main(argv) == 0, command
        out = capsys.readouterr().out
        if target := command.partition(" > ")[2]:
            Path(target).write_text(out)
