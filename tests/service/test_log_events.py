"""The life of a dispatcher in its log, line by line: what happened in a word, of which run."""

import json
import signal
from pathlib import Path
from typing import Any

from tests.service.conftest import SMALL
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess, eventually


def events(server: ServeProcess) -> list[dict[str, Any]]:
    """Every line so far."""
    return [json.loads(line) for line in server.log().splitlines()]


def named(server: ServeProcess, event: str) -> dict[str, Any]:
    """The line of this event, once it is there."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [line for line in events(server) if line["event"] == event]
        return bool(found)

    eventually(is_there, event)
    return found[0]


def test_start_settings_stop_and_restart_are_events_of_one_run(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("max_wait = '5s'\n")
    options = {name: value for name, value in SMALL.items() if name != "max_wait"}
    options |= {"config": config, "journal_dir": tmp_path / "journal"}
    with ServeProcess(tmp_path, **options) as server:
        run = named(server, "serving")["run_id"]
        assert named(server, "journal-empty")["run_id"] == run
        with Producer(server.endpoint, "p") as producer:
            producer.push([3, 9])
        for text, event in (
            ("max_wait = '1s'\n", "settings-changed"),
            ("max_wait = '1s'\n\n", "settings-unchanged"),
            ("max_open_steps = 2\n", "settings-refused"),
        ):
            config.write_text(text)
            server.send_signal(signal.SIGHUP)
            assert named(server, event)["run_id"] == run
        server.send_signal(signal.SIGUSR1)
        assert named(server, "state")["step"] == -1
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        stopping = named(server, "stopping")
        assert (stopping["run_id"], stopping["step"]) == (run, -1)
        assert "2 samples buffered" in stopping["message"]
        assert all(line["event"] for line in events(server))
    config.write_text("max_wait = '5s'\n")
    with ServeProcess(tmp_path, **options) as server:
        restored = named(server, "journal-restored")
        assert (restored["run_id"], restored["step"]) == (run, 0)
        assert named(server, "serving")["run_id"] == run


def test_a_drain_is_an_event_and_its_end_too(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, **SMALL) as server:
        with Producer(server.endpoint, "p") as producer, Trainer(server.endpoint, 2) as trainer:
            producer.push([3, 9, 4, 17])
            assert trainer.train()
            server.send_signal(signal.SIGTERM)
            draining = named(server, "draining")
            assert draining["run_id"] == named(server, "serving")["run_id"]
            for rank in trainer.ranks:
                assert rank.await_end() == "drained"
            trainer.bye()
        assert server.wait() == 0
        assert named(server, "drained")["step"] == 0
        assert all(line["event"] for line in events(server))
