"""Descriptors of others are closed elsewhere, by few threads, and whoever receives has to wait."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from rollout_dispatcher.transport.descriptors.closing import (
    MOST_THREADS,
    Closer,
    close_at_once,
)
from tests.support.descriptors import a_lingering_socket, are_closed_again, open_descriptors
from tests.support.server import eventually

LINGERS_S, AT_ONCE_S = 20, 5.0


def some(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


class Slow:
    """Closes when it is told that it may, as some file systems do."""

    def __init__(self) -> None:
        self.may, self.begun = threading.Event(), 0

    def __call__(self, descriptor: int) -> None:
        self.begun += 1
        assert self.may.wait(20)
        os.close(descriptor)


@contextmanager
def slow_closes() -> Iterator[Slow]:
    slow = Slow()
    try:
        yield slow
    finally:
        slow.may.set()


def test_a_socket_that_lingers_does_not() -> None:
    with a_lingering_socket(LINGERS_S) as slow:
        began = monotonic()
        close_at_once(slow)
        assert monotonic() - began < AT_ONCE_S
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(slow)


def test_nobody_waits_for_what_takes_for_ever_nor_do_others_until_all_threads_do() -> None:
    before, threads = open_descriptors(), set(threading.enumerate())
    with slow_closes() as slow:
        closer = Closer(slow)
        closer.close(some(1))
        closer.close(some(MOST_THREADS))
        eventually(lambda: slow.begun == MOST_THREADS, "each thread has one")
        assert len(open_descriptors() - before) == MOST_THREADS + 1
    assert are_closed_again(before)
    eventually(lambda: threads.issuperset(threading.enumerate()), "no thread stays for nothing")


def test_who_receives_is_told_when_it_is_full_and_when_there_is_room() -> None:
    told: list[str] = []
    with slow_closes() as slow:
        closer = Closer(slow, most=3)
        closer.when_room(lambda: told.append("at once"))
        assert told == ["at once"]
        closer.close(some(MOST_THREADS + 2))
        eventually(lambda: slow.begun == MOST_THREADS and not closer.is_full, "two wait")
        closer.close(some(1))
        assert closer.is_full
        closer.when_room(lambda: told.append("later"))
        assert told == ["at once"]
    eventually(lambda: told == ["at once", "later"], "there is room")
    assert not closer.is_full


def test_room_is_told_of_though_what_made_it_takes_long_to_close() -> None:
    told: list[str] = []
    may = threading.Semaphore(0)

    def one_by_one(descriptor: int) -> None:
        assert may.acquire(timeout=20)
        os.close(descriptor)

    closer = Closer(one_by_one, most=2)
    try:
        closer.close(some(MOST_THREADS + 2))
        eventually(lambda: closer._threads == MOST_THREADS, "each thread has one")
        eventually(lambda: len(closer._waiting) == 2, "and two wait")
        closer.when_room(lambda: told.append("room"))
        assert not told
        may.release()
        eventually(lambda: told, "one of those that waited is being closed")
    finally:
        may.release(MOST_THREADS + 2)


def test_nothing_is_left_when_many_close_at_once() -> None:
    before, closer = open_descriptors(), Closer()

    def close_some() -> None:
        for _ in range(200):
            closer.close(some(1))

    threads = [threading.Thread(target=close_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert are_closed_again(before)


def test_a_finalizer_may_come_in_its_midst() -> None:
    class Owner:
        def __init__(self, closer: Closer) -> None:
            self.closer, self.itself = closer, self

        def __del__(self) -> None:
            self.closer.close(some(1))

    before, closer = open_descriptors(), Closer()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(100):
            Owner(closer)
            closer.close(some(2))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert are_closed_again(before)


#: Four are being closed and three wait when it forks; the child says how many it has closed.
FORKS = f"""
import os, sys, threading, time
from rollout_dispatcher.transport.descriptors.closing import CLOSER

may = threading.Event()
CLOSER._close = lambda descriptor: may.wait() and os.close(descriptor)
some = [os.open(os.devnull, os.O_RDONLY) for _ in range({MOST_THREADS} + 3)]
CLOSER.close(some)
while len(CLOSER._waiting) > 3:
    time.sleep(0.001)
if child := os.fork():
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status))
may.set()
deadline = time.monotonic() + 10
while any(os.path.exists(f"/proc/self/fd/{{one}}") for one in some[-3:]):
    if time.monotonic() > deadline:
        os._exit(1)
    time.sleep(0.001)
os._exit(0)
"""


def test_what_waits_when_a_process_forks_is_closed_in_the_child_too() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=False, timeout=60)
    assert done.returncode == 0
