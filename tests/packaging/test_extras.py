"""Where an extra is not installed, who needs it is told which."""

import subprocess
import sys

import pytest

from tests.support.source import ROOT

#: Without torch: Python takes None among the modules for "cannot be imported".
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import rollout_workers as w; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["MicroBatch", "MicroBatchStream", "Step"])
def test_what_needs_torch_names_the_extra(name: str) -> None:
    last = run(f"{WITHOUT_TORCH}w.{name}").stderr.splitlines()[-1]
    remedy = "pip install 'rollout-dispatcher[workers]'"
    assert last.startswith(f"ImportError: {name} needs torch, ")
    assert last.endswith(remedy)


WITHOUT_SERVER = "import sys; sys.modules |= {'aiohttp': None, 'prometheus_client': None}; "
NEEDS_SERVER = (
    "needs prometheus_client, which is not installed here; install it with "
    "pip install 'rollout-dispatcher[server]'"
)


def test_the_client_comes_without_the_servers_libraries() -> None:
    code = WITHOUT_SERVER + "import rollout_workers as w; [getattr(w, name) for name in w.__all__]"
    assert run(code).returncode == 0


@pytest.mark.parametrize("command", ["check-config", "simulate", "calibrate", "top", "wait-ready"])
def test_what_asks_and_simulates_comes_without_them(command: str) -> None:
    code = f"from rollout_dispatcher.cli.main import main; main(['{command}', '--help'])"
    assert run(WITHOUT_SERVER + code).returncode == 0


def test_to_serve_names_the_extra() -> None:
    asked = "from rollout_dispatcher import Dispatcher"
    last = run(WITHOUT_SERVER + asked).stderr.splitlines()[-1]
    assert last == f"ImportError: Dispatcher {NEEDS_SERVER}"
    options = "'--dp-size=1', '--global-batch-size=1', '--micro-batch-size=1'"
    main = f"from rollout_dispatcher.cli.main import main; sys.exit(main(['serve', {options}]))"
    done = run(WITHOUT_SERVER + main)
    assert (done.returncode, done.stderr) == (2, f"dispatcher: serve {NEEDS_SERVER}\n")


@pytest.mark.parametrize("name", ["Credentials", "RankClient", "RolloutProducer", "RolloutSample"])
def test_what_does_not_need_it_comes_without(name: str) -> None:
    assert run(f"{WITHOUT_TORCH}w.{name}").returncode == 0
