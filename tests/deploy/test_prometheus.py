"""The Prometheus files are valid. Whether alerts fire when they should is asked in alerts/."""

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
    ],
    ids=" ".join,
)
def test_promtool_agrees(tool: Tool, folder: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [tool("promtool"), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
