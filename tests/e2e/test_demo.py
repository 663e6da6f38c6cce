"""The demo as users run it: real processes, every sample trained on, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_dispatcher.cli.demo.report import table

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
STRATEGIES = ["round-robin", "kk", "window"]


def command(out: Path) -> list[str]:
    # A second is less than the fewest steps take: the shortest demo there is.
    demo = [sys.executable, "-m", "rollout_dispatcher.cli.main", "demo"]
    return [*demo, "--seconds", "1s", "--out", str(out)]


def marked(out: Path) -> dict[str, str]:
    """An environment that the demo and all that it starts can be recognised by."""
    return os.environ | {"DEMO_TEST": str(out)}


def processes_of(out: Path) -> list[int]:
    """Live processes that were started by the demo with this mark."""
    mark = f"DEMO_TEST={out}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or not ours
    return found


def wait_until_none_is_left(out: Path) -> None:
    """Bounded by the test's timeout; ranks notice that their lifeline is gone by themselves."""
    while processes_of(out):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo that has run, and what it printed."""
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        command(out), env=marked(out), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_every_strategy_trains_on_every_sample_once_and_the_model_learns(
    finished: tuple[Path, str],
) -> None:
    results = json.loads((finished[0] / "demo.json").read_text())
    load = results["load"]
    assert list(results["strategies"]) == STRATEGIES
    for figures in results["strategies"].values():
        assert (figures["steps"], figures["tokens"]) == (load["steps"], load["tokens"])
        assert 0 < figures["wait_share"] < 1
        assert figures["tokens_per_second"] > 0
        assert len(figures["wait_share_per_rank"]) == 2
        assert figures["final_loss"] < figures["first_loss"]
    # Planned imbalance depends on lengths alone; what ranks then wait depends on the machine.
    lost = {name: run["lost_planned"] for name, run in results["strategies"].items()}
    assert lost["window"] < lost["round-robin"] / 2


def test_the_table_shows_every_figure_of_every_strategy(finished: tuple[Path, str]) -> None:
    folder, shown = finished
    results = json.loads((folder / "demo.json").read_text())
    assert all(strategy in shown for strategy in STRATEGIES)
    headline, rows = shown.split(table(results))[:2]
    assert "ranks wait for each other" in headline
    assert "written" in rows
    assert max(map(len, [*headline.splitlines(), *table(results).splitlines()])) <= 80


def test_a_finished_demo_leaves_nothing_running(finished: tuple[Path, str]) -> None:
    wait_until_none_is_left(finished[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        command(tmp_path), env=marked(tmp_path), stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if ": step " in line:
                break
        assert len(processes_of(tmp_path)) > 5
        demo.send_signal(number)
        demo.communicate()
    assert demo.returncode == 128 + number
    wait_until_none_is_left(tmp_path)
