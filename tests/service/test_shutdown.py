"""The end: the first signal drains, the second quits, and nothing is left behind."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_dispatcher.errors import ShuttingDown
from rollout_dispatcher.protocol import messages as m
from rollout_workers import RolloutProducer
from tests.service.conftest import SMALL, Serve
from tests.support.client import Producer, Trainer
from tests.support.options import arguments
from tests.support.server import PATIENCE_S, eventually


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals, serve: Serve) -> None:
    server = serve(warm=False)  # the command itself
    assert f"serving samples on {server.endpoint}, HTTP on {server.http}" in server.log()
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5])
    server.send_signal(number)
    server.await_status(run_state="draining")
    assert server.get("/readyz").status == 503
    assert server.get("/livez").status == 200
    answer = producer.push([6])
    assert answer.outcomes == ["refused"]
    assert answer.errors["0"] == (
        "the dispatcher is shutting down and takes no more samples; push again once it is started "
        "again, or elsewhere"
    )
    assert answer.reasons == {"0": "shutting-down"}
    parts = trainer.train()
    assert sorted(name for part in parts for name in part.sample_ids) == ["p/0", "p/1", "p/2"]
    assert trainer.train() == []
    server.await_status(run_state="drained", samples_committed=3, balanced=True)
    trainer.bye()
    assert server.wait() == 0
    producer.expect_end()


def test_a_push_that_waits_at_the_signal_may_be_pushed_again_and_is_told_so(serve: Serve) -> None:
    server = serve(buffer_capacity=4, window=1)
    producer, sample = RolloutProducer(server.endpoint), {"input_ids": [1, 2, 3]}
    producer.push_many([sample] * 4)
    with ThreadPoolExecutor(1) as threads:
        pushing = threads.submit(producer.push, sample)
        server.await_scrape(lambda now: now["pushes_held"] == 1, "a push waits")
        server.send_signal(signal.SIGTERM)
        words = "push again once it is started again, or elsewhere"
        with pytest.raises(ShuttingDown, match=words) as told:
            pushing.result(PATIENCE_S)
    assert (told.value.retriable, told.value.reason) == (True, "shutting-down")
    producer.close()
    assert server.wait() == 1
    with RolloutProducer(serve().endpoint) as again:
        assert again.push(sample) == "accepted"


def test_without_ranks_a_signal_ends_at_once_and_names_what_it_drops(serve: Serve) -> None:
    server = serve(drain_timeout="60s")
    producer = Producer(server.endpoint, "p")
    producer.push([3, 4])
    producer.push([5], group_ids=["prompt"], group_sizes=[2])
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    log = server.log()
    assert "SIGTERM: draining" in log
    assert (
        "3 accepted samples are lost, dropped by the shutdown (incomplete-group 1, shutdown 2): "
        "p/2 (group prompt), p/0, p/1; with --journal-dir they would wait for the next start"
    ) in log


def test_a_group_that_the_drain_cut_off_is_named_though_ranks_train_the_rest(serve: Serve) -> None:
    server = serve()
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5])
    producer.push([6], group_ids=["prompt"], group_sizes=[2])
    server.send_signal(signal.SIGTERM)
    server.await_status(run_state="draining")
    assert trainer.train()
    assert trainer.train() == []
    trainer.bye()
    assert server.wait() == 1
    assert "1 accepted sample is lost, dropped by the shutdown (incomplete-group 1): p/3" in (
        server.log()
    )


def test_what_the_settings_ask_to_drop_is_no_loss(serve: Serve) -> None:
    server = serve(final_batch="drop")
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5])
    server.send_signal(signal.SIGTERM)
    assert trainer.train() == []
    trainer.bye()
    assert server.wait() == 0
    assert "lost" not in server.log()


def test_the_second_signal_quits(serve: Serve) -> None:
    server = serve(drain_timeout="10m")
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5, 6])
    trainer.take()
    server.send_signal(signal.SIGTERM)
    server.await_status(run_state="draining")
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    assert (
        "stopped with 0 samples buffered and 4 in open steps, which are given up: "
        "p/0, p/1, p/2, p/3"
    ) in server.log()
    for rank in trainer.ranks:
        rank.await_end()
        rank.expect_end()


def test_a_drain_that_takes_too_long_is_given_up(serve: Serve) -> None:
    server = serve(drain_timeout="200ms")
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5, 6])
    trainer.take()
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    log = server.log()
    assert "SIGTERM: draining for 0.2 s at most (--set drain-timeout)" in log
    assert "not drained within 0.2 s (--set drain-timeout)" in log


def test_the_end_of_the_stream_ends_the_dispatcher(serve: Serve) -> None:
    server = serve()
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5, 6])
    pending = server.post("/v1/stream/end")
    assert (pending.status, json.loads(pending.text)) == (200, {"waits_for": ["p"]})
    assert server.status()["run_state"] == "running"  # the producer has not said that it is done
    assert server.post("/v1/stream/end?force=perhaps").status == 400
    forced = server.post("/v1/stream/end?force=true")
    assert (forced.status, json.loads(forced.text)) == (200, {"waits_for": []})
    assert trainer.train()
    assert trainer.train() == []
    trainer.bye()
    assert server.wait() == 0


def test_the_end_waits_for_the_producer_that_has_not_heard_of_it(serve: Serve) -> None:
    server = serve()
    producer, trainer = Producer(server.endpoint, "p"), Trainer(server.endpoint, 2)
    producer.push([3, 4, 5, 6])
    producer.send(m.EndStream())
    server.await_status(run_state="ended")
    producer.close()
    assert trainer.train()
    assert trainer.train() == []
    trainer.bye()
    server.await_status(run_state="drained", ranks_connected=0)
    again = Producer(server.endpoint, "p", first_seq=4)
    again.end_stream()
    assert server.wait() == 0


def test_a_request_that_never_comes_does_not_hold_up_the_end(serve: Serve) -> None:
    server = serve()
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as slow:
        slow.sendall(b"POST /v1/samples HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_what_is_planted_beside_the_ready_file_is_not_written_through(
    serve: Serve, tmp_path: Path
) -> None:
    """In a directory that others write to as well, such as /tmp; the file's name is known."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("ready.json.part", "ready.json"):
        (tmp_path / name).symlink_to(victim)
    server = serve(ready_file=tmp_path / "ready.json")
    eventually(lambda: not (tmp_path / "ready.json").is_symlink(), "the file is written")
    assert json.loads((tmp_path / "ready.json").read_text())["listen"] == server.endpoints
    assert victim.read_text() == "precious"
    assert sorted(tmp_path.glob("ready.json.*")) == [tmp_path / "ready.json.part"]


def test_a_port_in_use_is_one_line_and_exit_code_1(serve: Serve) -> None:
    taken = serve().endpoint
    done = second_dispatcher(taken)
    assert done.returncode == 1
    assert done.stderr.startswith("dispatcher serve: ")
    assert f"--listen {taken}: " in done.stderr
    assert "in use" in done.stderr
    assert done.stderr.endswith("running there already? Stop it, or choose another --listen\n")
    assert len(done.stderr.splitlines()) == 1


def second_dispatcher(listen: str) -> subprocess.CompletedProcess[str]:
    options: dict[str, object] = {**SMALL, "listen": listen, "http": "127.0.0.1:0"}
    command = [
        sys.executable,
        "-m",
        "rollout_dispatcher.cli.main",
        "serve",
        *arguments(options),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
