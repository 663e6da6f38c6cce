"""A running dispatcher is given other settings: over HTTP, and by its file and SIGHUP."""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import SMALL, Serve
from tests.support.client import Producer, Trainer
from tests.support.server import Response, ServeProcess, eventually


def post(server: ServeProcess, **values: object) -> Response:
    return server.post("/v1/config", json.dumps(values).encode())


def options(server: ServeProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/config").json["options"]
    return found


def logged(server: ServeProcess, said: str) -> bool:
    return said in server.log()


def test_a_posted_window_is_the_next_plans_and_is_seen_everywhere(serve: Serve) -> None:
    server = serve(window=3, max_wait="10m", max_imbalance=0)
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 9, 4, 17, 31, 5])
    server.await_status(buffered=6, open_steps=0)
    answer = post(server, window=1.5)
    assert (answer.status, answer.json["generation"]) == (200, 1)
    assert trainer.train()
    status, scraped = server.status(), server.scrape()
    assert (status["config"]["window"], status["config_generation"]) == (1.5, 1)
    assert (scraped["window_samples"], scraped["buffer_capacity_samples"]) == (6, 6)
    assert (scraped["config_generation"], scraped["config_reloads_total{outcome=changed}"]) == (
        1,
        1,
    )
    assert 'window="1.5",window_multiple="1.5"' in server.get("/metrics").text
    shown = options(server)
    assert shown["window"] == {
        "value": 1.5, "source": "POST /v1/config from 127.0.0.1", "reloadable": True,
    }  # fmt: skip
    assert shown["dp_size"] == {"value": 2, "source": "--dp-size", "reloadable": False}
    assert "window 3.0 -> 1.5, buffer_capacity 12 -> 6" in server.log()


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b'{"max_wait": "5s", "dp_size": 4}', 422, "dp_size needs a restart"),
        (b'{"window": 4, "max_delay": 1}', 422, "max_delay is 1"),
        (b'{"max_wait": "soon"}', 422, "write a number and a unit"),
        (b"[]", 400, "no JSON object"),
        (b"{", 400, "no JSON object"),
        (b"\xff", 400, "no JSON object"),
        (b"[" * 60_000, 400, "no JSON object"),
        (b" " * 70_000, 413, "65536"),
    ],
)
def test_what_cannot_be_changes_nothing(
    body: bytes, status: int, told: str, shared: ServeProcess
) -> None:
    before = options(shared)
    answer = shared.post("/v1/config", body)
    assert (answer.status, told in answer.json["message"]) == (status, True)
    assert options(shared) == before


def test_nothing_may_be_posted_without_the_token(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    server = serve(token_file=tmp_path / "token")
    assert post(server, max_wait=1).status == 401
    assert server.get("/v1/config").status == 401


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text("max_delay = 9\n")
    return path


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in SMALL.items() if key != name}


def test_a_sighup_reads_the_file_again(tmp_path: Path, file: Path) -> None:
    with ServeProcess(tmp_path, warm=True, **without("max_wait"), config=file) as server:
        assert options(server)["max_delay"]["source"] == f"{file}:1"
        file.write_text("\nmax_delay = 11\nmax_wait = '300ms'\nwindow = 4")
        server.send_signal(signal.SIGHUP)
        said = "SIGHUP: max_delay 9 -> 11, max_wait 2.0 -> 0.3, "
        # A flag wins over the file, as at start.
        eventually(lambda: "SIGHUP: " in server.log(), "it is heard")
        shown = options(server)
        assert shown["window"]["value"] == 1
        assert shown["max_delay"] == {"value": 11, "source": f"{file}:2", "reloadable": True}
        assert said.split(", ", maxsplit=1)[0][8:] in server.log()
        assert shown["max_wait"]["value"] == 0.3
        file.write_text("max_wait = '300ms'\nproducer_credits = 2\nmax_delay = -3")
        server.send_signal(signal.SIGHUP)
        eventually(partial(logged, server, "max_delay = -3: it must be"), "it is refused")
        file.write_text("max_wait = '400ms'\nproducer_credits = 2")
        server.send_signal(signal.SIGHUP)
        eventually(
            partial(logged, server, f"producer_credits needs a restart (8 -> 2, {file}:2)"), "told"
        )
        assert options(server) == shown
        assert server.scrape()["config_reloads_total{outcome=refused}"] == 2


def test_the_order_of_flags_and_files_is_said_to_who_reads_them_again_alone(serve: Serve) -> None:
    server = serve()
    assert server.post("/v1/config", b"{}").status == 200
    server.send_signal(signal.SIGHUP)
    eventually(lambda: "SIGHUP: nothing changes; flags win over" in server.log(), "it is heard")
    assert "POST /v1/config from 127.0.0.1: nothing changes" in server.log()
    assert "127.0.0.1: nothing changes; flags" not in server.log()


def test_a_restart_goes_on_with_what_was_posted_unless_its_option_has_changed(
    tmp_path: Path,
) -> None:
    start = partial(
        ServeProcess, tmp_path, warm=True, **without("max_wait"), journal_dir=tmp_path / "journal"
    )
    with start() as server:
        assert post(server, max_wait="500ms", max_delay=9).status == 200
    # It was killed: what was answered is durable.
    with start() as server:
        shown = options(server)
        assert (shown["max_wait"]["value"], shown["max_delay"]["value"]) == (0.5, 9)
        assert server.get("/v1/config").json["generation"] == 0
    with start(max_wait="7s") as server:
        shown = options(server)
        assert (shown["max_wait"]["value"], shown["max_delay"]["value"]) == (7.0, 9)
        assert shown["max_wait"]["source"] == "--max-wait"
    with start() as server:  # what gave way does not come back
        assert options(server)["max_wait"]["value"] == 2.0
