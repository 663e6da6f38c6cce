"""A private event loop: it ends with its last work, and serves an interpreter that exits."""

import asyncio
import subprocess
import sys

import pytest

from rollout_workers.client.process import LoopThread

PATIENCE_S = 20.0


def test_the_loop_ends_with_its_last_work_and_cancels_what_is_left() -> None:
    thread = LoopThread("private")
    left = thread.submit(asyncio.sleep(3600))
    thread.finish(asyncio.sleep(0))
    thread.join(PATIENCE_S)
    assert left.cancelled()
    assert thread.loop.is_closed()
    thread.call(pytest.fail)  # nothing happens any more


def test_a_finalizer_that_the_loop_itself_runs_waits_for_nothing() -> None:
    thread = LoopThread("under-test")

    async def close() -> None:
        thread.join(60.0)

    thread.submit(close()).result(10)
    thread.finish(close())
    thread.join(10)


def test_a_name_is_looked_up_while_the_interpreter_exits() -> None:
    code = (
        "import atexit; from rollout_workers.client.process import LoopThread; "
        "thread = LoopThread('private'); "
        "look_up = lambda: thread.submit(thread.loop.getaddrinfo('localhost', 80)).result(10); "
        "atexit.register(lambda: print(look_up()[0][-1][1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.stdout == "80\n", done.stderr
