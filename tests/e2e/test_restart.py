"""A dispatcher that is killed and started again goes on from its journal: nothing lost or twice."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from rollout_workers import RankClient, RolloutProducer
from tests.support.addresses import free_address
from tests.support.server import ServeProcess, eventually

pytestmark = pytest.mark.e2e

RANKS, SAMPLES, KILLS = 2, 400, 4


def serve(folder: Path, address: str, sync: str = "batch") -> ServeProcess:
    return ServeProcess(
        folder,
        listen=address,
        dp_size=RANKS,
        global_batch_size=8,
        micro_batch_tokens=256,
        window=2,
        journal_dir=folder / "journal",
        journal_sync=sync,
    )


def push(address: str) -> list[str]:
    """Push everything; the outcomes, of which a resent push is a duplicate."""
    rng = np.random.default_rng(0)
    with RolloutProducer(address) as producer:
        return [
            str(producer.push({"input_ids": np.arange(rng.integers(1, 64))}, sample_id=f"s{at}"))
            for at in range(SAMPLES)
        ]


def train(client: RankClient) -> list[tuple[int, str, list[str]]]:
    """Number, digest and this rank's samples of every step."""
    found = []
    with client:
        while (step := client.next_step(60)) is not None:
            names = [
                name for one in step if not one.header.is_filler for name in one.header.sample_ids
            ]
            step.commit()
            found.append((step.header.step, step.header.digest, names))
    return found


def await_steps(server: ServeProcess, goal: int) -> None:
    eventually(lambda: server.status()["steps_committed"] >= goal, f"{goal} steps are committed")


@pytest.mark.parametrize("sync", ["batch", "interval:100ms", "off"])
def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path: Path, sync: str) -> None:
    address = free_address()
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        server = stack.enter_context(serve(tmp_path, address, sync))
        first = RankClient(address, dp_rank=0, dp_size=RANKS)
        second = RankClient(address, dp_rank=1, dp_size=RANKS, generation=first.generation)
        ranks = [threads.submit(train, client) for client in (first, second)]
        pushing = threads.submit(push, address)
        for kill in range(1, KILLS + 1):
            goal = kill * SAMPLES // (KILLS + 1) // 8
            await_steps(server, goal)
            server.send_signal(signal.SIGKILL)
            server.wait()
            server = stack.enter_context(serve(tmp_path, address, sync))
        assert set(pushing.result(60)) <= {"accepted", "duplicate"}
        status = server.status()
        assert status["balanced"]
        assert status["accepted"] == SAMPLES
        assert server.post("/v1/stream/end").status == 200
        found = [rank.result(60) for rank in ranks]
        assert server.wait() == 0

    assert [step[:2] for step in found[0]] == [step[:2] for step in found[1]]
    assert [step[0] for step in found[0]] == list(range(len(found[0])))
    names = [name for rank in found for step in rank for name in step[2]]
    assert sorted(names) == sorted(f"s{at}" for at in range(SAMPLES))


def test_sigterm_with_a_journal_stops_at_once_and_the_next_process_goes_on(tmp_path: Path) -> None:
    address = free_address()
    with serve(tmp_path, address) as server, RolloutProducer(address) as producer:
        for at in range(5):
            producer.push({"input_ids": np.arange(3 + at)})
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        with serve(tmp_path, address) as successor:
            assert successor.status()["buffered"] == 5
            producer.push({"input_ids": np.arange(3)})
            assert successor.status()["accepted"] == 6


def test_a_damaged_journal_is_an_error_of_one_line_and_its_exit_code(tmp_path: Path) -> None:
    with serve(tmp_path, free_address()) as server:
        assert server.post("/v1/samples", b'{"fields": {"input_ids": [1, 2]}}').status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    (segment,) = (tmp_path / "journal").glob("*.segment")
    segment.write_bytes(segment.read_bytes().rstrip(b"\0")[:-16])
    damaged = serve(tmp_path, free_address())
    assert damaged.wait() == 1
    log = damaged.log()
    assert f"journal file {segment} is damaged" in log
    assert "Traceback" not in log
