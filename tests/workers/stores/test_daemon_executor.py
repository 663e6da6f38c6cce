"""Threads that run what may block, and keep no process from ending."""

import subprocess
import sys
import threading

import pytest

from rollout_workers.stores.requests import DaemonExecutor

PATIENCE_S = 10


def test_calls_run_at_the_same_time_in_so_many_threads() -> None:
    executor, both, go = DaemonExecutor(2, "t"), threading.Barrier(3), threading.Event()

    def wait() -> str:
        both.wait(PATIENCE_S)
        go.wait(PATIENCE_S)
        return threading.current_thread().name

    first = [executor.submit(wait) for _ in range(2)]
    later = executor.submit(lambda: "later")
    both.wait(PATIENCE_S)
    assert not later.done()
    go.set()
    assert {future.result(PATIENCE_S) for future in first} == {"t-0", "t-1"}
    assert later.result(PATIENCE_S) == "later"
    executor.shutdown()


def test_an_error_is_the_callers() -> None:
    executor = DaemonExecutor(1, "t")
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 / 0).result(PATIENCE_S)
    assert executor.submit(lambda: 1).result(PATIENCE_S) == 1
    executor.shutdown()


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
