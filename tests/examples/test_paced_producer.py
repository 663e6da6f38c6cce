"""The worker that keeps pace with the trainer loses hardly any sample; one that does not does."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
#: A step's: rather longer than a rollout of the example, so that it would run ahead.
STEP_SECONDS = 0.05


@contextmanager
def a_rank(endpoint: str, begins: Callable[[], object]) -> Iterator[None]:
    """Trains every step, once it `begins`, and has new weights after each."""

    def train() -> None:
        with RankClient(endpoint, dp_rank=0, dp_size=1) as rank:
            rank.set_policy_version(0)
            begins()
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
def test_it_loses_hardly_any_sample_to_staleness_and_would_without_its_pace(
    way: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "dp_size": 1,
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH,
    }

    def begins() -> None:
        """A worker without a pace may have pushed everything before the first step is trained."""
        if way == "unpaced":
            server.await_status(accepted=SAMPLES)

    with (
        ServeProcess(
            tmp_path, warm=True, buffer_capacity=512, max_staleness=1, window=1, **options
        ) as server,
        a_rank(server.endpoint, begins),
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
    if way == "paced":  # whenever the machine stands still for a moment it may cost one
        assert found["stale"] <= SAMPLES // 20
    else:
        assert found["stale"] > SAMPLES // 3
