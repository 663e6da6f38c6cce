"""Everything that a dispatcher is for, under a limit of 256 descriptors, with a journal."""

import json
import signal
from pathlib import Path

import pytest

from tests.resources.measured import descriptors, no_stall
from tests.service.conftest import Serve
from tests.support.client import Producer, Trainer
from tests.support.server import eventually

#: What `ulimit -n` allows.
DESCRIPTORS = 256
PRODUCERS, ROUNDS = 40, 5
SAMPLE = {"fields": {"input_ids": [1, 2, 3], "loss_mask": [False, True, True], "reward": 0.5}}


@pytest.mark.e2e
def test_producers_ranks_http_and_metrics_have_enough_descriptors(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(open_files=DESCRIPTORS, journal_dir=tmp_path / "journal", buffer_capacity=1000)
    bare = descriptors(server)
    with Trainer(server.endpoint, 2) as trainer:
        producers = [Producer(server.endpoint, f"p{number}") for number in range(PRODUCERS)]
        for _ in range(ROUNDS):
            for producer in producers:
                assert set(producer.push([3, 4, 5, 6]).outcomes) == {"accepted"}
            answer = server.post("/v1/samples", json.dumps([SAMPLE] * 4).encode())
            assert answer.status == 200, answer
            assert server.scrape()["buffer_samples"] > 0
            for _ in range(PRODUCERS + 1):
                trainer.train()
        assert descriptors(server) < DESCRIPTORS
        for producer in producers:
            producer.bye()
        eventually(lambda: descriptors(server) <= bare + 3, "descriptors are given back")
        status = server.status()
        assert status["balanced"]
        assert status["samples_committed"] == status["accepted"] == ROUNDS * 4 * (PRODUCERS + 1)
        no_stall(server)
        server.send_signal(signal.SIGTERM)
        eventually(lambda: server.process.poll() is not None, "it stops")
    assert server.wait() == 0
