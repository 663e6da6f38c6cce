"""The unit is one that systemd takes without a word, and that suits what it starts."""

import configparser
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_dispatcher.service.config.serve import ServeConfig

Tool = Callable[[str], str]
PROGRAM = "/opt/rollout-dispatcher/bin/dispatcher"


@pytest.fixture
def unit(root: Path) -> str:
    return (root / "deploy" / "systemd" / "rollout-dispatcher.service").read_text()


def test_systemd_has_nothing_to_say_about_it(unit: str, tool: Tool, tmp_path: Path) -> None:
    assert unit.count(PROGRAM) == 2
    here = tmp_path / "rollout-dispatcher.service"
    here.write_text(unit.replace(PROGRAM, str(Path(sys.executable).parent / "dispatcher")))
    verify = [tool("systemd-analyze"), "verify", str(here)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_waits_longer_than_a_drain_and_restarts_no_wrong_config(unit: str) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    service = parser["Service"]
    drain = ServeConfig.model_fields["drain_timeout"].default
    assert float(service["TimeoutStopSec"].removesuffix("s")) > drain + 10
    assert service["ExecStartPost"].startswith(f"{PROGRAM} wait-ready ")
    assert service["RestartPreventExitStatus"] == "2"
