"""A trainer that has had enough: the run ends for everybody, with real processes and clients."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.errors import RunFinished
from rollout_workers import RankClient, RolloutProducer
from tests.e2e.harness import finish, running
from tests.e2e.test_leaving import SCRIPT
from tests.support.addresses import free_address
from tests.support.server import ServeProcess, eventually
from tests.support.torchrun import torchrun_command

pytestmark = pytest.mark.e2e

SAMPLE = {"input_ids": [1, 2, 3]}
BODY = json.dumps({"fields": SAMPLE}).encode()


def serve(folder: Path, **options: Any) -> ServeProcess:
    few: dict[str, Any] = {
        "dp_size": 2, "global_batch_size": 4, "micro_batch_tokens": 64, "window": 1,
        "heartbeat_interval": "500ms", "drain_timeout": "5s",
    }  # fmt: skip
    return ServeProcess(folder, **few | options)


@contextmanager
def ranks(address: str, **options: Any) -> Iterator[tuple[RankClient, RankClient]]:
    """Two DP ranks of one generation."""
    with ExitStack() as stack:
        first = stack.enter_context(RankClient(address, dp_rank=0, dp_size=2, **options))
        options |= {"generation": first.generation}
        yield first, stack.enter_context(RankClient(address, dp_rank=1, dp_size=2, **options))


def train(client: RankClient, steps: int) -> int:
    """The last step that it has committed."""
    for _ in range(steps):
        step = client.next_step(60)
        assert step is not None
        list(step)
        step.commit()
    return client.position


def push_until_told(address: str) -> int:
    """How many samples are accepted before the run is finished."""
    with RolloutProducer(address) as producer:
        for accepted in range(1000):
            try:
                producer.push(SAMPLE)
            except RunFinished:
                with pytest.raises(RunFinished, match="finished the run"):
                    producer.push(SAMPLE, timeout=5)
                return accepted
    raise AssertionError("nobody told it")


def blocked(server: ServeProcess) -> bool:
    return bool(server.status()["pushes_held"])


@pytest.mark.parametrize("journal", [False, True])
def test_a_number_of_steps_then_finish_under_torchrun(tmp_path: Path, journal: bool) -> None:
    folder = {"journal_dir": tmp_path / "journal"} if journal else {}
    with serve(tmp_path, **folder) as server, ThreadPoolExecutor() as threads:
        pushing = [threads.submit(push_until_told, server.endpoint) for _ in range(2)]
        command = torchrun_command(2, tmp_path)
        steps = [str(SCRIPT), server.endpoint, "--steps", "3", "--then", "finish"]
        with running(*command, *steps) as trainers:
            lines = [line for line in finish(trainers).splitlines() if line.startswith("{")]
        assert [json.loads(line) for line in lines] == [{"steps": 3, "reason": "finished"}] * 2
        accepted = sum(each.result(60) for each in pushing)
        assert server.wait(60) == 0
        assert accepted >= 3 * 4
        log = server.log()
    kept = "0 samples that were not used are dropped" in log
    assert kept == journal, log
    assert "the DP ranks have finished the run after 3 steps" in log


@pytest.mark.parametrize("journal", [False, True])
def test_over_http_it_is_told_as_long_as_a_rank_is_there(tmp_path: Path, journal: bool) -> None:
    folder = {"journal_dir": tmp_path / "journal"} if journal else {}
    with serve(tmp_path, **folder) as server, ThreadPoolExecutor() as threads:
        for _ in range(4):
            assert server.post("/v1/samples", BODY).status == 200
        with ranks(server.endpoint) as clients:
            list(threads.map(train, clients, [1, 1]))
            list(threads.map(RankClient.finish, clients))
            answer = server.post("/v1/samples", BODY)
            assert answer.status == 410
            assert answer.json["reasons"] == {"0": "run-finished"}
        assert server.wait(60) == 0


def test_with_a_journal_the_next_start_goes_on_with_what_was_left(tmp_path: Path) -> None:
    address, journal = free_address(), tmp_path / "journal"
    with ThreadPoolExecutor() as threads:
        with serve(tmp_path, listen=address, journal_dir=journal) as server:
            pushing = threads.submit(push_until_told, address)
            with ranks(address) as clients:
                list(threads.map(train, clients, [2, 2]))
                eventually(lambda: blocked(server), "the producer waits")
                list(threads.map(RankClient.finish, clients))
            accepted = pushing.result(60)
            assert server.wait(60) == 0
        with serve(tmp_path, listen=address, journal_dir=journal) as server:
            at = server.status()
            assert at["accepted"] == accepted
            assert at["run_state"] == "running"
            left = at["buffered"] + at["in_flight"]
            assert left == accepted - 2 * 4 > 0
            assert "is of a run that its DP ranks had finished: it goes on with" in server.log()
            assert at["balanced"]
            with RolloutProducer(address) as producer, ranks(address) as clients:
                more = threads.submit(lambda: [producer.push(SAMPLE) for _ in range(-left % 4 + 4)])
                last = list(threads.map(train, clients, [left // 4 + 1] * 2))
                assert last == [2 + left // 4] * 2
                more.result(60)
                list(threads.map(lambda client: client.finish(discard=True), clients))
                eventually(lambda: server.status()["dropped"]["unused"] >= 0, "it is counted")
                at = server.status()
                assert (at["buffered"], at["in_flight"], at["balanced"]) == (0, 0, True)
            assert server.wait(60) == 0


def test_the_end_of_the_stream_and_of_the_dispatcher_are_told_apart(tmp_path: Path) -> None:
    for end, reason in (("stream", "ended"), ("dispatcher", "drained")):
        with serve(tmp_path) as server, ranks(server.endpoint) as clients:
            if end == "stream":
                server.post("/v1/stream/end?force=true")
            else:
                server.send_signal(signal.SIGTERM)
            for client in clients:
                assert client.next_step(60) is None
                client.finish()  # is nothing to do any more
                assert client.end_reason == reason
                client.close()
            assert server.wait(60) == 0
