"""One dispatcher as an object, for `dispatcher serve` and for other programs.

It is used on the event loop that starts it, and changes nothing of the process: no signals,
logging, garbage collection or global metrics, so several may run side by side. Invariant: accepted
samples that are lost at its end are named in the log, and `drain`, `drained` and `stop` return
False.
"""

import asyncio
import contextlib
import json
import logging
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from rollout_dispatcher import __version__
from rollout_dispatcher.core.config import SteadyClock
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.errors import ConfigError, JournalError, NotServing
from rollout_dispatcher.journal.files.disk import write_new
from rollout_dispatcher.record.writer import RecordWriter
from rollout_dispatcher.service.access import Access
from rollout_dispatcher.service.config.checks import warn_if_unknown
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.connections.descriptors import (
    ConnectionLimits,
    fit,
    open_files_limit,
    warn_if_lowered,
)
from rollout_dispatcher.service.journaling import Retention, read_journal, restore
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.planes import http_plane, sample_plane
from rollout_dispatcher.service.process import in_own_thread
from rollout_dispatcher.service.reloading import Reloads
from rollout_dispatcher.service.reporter import RunLog
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.service.step_trace import StepTrace

if TYPE_CHECKING:
    from rollout_dispatcher.journal.journal import Journal

log = logging.getLogger(__name__)

#: Seconds between two probes of the event loop's lag and of silent peers.
LAG_PROBE_SECONDS = 0.25
#: Deadline for the journal's last writes.
JOURNAL_CLOSE_SECONDS = 10.0
#: The same of the record; a second of events is written in less.
RECORD_CLOSE_SECONDS = 2.0
#: Seconds between two records of the state.
RECORD_STATE_SECONDS = 1.0
GOES_ON_LATER = "the dispatcher is stopping; it goes on from its journal when it is started again"


class Dispatcher:
    """A dispatcher from its start to its end; it is started once.

        async with Dispatcher(config) as dispatcher:
            print(dispatcher.endpoint, dispatcher.http_endpoint)
            await dispatcher.drained()

    endpoints, http_endpoint: the addresses in use, as clients take them.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.endpoints: tuple[str, ...] = ()
        self.http_endpoint = ""
        self._router: Router | None = None
        self._retention: Retention | None = None
        self._open = AsyncExitStack()
        self._begun = self._serves = self._is_over = self._failure_raised = False
        #: Deadline for the journal's last writes.
        self._journal_close_seconds = JOURNAL_CLOSE_SECONDS

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            await self.stop()
        else:
            await self._end()

    # -- what it shows ----------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The first address of the sample plane, for `RolloutProducer` and `MicroBatchStream`."""
        if not self.endpoints:
            raise NotServing("the dispatcher was not started, and has no address yet")
        return self.endpoints[0]

    @property
    def run_id(self) -> str:
        """The run's id; with a journal the run outlives this dispatcher."""
        return self._started.core.run_id

    def statistics(self) -> Statistics:
        """Return a snapshot, also after the end. Raises NotServing before the start."""
        return self._started.core.statistics()

    # -- its life ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Serve. Raises ConfigError, JournalError, or OSError for an address that is not free, or a
        ready file that cannot be written.

        A thread reads the journal, which may take a while; a cancelled start does not wait for it.
        """
        if self._begun:
            raise NotServing("a dispatcher is started once; make another one")
        self._begun = True
        warn_if_unknown(self.config)
        async with AsyncExitStack() as stack:
            router = await self._make_router(stack)
            self._router = router
            listening = await stack.enter_async_context(sample_plane(self.config, router))
            http = await stack.enter_async_context(http_plane(self.config, router))
            endpoints = tuple(map(str, listening))
            watch = _watch(router, self._retention)
            stack.callback(asyncio.create_task(watch, name="dispatcher-watch").cancel)
            self._announce(endpoints, str(http))
            self._open = stack.pop_all()
        self.endpoints, self.http_endpoint = endpoints, str(http)
        self._serves = True

    @property
    def reloads(self) -> Reloads | None:
        """The options in force; None before it serves."""
        return None if self._router is None else self._router.reloads

    def renew(self, access: Access) -> list[str]:
        """Use these tokens and certificates; returns what has changed, in words."""
        router = self._started
        return router.access.renew(access, router.clock())

    async def drained(self) -> bool:
        """Wait until the stream has ended, every step is committed and all clients have left.

        Returns whether no accepted sample was lost. Raises the error that the dispatcher failed
        with, and NotServing if it is stopped meanwhile.
        """
        router = self._started
        if not self._is_over:
            try:
                await router.finished()
            except Exception:
                self._failure_raised = True
                raise
            if not self._is_over:
                router.perform(router.core.finish_carried_out())
        losses = router.core.shutdown_drops
        if losses.samples and not self._is_over:
            text = "%s; with --journal-dir they would wait for the next start"
            log.error(text, losses, extra={"event": "samples-lost"})
        self._is_over = True
        return not losses.samples

    async def drain(self) -> bool:
        """Refuse pushes, and wait until all samples are trained on, for `drain_timeout`.

        Without ranks they are dropped; with a journal they can wait for the next dispatcher
        instead, after `stop`. Returns and raises as `drained` does; False after the time-out.
        """
        router = self._serving
        router.drain()
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                return await self.drained()
        except TimeoutError:
            text = "not drained within %g s (--set drain-timeout)"
            log.error(text, self.config.drain_timeout, extra={"event": "not-drained"})
            return False

    async def stop(self) -> bool:
        """End at once; samples stay in the journal, or are lost without one.

        Connections that hang have some seconds; afterwards nothing is left on the event loop.
        Returns whether no accepted sample is lost. Raises the error that the dispatcher failed
        with, unless it was raised before. After the end: returns True, and does nothing.
        """
        kept = await self._end()
        failure = None if self._router is None else self._router.failure
        if failure is not None and not self._failure_raised:
            self._failure_raised = True
            raise failure
        return kept

    # -- inside -----------------------------------------------------------------------------

    @property
    def _started(self) -> Router:
        if self._router is None:
            raise NotServing("the dispatcher was not started")
        return self._router

    @property
    def _serving(self) -> Router:
        router = self._started
        if not self._serves:
            raise NotServing("the dispatcher was stopped")
        return router

    async def _make_router(self, stack: AsyncExitStack) -> Router:
        config, clock = self.config, SteadyClock(asyncio.get_running_loop().time)
        limits = _limits(config)
        opened = None
        if config.journal_dir is not None:
            read = partial(read_journal, config, clock)
            opened = await in_own_thread(read, lambda unused: unused.journal.close(0.0))
        config = config.model_copy(update={"max_connections": limits.sample})
        core = DispatcherCore(core_config(config), uuid4().hex)
        metrics = Metrics(config, core, clock)
        journal = None
        if opened is not None:
            journal = restore(opened, config, core, metrics, clock)
            stack.push_async_callback(self._close_journal, journal)
        origin = clock()
        writer = self._record(stack, core, metrics)
        step_trace = StepTrace(clock, writer, origin)
        stack.callback(step_trace.flush)
        router = Router(
            config, core, metrics, clock, journal,
            access=config.access(), limits=limits, read=self.config, step_trace=step_trace,
        )  # fmt: skip
        stack.callback(router.close)
        stack.push_async_callback(router.hang_up)
        router.perform(core.tick(clock()))  # deadlines of an earlier process may be due
        if journal is not None and config.retains:
            self._retention = Retention(config, core, journal, router.perform)
            self._retention.refresh(clock())
        return router

    async def _close_journal(self, journal: "Journal") -> None:
        """Raises JournalError if appended facts may be lost, and that was not reported before."""
        seconds = self._journal_close_seconds
        if await in_own_thread(partial(journal.close, seconds)) or not seconds:
            return
        if self._router is None or self._router.failure is None:
            failure = journal.failure or JournalError(
                f"the journal was not closed within {seconds:g} s: its disk does not answer"
            )
            text = "the journal was not closed in order: %s"
            log.critical(text, failure, extra={"event": "journal-failing"})
            raise failure

    def _record(
        self, stack: AsyncExitStack, core: DispatcherCore, metrics: Metrics
    ) -> RecordWriter | None:
        """Return the run's record, if there is one; it is closed last."""
        config = self.config
        if config.record_dir is None:
            return None
        header = {
            "run": core.run_id,
            "process": uuid4().hex,
            "release": __version__,
            "unix": round(time.time(), 6),
            "config": config.model_dump(mode="json"),
        }
        writer = RecordWriter(config.record_dir, config.record_bytes, header)
        metrics.watch_record(writer)
        close = partial(writer.close, RECORD_CLOSE_SECONDS)
        stack.push_async_callback(lambda: in_own_thread(close))
        return writer

    async def _end(self) -> bool:
        """Close everything; returns whether no accepted sample is lost."""
        if not self._serves:
            return True
        self._serves = False
        try:
            return await (self.drained() if self._is_over else self._keep())
        finally:
            await self._open.aclose()

    async def _keep(self) -> bool:
        """Wait until the journal has all facts, from which the next process goes on."""
        router = self._started
        if self.config.journal_dir is None:
            return _name_unfinished(router.core)
        if router.failure is not None:
            return True  # what is durable is
        router.stop(GOES_ON_LATER)
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await router.barrier.settled()
        except BaseException as error:  # closing the journal need not wait again
            self._journal_close_seconds = 0.0
            why = router.barrier.failure or "its disk does not answer"
            log.error(
                "the journal could not be written: %s", why, extra={"event": "journal-failing"}
            )
            if not isinstance(error, TimeoutError):
                raise
            return False
        return True

    def _announce(self, endpoints: tuple[str, ...], http_endpoint: str) -> None:
        log.info(
            "run %s: serving samples on %s, HTTP on %s",
            self.run_id, ", ".join(endpoints), http_endpoint,
            extra={"event": "serving", "run_id": self.run_id},
        )  # fmt: skip
        if self.config.ready_file is not None:
            facts = {
                "listen": endpoints,
                "http": http_endpoint,
                "run_id": self.run_id,
                "version": __version__,
            }
            _write_whole(self.config.ready_file, json.dumps(facts) + "\n")


def _limits(config: ServeConfig) -> ConnectionLimits:
    """Return the limits on connections. Raises ConfigError if the ranks need more."""
    asked, limit = config.connection_limits, open_files_limit()
    limits = fit(asked, limit)
    warn_if_lowered(asked, limits, limit)
    if config.dp_size > limits.sample:
        raise ConfigError(
            f"{config.dp_size} DP ranks need as many connections, and {limits.sample} are allowed; "
            f"raise --set max-connections, and the limit on open files (ulimit -n) from {limit}"
        )
    return limits


async def _watch(router: Router, retention: Retention | None) -> None:
    """Watch until cancelled; an error of it is fatal."""
    record_at, interval = 0.0, router.config.progress_interval
    run_log = RunLog(router.core, router.health, interval, router.clock())
    try:
        while True:
            away = await _probe_lag(router)
            router.close_silent(away)
            router.keep_pace(away)
            now = router.clock()
            router.health.refresh(now)
            run_log.check(now)
            router.drops_log.check(now)
            if now >= record_at:
                record_at = now + RECORD_STATE_SECONDS
                router.step_trace.record_state(router.core.statistics)
            if retention is not None:
                retention.refresh(now)
    except Exception as error:
        router.fail(error)


async def _probe_lag(router: Router) -> float:
    """Observe the event loop's lag; returns the seconds in which this process was stopped."""
    loop = asyncio.get_running_loop()
    due, due_by_clock = loop.time() + LAG_PROBE_SECONDS, router.clock() + LAG_PROBE_SECONDS
    await asyncio.sleep(LAG_PROBE_SECONDS)
    router.metrics.event_loop_lag.observe(max(0.0, loop.time() - due))
    return max(0.0, router.clock() - due_by_clock)


def _name_unfinished(core: DispatcherCore) -> bool:
    """Log the samples that are lost at this end; returns whether there are none."""
    at = core.statistics()
    if not at.buffered and not at.in_flight:
        return True
    named = core.name_unfinished()
    log.error(
        "stopped with %d samples buffered and %d in open steps%s",
        at.buffered, at.in_flight, f", which are given up: {named}" if named else "",
        extra={"event": "samples-given-up"},
    )  # fmt: skip
    return False


def _write_whole(path: Path, text: str) -> None:
    """Write a file beside `path` and rename it, so that it is never read by halves.

    Its name cannot be guessed, as others may write to the directory. Raises OSError that names
    `path`.
    """
    beside = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        write_new(beside, text.encode(), mode=0o666, sync=False)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
