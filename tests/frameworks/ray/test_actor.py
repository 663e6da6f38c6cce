"""`deploy/ray/dispatcher_actor.py`: started as it says, killed, and found where it was."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rollout_workers import MicroBatchStream, RolloutProducer
from tests.support.addresses import free_address
from tests.support.ray_cluster import ray_cluster
from tests.support.source import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def cluster() -> Iterator[str]:
    with ray_cluster(object_store_memory=256 << 20, namespace="rollouts") as address:
        yield address


def test_a_dispatcher_whose_process_is_killed_goes_on_from_its_journal(
    cluster: str, tmp_path: Path
) -> None:
    address = free_address()
    command = [
        sys.executable, "deploy/ray/dispatcher_actor.py", "--dp-size", "1",
        "--global-batch-size", "4", "--micro-batch-size", "2", "--listen", address,
        "--http", "127.0.0.1:0", "--journal-dir", str(tmp_path / "journal"),
    ]  # fmt: skip
    started = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": cluster}, check=True, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert f"samples {address}" in started.stdout
    actor = ray.get_actor("rollout-dispatcher", namespace="rollouts")
    with RolloutProducer(address) as producer:
        for at in range(4):
            producer.push({"input_ids": [at] * (at + 1)}, sample_id=f"s{at}")
    ray.kill(actor, no_restart=False)
    assert ray.get(actor.endpoint.remote(), timeout=120) == address
    with RolloutProducer(address) as producer:
        producer.end_stream(force=True)
    seen: list[str] = []
    with MicroBatchStream(address) as stream:
        for step in stream:
            seen += [name for micro_batch in step for name in micro_batch.sample_ids]
            step.commit()
    assert sorted(seen) == [f"s{at}" for at in range(4)]
