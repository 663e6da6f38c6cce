"""What every thread and task does, for the log: who is stuck, and where; a line each.

    thread MainThread: be_stuck (demo.py:7) < _run (events.py:84) < run (runners.py:118) < ...

A thread of its own asks, so it works while the event loop is stuck, and is told as soon as anything
can be. Frames are read under the interpreter's lock: faulthandler waits for no lock, reads them
while other threads change them, and now and then kills the process that it looks at. Invariant:
however many there are, it is `MAX_STACKS` lines of each kind and `MAX_FRAMES` calls a line at most.
"""

import asyncio
import contextlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType

log = logging.getLogger(__name__)

MAX_STACKS, MAX_FRAMES = 64, 16


class Stacks:
    """The stacks of this process; `loop`: whose tasks are shown."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._telling = threading.Lock()

    def tell(self) -> None:
        """Log threads and tasks as they are; from any thread, waits for nothing.

        The log may hang, as whoever reads it may. Where no thread is to be had any more nothing is
        told: whoever asks hears signals, and goes on doing so.
        """
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._tell, name="stacks", daemon=True).start()

    def _tell(self) -> None:
        if not self._telling.acquire(blocking=False):
            return  # one that hangs is enough
        try:
            found = [*_threads()]
            # The same task often, as that of a connection, is shown once and counted.
            tasks = Counter(map(_task, asyncio.all_tasks(self._loop)))
            for line in (*bounded(found), *bounded(map(_counted, tasks.most_common()))):
                log.info("%s", line)
        finally:
            self._telling.release()


def bounded(lines: Iterable[str]) -> Iterator[str]:
    """The first of them, and how many are left out."""
    rest = iter(lines)
    yield from islice(rest, MAX_STACKS)
    if more := sum(1 for _ in rest):
        yield f"({more} more)"


def _threads() -> Iterator[str]:
    """A line for each thread but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # noqa: SLF001  documented
        if ident != threading.get_ident():
            calls = [_frame(call) for call in islice(_callers(frame), MAX_FRAMES + 1)]
            yield f"thread {names.get(ident, '')}: {_chain(calls)}"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _task(task: "asyncio.Task[object]") -> str:
    coroutine = task.get_coro()
    calls = [_frame(frame) for frame in reversed(task.get_stack(limit=MAX_FRAMES))]
    return f"task {getattr(coroutine, '__qualname__', coroutine)}: {_chain(calls)}"


def _counted(found: tuple[str, int]) -> str:
    text, count = found
    return f"{count} times {text}" if count > 1 else text


def _frame(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"


def _chain(calls: list[str]) -> str:
    """The innermost call first."""
    return " < ".join(calls[:MAX_FRAMES] + ["..."] * (len(calls) > MAX_FRAMES))
