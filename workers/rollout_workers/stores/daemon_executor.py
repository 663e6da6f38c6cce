"""Threads for calls into payload stores, which may block for as long as a file server is away.

They are daemons, as an interpreter that exits waits for all others: a call that hangs would keep
its process from ending.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Call = Callable[[], None]


class DaemonExecutor(Executor):
    """Runs calls in at most `count` threads, which are started as they are needed."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._busy = 0
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Raises RuntimeError after `shutdown`, and where there can be no thread to run it."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is shut down")
            if self._busy >= self._threads < self._count:
                self._start_one()
            self._busy += 1
            self._calls.put(lambda: _call(future, fn, *args, **kwargs))
        return future

    def _start_one(self) -> None:
        """One thread more; where there can be none, those that there are have to do."""
        name = f"{self._name}-{self._threads}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Take no more calls; what was submitted is still run, and nobody waits for it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or what it holds would stay until the next
            with self._lock:
                self._busy -= 1


def _call(future: Future[T], fn: Callable[..., T], *args: Any, **kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = fn(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(found)
