"""The batch script under a stand-in for Slurm's commands: what becomes of signals and failures."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.server import STARTED_WITHIN_S, eventually
from tests.support.source import ROOT

#: Behind the options of `srun`, what it starts.
SRUN = '#!/bin/bash\nwhile [ "$1" != dispatcher ] && [ "$1" != bash ]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/bash\necho 127.0.0.1\n"
DISPATCHER = f'#!/bin/bash\nexec {sys.executable} -m rollout_dispatcher.cli.main "$@"\n'


@contextmanager
def job(folder: Path, train: str, *given: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script with these trainers, and arguments for torchrun; its log is in the folder."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("dispatcher", DISPATCHER)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT}/dispatcher:{ROOT}/workers",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "1",
        "RANKS_PER_NODE": "1",
        "RUN": str(folder / "run"),
        "DISPATCHER_LISTEN": "127.0.0.1:0",
        "DISPATCHER_HTTP": "127.0.0.1:0",
        "TRAIN": train,
    }
    script = str(ROOT / "deploy" / "slurm" / "train.sbatch")
    with (folder / "log").open("wb") as log:
        # In a group of its own, so that nothing of it outlives the test.
        process = subprocess.Popen(
            ["bash", script, *given],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number in signal.SIGTERM, signal.SIGKILL:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        process.wait()


def test_slurms_warning_ends_the_dispatcher_while_trainers_train(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with job(tmp_path, f"touch {begun}; exec sleep 1000") as process:
        eventually(begun.exists, "trainers train", STARTED_WITHIN_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STARTED_WITHIN_S) == 128 + signal.SIGTERM
        assert "stay in the journal for the next start" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("code", [1, 7])
def test_trainers_that_fail_end_the_job_with_their_code(tmp_path: Path, code: int) -> None:
    with job(tmp_path, f"exit {code}") as process:
        assert process.wait(STARTED_WITHIN_S) == code
        assert "stay in the journal for the next start" in (tmp_path / "log").read_text()


def test_jobs_that_share_a_node_rendezvous_at_ports_of_their_own(tmp_path: Path) -> None:
    """The trainer holds its port until the other job has run: each job's torchrun is a real one."""
    trainer = tmp_path / "train.py"
    trainer.write_text(
        "import os, pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, sys.argv[1:])\n"
        "mine.touch()\n"
        "deadline = time.monotonic() + 60\n"
        "while not other.exists():\n"
        "    assert time.monotonic() < deadline\n"
        "    time.sleep(0.05)\n"
        "sys.exit(7)\n"
    )
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    begun = [str(folder / "begun") for folder in folders]
    logs = "--log-dir", str(tmp_path / "torchrun")
    with (
        job(folders[0], "", *logs, str(trainer), *begun) as first,
        job(folders[1], "", *logs, str(trainer), *reversed(begun)) as second,
    ):
        # torchrun's code for a trainer that has failed, after both have been there at once.
        codes = [process.wait(4 * STARTED_WITHIN_S) for process in (first, second)]
    assert codes == [1, 1], [(folder / "log").read_text() for folder in folders]
    assert all(Path(path).exists() for path in begun)
