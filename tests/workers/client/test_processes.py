"""A client belongs to the process that made it; forks and DataLoader workers are told at once."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from tests.support.source import PYTHONPATH
from tests.workers.support.peers import Peer, ScriptedDispatcher

#: Importing torch twice, the second time in a spawned worker, is most of it.
PATIENCE_S = 60.0


@pytest.fixture
def start(dispatcher: ScriptedDispatcher) -> Callable[[str], Future[Any]]:
    """Starts a case of `processes.py`; the future is what it printed."""

    def run(case: str) -> Any:
        script = Path(__file__).parents[1] / "support" / "processes.py"
        command = [sys.executable, str(script), case, dispatcher.endpoint]
        environ = os.environ | {"PYTHONPATH": PYTHONPATH, "PYTHONASYNCIODEBUG": "0"}
        done = subprocess.run(
            command, check=True, capture_output=True, timeout=PATIENCE_S, env=environ
        )
        return json.loads(done.stdout)

    return lambda case: dispatcher.meanwhile(run, case)


def give_one_step(peer: Peer) -> None:
    peer.give(0, [5, 6])
    peer.send(m.End(reason=EndReason.ENDED))


def let_go(peer: Peer) -> None:
    peer.wait_for(m.Bye, PATIENCE_S)
    peer.send(m.Bye())
    peer.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_stream_made_before_a_loader_with_workers_is_refused_there_and_unharmed_here(
    context: str, dispatcher: ScriptedDispatcher, start: Callable[[str], Future[Any]]
) -> None:
    running = start(f"before-{context}")
    peer = dispatcher.accept(PATIENCE_S)
    peer.welcome_rank()
    give_one_step(peer)
    let_go(peer)
    told = running.result(PATIENCE_S)
    assert "ConfigError" in told["loader"]
    assert "num_workers=0" in told["loader"]
    assert told["own"] == [[[5, 6]]]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_stream_made_in_a_loaders_worker_is_refused_before_it_connects(
    context: str, start: Callable[[str], Future[Any]]
) -> None:
    told = start(f"inside-{context}").result(PATIENCE_S)
    assert "ConfigError" in told["loader"]
    assert "num_workers=0" in told["loader"]


def test_a_forked_child_is_refused_by_a_ranks_client_and_the_parent_goes_on(
    dispatcher: ScriptedDispatcher, start: Callable[[str], Future[Any]]
) -> None:
    running = start("rank")
    peer = dispatcher.accept(PATIENCE_S)
    peer.welcome_rank()
    give_one_step(peer)
    assert peer.wait_for(m.Commit, PATIENCE_S).step == 0
    let_go(peer)
    told = running.result(PATIENCE_S)
    *refused, closed = told["child"]
    assert all(text.startswith("ConfigError: ") and "forked" in text for text in refused)
    assert closed is None
    assert told["own"] == 1


@pytest.mark.parametrize("kind", ["producer", "async-producer"])
def test_a_forked_child_is_refused_by_a_producer_and_the_parent_goes_on(
    kind: str, dispatcher: ScriptedDispatcher, start: Callable[[str], Future[Any]]
) -> None:
    running = start(kind)
    peer = dispatcher.accept(PATIENCE_S)
    peer.welcome_producer()
    peer.answer(peer.expect(m.Push, PATIENCE_S))
    peer.acknowledge_bye()
    told = running.result(PATIENCE_S)
    *refused, closed = told["child"]
    assert all(text.startswith("ConfigError: ") and "forked" in text for text in refused)
    assert all("make one in each process that pushes" in text for text in refused)
    assert not any("DataLoader" in text or "prefetch_steps" in text for text in refused)
    assert closed is None
    assert told["own"] == "accepted"


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("stream", "num_workers=0"),
        ("rank", "num_workers=0"),
        ("producer", "make one in each process that pushes"),
    ],
)
def test_a_client_cannot_be_sent_to_another_process(
    kind: str, remedy: str, dispatcher: ScriptedDispatcher
) -> None:
    client, _ = getattr(dispatcher, kind)()
    with pytest.raises(ConfigError, match=rf"another process.*{remedy}"):
        pickle.dumps(client)


@pytest.mark.parametrize("client", ["RolloutProducer(at)", "RankClient(at, dp_rank=0, dp_size=1)"])
def test_an_interpreter_exits_with_a_client_left_open_and_without_torch(
    client: str, dispatcher: ScriptedDispatcher
) -> None:
    code = (
        "import sys; from rollout_workers import RankClient, RolloutProducer; "
        f"at = sys.argv[1]; kept = {client}; assert 'torch' not in sys.modules"
    )
    running = dispatcher.meanwhile(
        subprocess.run, [sys.executable, "-c", code, dispatcher.endpoint], timeout=20, check=True
    )
    peer = dispatcher.accept()
    peer.welcome()
    peer.acknowledge_bye()
    running.result(20)
