"""The batch script trains a whole run under a real Slurm, on this machine as its only node."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.cluster import DAEMONS, slurm
from tests.e2e.harness import assert_each_exactly_once, read_diaries
from tests.support.addresses import free_port
from tests.support.source import ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, DAEMONS)),
        reason="no Slurm here, or not root (Debian: apt-get install slurm-wlm munge)",
    ),
]
SAMPLES, WITHIN_S = 96, 180.0


@pytest.fixture
def cluster() -> Iterator[None]:
    """In a folder with a short name: munged's socket is in it."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm(Path(folder)):
        yield


def state_of(job: str) -> str:
    said = subprocess.check_output(["scontrol", "show", "job", job], text=True)
    return said.partition("JobState=")[2].split()[0]


def test_a_batch_job_trains_on_everything_that_is_pushed(cluster: None, tmp_path: Path) -> None:
    trainer = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--log-dir", str(tmp_path / "torchrun"), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1",
        str(ROOT / "tests/e2e/trainer.py"), "--out", str(tmp_path), "--endpoint", "$DISPATCHER",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT}/dispatcher:{ROOT}/workers",
        "RUN": str(tmp_path / "run"),
        "RANKS_PER_NODE": "2",
        "DISPATCH_BATCH_SIZE": "16",
        "MICRO_BATCH_TOKENS": "64",
        "DISPATCHER_LISTEN": "127.0.0.1:0",
        "DISPATCHER_HTTP": "127.0.0.1:0",
        "DISPATCHER_MAX_WAIT": "100ms",
        "TRAIN": " ".join(trainer),
        "ROLLOUT": f"{sys.executable} {ROOT / 'tests/deploy/rollouts.py'} {SAMPLES}",
    }
    log = tmp_path / "job.log"
    script = ROOT / "deploy" / "slurm" / "train.sbatch"
    submit = ["sbatch", "--parsable", "--nodes", "1", "--output", str(log), str(script)]
    job = subprocess.check_output(submit, env=environment, text=True).strip()
    deadline = time.monotonic() + WITHIN_S
    while (state := state_of(job)) in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}:
        assert time.monotonic() < deadline, f"{state}\n{log.read_text()}"
        time.sleep(0.5)
    assert state == "COMPLETED", log.read_text()
    assert_each_exactly_once(read_diaries(tmp_path), {str(number) for number in range(SAMPLES)})
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600
