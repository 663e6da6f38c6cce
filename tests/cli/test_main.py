"""The command: exit codes, one-line errors, and help that shows what can be done."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollout_dispatcher import __version__
from rollout_dispatcher.cli.main import COMMANDS, main
from rollout_dispatcher.cli.options import is_advanced, metavar, unit_of
from rollout_dispatcher.cli.problems import flag_of
from rollout_dispatcher.cli.simulate_options import SimulateOptions
from rollout_dispatcher.service.config.serve import ServeConfig
from tests.support.options import FIXED, OPTIONS
from tests.support.words import OWN_WORDS

NEEDED = ["--dp-size", "2", "--global-batch-size", "8", "--micro-batch-size", "2"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPATCHER_CONFIG", raising=False)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"dispatcher {__version__}"


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"usage: dispatcher {command}" in capsys.readouterr().out


def test_the_help_of_serve_shows_what_most_runs_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    flags = re.findall(r"^  (--[\w-]+) [A-Za-z]", shown, re.MULTILINE)
    assert flags[:5] == [
        "--config", "--set", "--dp-size", "--global-batch-size", "--micro-batch-tokens",
    ]  # fmt: skip
    assert len(flags) == 2 + 30
    assert len(shown.splitlines()) <= 110
    assert "[2s]" in shown
    assert "max-frame-bytes" not in shown


def test_every_option_and_its_default_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in OPTIONS.items():
        flag = flag_of(name)
        assert (
            f"{flag[2:]}={metavar(name, field)}: " in shown if is_advanced(field) else flag in shown
        )
    assert "[256MiB]" in shown
    assert not any(flag_of(name) in shown for name in FIXED)


#: Words with which no help text begins.
NO_BEGINNING = re.compile(
    r"(what|which|whether|who|how|where|when|once|as|in|of|at|on|with|for|the|an?|its?|this|these)\b"
)


@pytest.mark.parametrize("model", [ServeConfig, SimulateOptions])
def test_help_begins_with_a_noun_or_a_verb_in_the_fields_words_and_names_its_unit(
    model: type[BaseModel],
) -> None:
    for name, field in model.model_fields.items():
        text = " ".join((field.description or "").split())
        assert not OWN_WORDS.search(text), (name, text)
        assert not NO_BEGINNING.match(text), (name, text)
        if unit_of(field) is not None:
            assert re.search(r"\b(time|seconds|bytes)\b", text), (name, text)


def test_there_are_45_flags_at_most() -> None:
    assert 2 + len([field for field in OPTIONS.values() if not is_advanced(field)]) <= 45


@pytest.mark.parametrize(
    ("argv", "fact"),
    [
        (["srve"], "serve"),
        (["gc"], "unknown command gc (it was removed: what killed producers leave"),
        (["--verbose"], "unknown option --verbose"),
        (["serve"], "--dp-size is required"),
        (["serve", *NEEDED, "--widow", "2"], "--window"),
        (["check-config", *NEEDED, "--buffer-capacity", "3"], "window of 12"),
        (["wait-ready", "--timeout", "soon"], "--timeout soon"),
        (["wait-ready", "--http", "9471"], "host:port"),
    ],
)
def test_a_mistake_is_exit_code_2_and_each_is_a_line(
    argv: list[str], fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("dispatcher: ") for line in lines)
    assert fact in lines[0]


def test_a_checked_config_can_be_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ["--max-wait", "100ms", "--listen", "unix:/a.sock", "--set", "rank-tokens=5000"]
    assert main(["check-config", *NEEDED, *changed]) == 0
    first = capsys.readouterr().out
    assert 'max_wait = "100ms"  # --max-wait\n' in first
    assert "window = 1.5  # default\n" in first
    assert "rank_tokens = 5000  # --set rank-tokens\n" in first.partition("\n[advanced]\n")[2]
    (tmp_path / "serve.toml").write_text(first)
    assert main(["check-config", "--config", str(tmp_path / "serve.toml")]) == 0
    second = capsys.readouterr().out
    assert _settings(second) == _settings(first)


def _settings(shown: str) -> list[str]:
    return [line.partition("  #")[0] for line in shown.splitlines()]


BLOCKS_AS_PLANNED = ["--set", "max-split=2", "--set", "micro-batch-order=as-planned"]


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (["--dp-size", "1"], "neither split nor window saves time"),
        (["--dp-size", "8", "--micro-batch-size", "1"], "only the window"),
        (
            ["--dp-size", "8", "--micro-batch-tokens", "99", "--window", "1"],
            "no window is set",
        ),
        (["--strategy", "kk"], "--strategy kk takes the oldest"),
        (["--layout", "padded", "--micro-batch-size", "1"], "are not padded"),
        (
            ["--micro-batch-tokens", "99", "--set", "max-split=2"],
            "a window of 1.5 is not chosen from",
        ),
        (
            ["--micro-batch-tokens", "99", "--window", "1", "--sync", "step", *BLOCKS_AS_PLANNED],
            "the micro-steps with blocks come first",
        ),
        ([], None),
        (["--dp-size", "1", "--layout", "padded"], None),
    ],
)
def test_check_config_says_what_cannot_help(
    flags: list[str], note: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["--window", "1.5", *flags]
    needed = {"--dp-size": "2", "--global-batch-size": "8"}
    if "--micro-batch-tokens" not in flags:
        needed["--micro-batch-size"] = "2"
    argv += [word for name, value in needed.items() if name not in argv for word in (name, value)]
    assert main(["check-config", *argv]) == 0
    printed = capsys.readouterr().out
    notes = [line for line in printed.splitlines() if line.startswith("# note: ")]
    assert (note is None and not notes) or (
        len(notes) == 1 and note is not None and note in notes[0]
    )
    (tmp_path / "serve.toml").write_text(printed)
    assert main(["check-config", "--config", str(tmp_path / "serve.toml")]) == 0


def test_the_command_is_installed_and_survives_a_reader_that_leaves() -> None:
    command = (
        f"{sys.executable} -m rollout_dispatcher.cli.main check-config {' '.join(NEEDED)} | head -1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("# steps\n", "")


SIMULATED = ["simulate", "azure-code", *NEEDED, "--steps", "3", "--json"]


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["check-config", *NEEDED], SIMULATED])
def test_output_that_cannot_be_written_is_a_failure(argv: list[str]) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rollout_dispatcher.cli.main", *argv],
            check=False, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered,
        )  # fmt: skip
    assert done.stderr == f"dispatcher {argv[0]}: [Errno 28] No space left on device\n"
    assert done.returncode == 1


def test_a_config_is_checked_as_json_with_all_that_is_wrong_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check-config", "--json", *NEEDED, "--max-wait", "5s"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["valid"]
    assert found["options"]["max_wait"] == {"value": 5.0, "source": "--max-wait"}
    assert found["options"]["layout"]["source"] == "default"
    assert found["options"]["buffer_capacity"] == {"value": 12, "source": "derived"}
    wrong = ["--layout", "x", "--listen", "::1:7077", "--http", "fe80::1"]
    assert main(["check-config", *NEEDED, *wrong, "--json"]) == 2
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert not found["valid"]
    assert [problem.partition(" ")[0] for problem in found["problems"]] == wrong[::2]
    assert all("in brackets" in problem for problem in found["problems"][1:])
    assert shown.err.splitlines() == [f"dispatcher: {text}" for text in found["problems"]]
