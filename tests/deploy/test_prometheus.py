"""The Prometheus files are valid, and the alerts fire when they should and only then."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[[str], str]


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "deploy" / "prometheus"


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_agrees(tool: Tool, folder: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [tool("promtool"), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested(folder: Path) -> None:
    alerts = re.findall(r"alert: (\w+)", (folder / "alerts.yml").read_text())
    tested = re.findall(r"alertname: (\w+)", (folder / "alerts_test.yml").read_text())
    assert alerts
    assert set(alerts) == set(tested)
