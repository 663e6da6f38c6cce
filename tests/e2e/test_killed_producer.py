"""A producer that is killed leaves a line at once: which one, where, and what it had pushed."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import ServeProcess, eventually

pytestmark = pytest.mark.e2e

PRODUCER = """
import sys, time
from rollout_workers import RolloutProducer
producer = RolloutProducer(sys.argv[1])
producer.push({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]})
print("pushed", flush=True)
time.sleep(600)
"""


def test_a_killed_producer_is_named_at_once_with_its_host(tmp_path: Path) -> None:
    with ServeProcess(
        tmp_path, dp_size=2, global_batch_size=4, micro_batch_size=2, log_format="json"
    ) as server:
        command = [sys.executable, "-c", PRODUCER, server.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as producer:
            assert producer.stdout is not None
            assert producer.stdout.readline() == b"pushed\n"
            (client,) = server.get("/v1/clients").json["clients"]
            host = re.sub("[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0])[:16]
            assert client["client_id"].startswith(f"{host}-{producer.pid}-")
            assert (client["role"], client["host"]) == ("producer", "127.0.0.1")
            assert (client["connected"], client["samples_accepted"]) == (True, 1)
            assert client["samples_per_second"] > 0
            producer.kill()
        line = f"producer {client['client_id']} at 127.0.0.1 is gone without a goodbye"
        eventually(lambda: line in server.log(), "a line names it", 2)
        (said,) = [one for one in server.log().splitlines() if line in one]
        assert '"event": "producer-gone"' in said
        assert f'"producer": "{client["client_id"]}"' in said
        (client,) = server.get("/v1/clients").json["clients"]
        assert not client["connected"]
        assert client["last_error"].startswith("connection lost: ")
        run_id = server.status()["run_id"]
        assert f'"run_id": "{run_id}"' in said
