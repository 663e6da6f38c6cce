"""The worker that keeps pace with the trainer loses no sample, and the one that does not does."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from rollout_workers import RankClient
from tests.support.server import ServeProcess
from tests.support.source import PYTHONPATH, ROOT

pytestmark = pytest.mark.e2e

SAMPLES, BATCH = 60, 4
#: A step's: long beside a rollout of the example, so that it could run far ahead.
STEP_SECONDS = 0.05


@contextmanager
def a_slow_rank(endpoint: str) -> Iterator[None]:
    """Trains every step, and has new weights after each."""

    def train() -> None:
        with RankClient(endpoint, dp_rank=0, dp_size=1) as rank:
            rank.set_policy_version(0)
            while (step := rank.next_step()) is not None:
                list(step)
                sleep(STEP_SECONDS)
                step.commit()
                rank.set_policy_version(step.header.step + 1)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("way", ["paced", "unpaced"])
def test_it_loses_no_sample_to_staleness_and_would_without_its_pace(
    way: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "dp_size": 1,
        "dispatch_batch_size": BATCH,
        "micro_batch_size": BATCH,
    }
    with (
        ServeProcess(
            tmp_path, warm=True, buffer_capacity=512, max_staleness=1, window_multiple=1, **options
        ) as server,
        a_slow_rank(server.endpoint),
    ):
        arguments = [server.endpoint, "--samples", str(SAMPLES)]
        done = subprocess.run(
            [
                sys.executable, str(ROOT / "examples" / "paced_producer.py"), *arguments,
                *([] if way == "paced" else ["--unpaced"]),
            ],
            capture_output=True, text=True, timeout=90, check=False,
            env={"PYTHONPATH": PYTHONPATH},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pushed"] == SAMPLES
    assert found["stale"] == found["dropped"]
    if way == "paced":
        assert found["stale"] == 0
    else:
        assert found["stale"] > SAMPLES // 3
