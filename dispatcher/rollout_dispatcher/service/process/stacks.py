"""What every thread and task does, for the log: who is stuck, and where; a line each.

    thread MainThread: be_stuck (demo.py:7) < _run (events.py:84) < run (runners.py:118) < ...

Threads are taken down by the signal handler itself (faulthandler, which waits for no interpreter
lock), tasks by a thread of their own; so it works while the event loop is stuck, and is told as
soon as anything can be. Invariant: however many there are, it is `MAX_STACKS` lines of each kind
and `MAX_FRAMES` calls a line at most.
"""

import asyncio
import faulthandler
import logging
import os
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import IO

log = logging.getLogger(__name__)

MAX_STACKS, MAX_FRAMES = 64, 16
#: What faulthandler writes takes no more: a hundred threads of a hundred calls.
_MAX_BYTES = 4 << 20
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "([^"]*)", line (\d+) in (.+)')


class Stacks:
    """The stacks of this process; `loop`: whose tasks are shown."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._file: IO[bytes] | None = None
        self._telling = threading.Lock()

    def take_at(self, number: signal.Signals) -> None:
        """Take threads down whenever this signal comes; who has heeded it so far does so still."""
        self._file = _memory()
        faulthandler.register(number, self._file, all_threads=True, chain=True)

    def tell(self) -> None:
        """Log what was taken down last, and tasks as they are; from any thread, waits for nothing.

        The log may hang, as whoever reads it may.
        """
        threading.Thread(target=self._tell, name="stacks", daemon=True).start()

    def _tell(self) -> None:
        if not self._telling.acquire(blocking=False):
            return  # one that hangs is enough
        try:
            found = [*_threads(self._taken())]
            # The same task often, as that of a connection, is shown once and counted.
            tasks = Counter(map(_task, asyncio.all_tasks(self._loop)))
            for line in (*bounded(found), *bounded(map(_counted, tasks.most_common()))):
                log.info("%s", line)
        finally:
            self._telling.release()

    def _taken(self) -> str:
        if self._file is None:
            return ""
        handle = self._file.fileno()
        found = os.pread(handle, _MAX_BYTES, 0)
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        return found.decode(errors="replace")


def bounded(lines: Iterable[str]) -> Iterator[str]:
    """The first of them, and how many are left out."""
    rest = iter(lines)
    yield from islice(rest, MAX_STACKS)
    if more := sum(1 for _ in rest):
        yield f"({more} more)"


def _threads(taken: str) -> Iterator[str]:
    """A line for each thread that faulthandler has written."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for part in taken.split("\n\n"):
        if (begin := _THREAD.search(part)) is not None:
            calls = [_call(name, path, line) for path, line, name in _CALL.findall(part)]
            yield f"thread {names.get(int(begin[1], 16), '')}: {_chain(calls)}"


def _task(task: "asyncio.Task[object]") -> str:
    coroutine = task.get_coro()
    calls = [
        _call(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
        for frame in reversed(task.get_stack(limit=MAX_FRAMES))
    ]
    return f"task {getattr(coroutine, '__qualname__', coroutine)}: {_chain(calls)}"


def _counted(found: tuple[str, int]) -> str:
    text, count = found
    return f"{count} times {text}" if count > 1 else text


def _call(name: str, path: str, line: object) -> str:
    return f"{name} ({path.rpartition('/')[2]}:{line})"


def _chain(calls: list[str]) -> str:
    """The innermost call first."""
    return " < ".join(calls[:MAX_FRAMES] + ["..."] * (len(calls) > MAX_FRAMES))


def _memory() -> IO[bytes]:
    """A file that no disk has to do with, where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
