"""A running dispatcher is given other settings by its file and SIGHUP, all of them or none."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import SMALL
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess, eventually


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


def serve(tmp_path: Path, file: Path, text: str) -> ServeProcess:
    """With these lines in its file, and without flags for what stands there."""
    file.write_text(text)
    named = {"window", "max_wait"}
    flags: dict[str, Any] = {name: value for name, value in SMALL.items() if name not in named}
    return ServeProcess(tmp_path, warm=True, **flags, config=file)


def reload(server: ServeProcess, file: Path, text: str, said: str) -> dict[str, Any]:
    """Have it read this, and say that; the settings in force."""
    file.write_text(text)
    server.send_signal(signal.SIGHUP)
    eventually(lambda: said in server.log(), said)
    found: dict[str, Any] = server.status()["config"]
    return found


def test_a_window_that_is_read_is_the_next_plans_and_is_seen_everywhere(
    tmp_path: Path, file: Path
) -> None:
    others = "max_wait = '10m'\nmax_imbalance = 0\n"
    with serve(tmp_path, file, others + "window = 3") as server:
        producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
        producer.push([3, 9, 4, 17, 31, 5])
        server.await_status(buffered=6, open_steps=0)
        said = "SIGHUP: window 3.0 -> 1.5, buffer_capacity 12 -> 6, from the next plan on"
        assert reload(server, file, others + "window = 1.5", said)["window"] == 1.5
        assert trainer.train()
        scraped = server.scrape()
        assert server.status()["config_generation"] == scraped["config_generation"] == 1
        assert (scraped["window_samples"], scraped["buffer_capacity_samples"]) == (6, 6)
        assert scraped["config_reloads_total{outcome=changed}"] == 1
        assert 'window="1.5"' in server.get("/metrics").text
        reload(server, file, others + "window = 1.5", "nothing changes; flags win over the envi")
        assert server.scrape()["config_reloads_total{outcome=unchanged}"] == 1


def test_what_cannot_be_changes_nothing(tmp_path: Path, file: Path) -> None:
    with serve(tmp_path, file, "max_wait = '300ms'") as server:
        again = partial(reload, server, file)
        before = server.status()["config"]
        assert again("max_wait = '1s'\nmax_delay = -3", "max_delay = -3: it must be") == before
        both = "max_wait = '400ms'\nadvanced.producer_credits = 2"
        assert again(both, f"producer_credits needs a restart (8 -> 2, {file}:2)") == before
        assert again("window = 4\nmax_delay = 1", "max_delay is 1") == before
        assert server.scrape()["config_reloads_total{outcome=refused}"] == 3
