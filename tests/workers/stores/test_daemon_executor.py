"""Threads that run what may block, and keep no process from ending."""

import subprocess
import sys
import threading

import pytest

from rollout_workers.stores.requests import DaemonExecutor

PATIENCE_S = 10


def test_after_its_end_nothing_is_taken_and_what_was_is_done() -> None:
    executor, go = DaemonExecutor(1, "t"), threading.Event()
    futures = [executor.submit(go.wait, PATIENCE_S) for _ in range(3)]
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(print)
    go.set()
    assert all(future.result(PATIENCE_S) for future in futures)


def test_a_process_ends_whatever_hangs() -> None:
    script = (
        "import threading\n"
        "from rollout_workers.stores.requests import DaemonExecutor\n"
        "begun = threading.Event()\n"
        "DaemonExecutor(1, 't').submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S * 3)
