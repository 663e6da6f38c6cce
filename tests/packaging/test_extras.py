"""Where an extra is not installed, who needs it is told which."""

import subprocess
import sys

import pytest

from tests.support.source import ROOT

#: Without torch: Python takes None among the modules for "cannot be imported".
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import rollout_workers as w; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH + code]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["MicroBatch", "MicroBatchStream", "Step"])
def test_what_needs_torch_names_the_extra(name: str) -> None:
    last = run(f"w.{name}").stderr.splitlines()[-1]
    remedy = "pip install 'rollout-dispatcher[workers]'"
    assert last.startswith(f"ImportError: {name} needs torch, ")
    assert last.endswith(remedy)


@pytest.mark.parametrize("name", ["Credentials", "RankClient", "RolloutProducer", "RolloutSample"])
def test_what_does_not_need_it_comes_without(name: str) -> None:
    assert run(f"w.{name}").returncode == 0
