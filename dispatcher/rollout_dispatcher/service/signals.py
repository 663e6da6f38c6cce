"""Signals of the process, heard by a thread of its own whatever the event loop waits for.

    SIGTERM, SIGINT   the first and the second are told; after the second the process has
                      `QUIT_SECONDS` to end in order, and is ended then; a third ends it at once
    others            are told as often as they come, and end nothing

A signal is handled in whichever thread the kernel picks. The main thread blocks those that are
heeded, so that it may hang on a disk or a log that nobody reads and they are heard all the same.
Invariant: once asked twice, the process is gone within `QUIT_SECONDS`, unless the kernel itself
cannot let go of it.

What every thread and task does, for the log: who is stuck, and where; a line each.

    thread MainThread: be_stuck (demo.py:7) < _run (events.py:84) < run (runners.py:118) < ...

A thread of its own asks, so it works while the event loop is stuck, and is told as soon as anything
can be. Frames are read under the interpreter's lock: faulthandler waits for no lock, reads them
while other threads change them, and now and then kills the process that it looks at. Invariant:
however many there are, it is `MAX_STACKS` lines of each kind and `MAX_FRAMES` calls a line at most.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from itertools import islice
from time import monotonic
from traceback import walk_stack
from types import FrameType, MappingProxyType
from typing import NoReturn, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

ENDING = (signal.SIGTERM, signal.SIGINT)
#: Connections that hang have two seconds at the end, and so have requests over HTTP.
QUIT_SECONDS = 5.0
#: Nothing is to be done at once about any signal.
NOTHING: Mapping[signal.Signals, Callable[[], None]] = MappingProxyType({})
#: What a process exits with that could not end in order.
FAILURE = 1


class Signals:
    """Heeds signals from its making until the process ends; made on the main thread's event loop.

    others: what is done on the event loop about signals that end nothing; one that has a handler
    already, or is ignored, as under `nohup`, keeps it. at_once: what is done about them before, by
    the thread that hears them, whatever the event loop waits for; it must wait for nothing.
    """

    def __init__(
        self,
        others: Mapping[signal.Signals, Callable[[], None]],
        at_once: Mapping[signal.Signals, Callable[[], None]] = NOTHING,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
        free = {number for number in others if signal.getsignal(number) is signal.SIG_DFL}
        self._told: dict[signal.Signals, Callable[[signal.Signals], object]]
        self._told = dict.fromkeys(ENDING, self._asked.put_nowait)
        self._told |= {number: lambda it: others[it]() for number in free}
        self._at_once = {number: at_once[number] for number in free & at_once.keys()}
        self._heard, written = socket.socketpair()
        written.setblocking(False)
        self._written = written  # kept: the interpreter knows it by its number alone
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        for number in self._told:
            signal.signal(number, _do_nothing)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._told)  # the thread above has them open

    @staticmethod
    def heed_no_more() -> None:
        """The process ends, with an exit code that no signal changes: the interpreter on its way
        out would let it be killed.
        """
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    async def unless_asked(self, work: Coroutine[None, None, T]) -> T | signal.Signals:
        """What comes of the work; or the signal that came before it, which cancels the work."""
        working, asked = asyncio.create_task(work), asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return asked.result()
            if asked.done():  # at the same moment: it is heeded next
                self._asked.put_nowait(asked.result())
            return working.result()
        finally:
            working.cancel()
            asked.cancel()
            await asyncio.wait({working, asked})

    def _listen(self) -> None:
        asked, deadline = 0, None
        while True:
            self._heard.settimeout(None if deadline is None else max(0.001, deadline - monotonic()))
            try:
                numbers = self._heard.recv(64)
            except TimeoutError:
                _exit()
            for number in set(numbers) & set(self._told) - set(ENDING):
                if (at_once := self._at_once.get(signal.Signals(number))) is not None:
                    at_once()
                self._tell(signal.Signals(number))
            for number in filter(ENDING.__contains__, numbers):
                asked += 1
                if asked > 2:
                    _exit()
                if asked == 2:
                    deadline = monotonic() + QUIT_SECONDS
                self._tell(signal.Signals(number))

    def _tell(self, number: signal.Signals) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the end is near
            self._loop.call_soon_threadsafe(self._told[number], number)


def _exit() -> NoReturn:
    """End without waiting for anything: other threads may never return, and hold any lock."""
    os._exit(FAILURE)


def _do_nothing(*_: object) -> None:
    """What the interpreter calls; the thread has heard of it without."""


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
            tasks = Counter(map(_task, asyncio.all_tasks(self._loop))).most_common()
            told = (f"{count} times {text}" if count > 1 else text for text, count in tasks)
            for line in (*bounded(found), *bounded(told)):
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
            yield f"thread {names.get(ident, '')}: {_chain(walk_stack(frame))}"


def _task(task: "asyncio.Task[object]") -> str:
    coroutine, stack = task.get_coro(), reversed(task.get_stack(limit=MAX_FRAMES))
    chain = _chain((frame, frame.f_lineno) for frame in stack)
    return f"task {getattr(coroutine, '__qualname__', coroutine)}: {chain}"


def _chain(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost call first."""
    calls = [
        f"{frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]}:{line})"
        for frame, line in islice(frames, MAX_FRAMES + 1)
    ]
    return " < ".join(calls[:MAX_FRAMES] + ["..."] * (len(calls) > MAX_FRAMES))
