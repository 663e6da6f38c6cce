"""`dispatcher serve`: one dispatcher in a process of its own, with signals.

The first SIGTERM or SIGINT drains: pushes are refused, buffered samples are dispatched, ranks
receive the stream's end, and the service stops when the last step is committed and the ranks have
left, or after `drain_timeout`. With a journal it stops at once instead, as the next process goes on
from there; so it does while the journal is being read. After the second signal the process has
`QUIT_SECONDS` to end in order, and then exits; a third ends it at once. Invariants: the exit code
is not 0 if any accepted sample is lost; the process is gone `QUIT_SECONDS` after the second signal,
unless the kernel itself blocks.

SIGHUP reads options, tokens and certificates again; SIGUSR1 logs the state of the run; SIGUSR2 is
logged and changes nothing.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.access import Access
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections.descriptors import raise_soft_limit
from rollout_dispatcher.service.dispatcher import Dispatcher
from rollout_dispatcher.service.process import (
    in_own_thread,
    keep_freed_memory,
    name_run,
    set_up,
)
from rollout_dispatcher.transport.turns import FairEventLoop

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Samples are in no reference cycles: collecting them at Python's default pace takes a twentieth of
#: the dispatcher's time.
GC_THRESHOLDS = (10_000, 20, 20)
ENDING = (signal.SIGTERM, signal.SIGINT)
#: Seconds; connections and HTTP requests that hang have two of them.
QUIT_SECONDS = 5
#: Exit code of a process that could not end in order.
FAILURE = 1


class Read(Protocol):
    """The options as they were read: a valid config, and where each option is set."""

    @property
    def config(self) -> ServeConfig:
        """The config."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Flag, variable, or file and line, by option that is set."""


def run(found: Read, read: Callable[[], Read]) -> int:
    """Serve until the stream is done or a signal ends it; returns the exit code.

    read: reads the options again; raises ConfigError.
    """
    config = found.config
    set_up(config.log_level, config.log_format)
    keep_freed_memory()
    raise_soft_limit(config.connection_limits)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=FairEventLoop) as runner:
            return 0 if runner.run(_serve(found, read)) else 1
    finally:
        Signals.ignore()


async def _serve(found: Read, read: Callable[[], Read]) -> bool:
    """Returns whether no accepted sample was lost."""
    dispatcher = Dispatcher(found.config)
    rereading = Rereading(dispatcher, read)
    signals = Signals(
        {
            signal.SIGHUP: rereading.ask,
            signal.SIGUSR1: lambda: _log_state(dispatcher),
            signal.SIGUSR2: lambda: log.info(
                "SIGUSR2: nothing changes; SIGUSR1 logs the state",
                extra={"event": "signal-ignored"},
            ),
        }
    )
    asked = await signals.unless_signalled(dispatcher.start())
    if asked is not None:
        text = "%s: stopped before anything was accepted"
        log.info(text, asked.name, extra={"event": "stopping"})
        return True
    async with AsyncExitStack() as stack:
        stack.push_async_exit(dispatcher)
        name_run(dispatcher.run_id)
        return await _end(dispatcher, signals)


async def _end(dispatcher: Dispatcher, signals: "Signals") -> bool:
    ended = await signals.unless_signalled(dispatcher.drained())
    if isinstance(ended, bool):
        return ended
    if dispatcher.config.journal_dir is not None:
        at = dispatcher.statistics()
        log.info(
            "%s: %d samples buffered and %d in open steps stay in the journal for the next "
            "start; a second signal quits at once", ended.name, at.buffered, at.in_flight,
            extra={"event": "stopping", "step": at.last_committed},
        )  # fmt: skip
        return await signals.unless_signalled(dispatcher.stop()) is True
    log.info(
        "%s: draining for %g s at most (--set drain-timeout), until what is here is trained on and "
        "DP ranks have left; a second signal quits at once",
        ended.name, dispatcher.config.drain_timeout, extra={"event": "draining"},
    )  # fmt: skip
    return await signals.unless_signalled(dispatcher.drain()) is True


def _log_state(dispatcher: Dispatcher) -> None:
    if not dispatcher.endpoints:
        log.info("SIGUSR1: the journal is still being read", extra={"event": "state"})
        return
    at = dispatcher.statistics()
    log.info(
        "SIGUSR1: run %s is %s: %d samples buffered, %d open steps with %d samples, %d steps "
        "committed, %d of %d DP ranks connected",
        at.run_id, at.run_state, at.buffered, at.open_steps, at.in_flight, at.steps_committed,
        at.ranks_connected, at.dp_size, extra={"event": "state", "step": at.last_committed},
    )  # fmt: skip


class Rereading:
    """Reads the options of a dispatcher again on request, one time after the other."""

    def __init__(self, dispatcher: Dispatcher, read: Callable[[], Read]) -> None:
        self._dispatcher, self._read = dispatcher, read
        self._task: asyncio.Task[None] | None = None
        self._is_asked = False

    def ask(self) -> None:
        """Read again, after the present reading if there is one."""
        self._is_asked = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="reread")

    async def _run(self) -> None:
        try:
            while self._is_asked:
                self._is_asked = False
                await self._once()
        finally:
            self._task = None

    async def _once(self) -> None:
        reloads = self._dispatcher.reloads
        if reloads is None:
            log.info(
                "SIGHUP: nothing changes; the journal is still being read",
                extra={"event": "settings-unchanged"},
            )
            return
        try:
            found, access = await in_own_thread(self._read_all)
            reloads.reread(found.config, found.sources)
        except ConfigError as error:
            reloads.refuse(error)
            return
        for change in self._dispatcher.renew(access):
            log.info("SIGHUP: %s", change, extra={"event": "access-renewed"})

    def _read_all(self) -> tuple[Read, Access]:
        """Read from the disk, which may hang."""
        found = self._read()
        return found, found.config.access()


class Signals:
    """Handles signals until the process ends; made on the main thread's event loop.

    Handlers are `signal.signal`'s and not the event loop's, which may hang: in a write to a log
    that nobody reads, for one.

    others: by signal that ends nothing, what to call on the event loop. A signal that has a handler
    already, or is ignored, as under `nohup`, stays so.
    """

    def __init__(self, others: Mapping[signal.Signals, Callable[[], None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._times_asked = 0
        for number in ENDING:
            signal.signal(number, self._end)
        self._others = {
            number: call
            for number, call in others.items()
            if signal.getsignal(number) is signal.SIG_DFL
        }
        for number in self._others:
            signal.signal(number, lambda it, _: self._call(self._others[signal.Signals(it)]))

    @staticmethod
    def ignore() -> None:
        """Ignore signals at the end, so that none changes the exit code."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    async def unless_signalled(self, work: Coroutine[None, None, T]) -> T | signal.Signals:
        """Return the result of the work, or the signal that came first and cancelled it."""
        working, asked = asyncio.create_task(work), asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return asked.result()
            if asked.done():  # at the same moment: the next call returns it
                self._asked.put_nowait(asked.result())
            return working.result()
        finally:
            working.cancel()
            asked.cancel()
            await asyncio.wait({working, asked})

    def _end(self, number: int, _: object) -> None:
        self._times_asked += 1
        if self._times_asked > 2:
            _exit()
        if self._times_asked == 2:
            signal.signal(signal.SIGALRM, _exit)
            signal.alarm(QUIT_SECONDS)
        self._call(self._asked.put_nowait, signal.Signals(number))

    def _call(self, what: Callable[..., object], *values: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the end is near
            self._loop.call_soon_threadsafe(what, *values)


def _exit(*_: object) -> None:
    """End without waiting for other threads, which may hold any lock."""
    os._exit(FAILURE)
