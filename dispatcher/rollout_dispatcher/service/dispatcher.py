"""One dispatcher, as an object: what `dispatcher serve` runs, and others in programs of their own.

It lives on the event loop that starts it, is called from there only, and leaves alone what belongs
to the process: signals, logging, the garbage collector, metrics of others. So several may run side
by side. Invariant: whatever was accepted and is given up by its end is named in the log, and
`drain`, `drained` and `stop` say that there was some.
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
from rollout_dispatcher.service.journaling import Opened, Retention, go_on_from, read_journal
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

#: How often the event loop's lateness is measured, and silent peers are looked for.
LAG_PROBE_SECONDS = 0.25
#: How long the journal has to write what nobody waits for any more.
JOURNAL_CLOSE_SECONDS = 10.0
#: How long the record has, which nobody waits for either: a second of events is written in less.
RECORD_CLOSE_SECONDS = 2.0
#: How often it is recorded what is held.
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
        self._begun = self._serves = self._is_over = self._was_told = False
        #: How long the journal has at the end to write what is queued.
        self._journal_patience = JOURNAL_CLOSE_SECONDS

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
        """The run's; with a journal it outlives this dispatcher."""
        return self._started.core.run_id

    def statistics(self) -> Statistics:
        """What it holds and has done so far; also after its end. Raises NotServing before."""
        return self._started.core.statistics()

    # -- its life ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Serve. Raises ConfigError, JournalError, or OSError for an address that is not free, or a
        ready file that cannot be written.

        A large journal takes a while to be read, in a thread; whoever cancels need not wait for it.
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
            self._start_watch(stack, router)
            self._announce(endpoints, str(http))
            self._open = stack.pop_all()
        self.endpoints, self.http_endpoint = endpoints, str(http)
        self._serves = True

    @property
    def reloads(self) -> Reloads | None:
        """The settings in force, and what changes them; None before it serves."""
        return None if self._router is None else self._router.reloads

    def renew(self, access: Access) -> list[str]:
        """Go by tokens and certificates as their files hold them now; returns what has changed."""
        router = self._started
        return router.access.renew(access, router.clock())

    async def drained(self) -> bool:
        """Wait until the stream has ended, every step is committed and everybody has left.

        Returns whether nothing that was accepted was given up. Raises what the dispatcher broke
        with, and NotServing if it is stopped meanwhile.
        """
        router = self._started
        if not self._is_over:
            try:
                await router.finished()
            except Exception:
                self._was_told = True
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
        """Accept nothing more, and wait until what is here is trained on, for `drain_timeout`.

        Where no ranks are, nobody will train on it: it is dropped. With a journal it can wait for
        the next dispatcher instead, after `stop`. Returns and raises as `drained` does; False if
        the time was too short.
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
        """End at once; what is here waits in the journal, or is given up if there is none.

        Connections that hang have some seconds; afterwards nothing is left to the event loop.
        Returns whether nothing that was accepted is given up. Raises what the dispatcher broke
        with, unless it was raised before. Once it has ended: True, and nothing happens.
        """
        kept = await self._end()
        failure = None if self._router is None else self._router.failure
        if failure is not None and not self._was_told:
            self._was_told = True
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
            opened = await in_own_thread(partial(read_journal, config, clock), Opened.let_go)
        config = config.model_copy(update={"max_connections": limits.sample})
        core = DispatcherCore(core_config(config), uuid4().hex)
        metrics = Metrics(config, core, clock)
        journal = None
        if opened is not None:
            journal = go_on_from(opened, config, core, metrics, clock)
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
        router.perform(core.tick(clock()))  # what an earlier process left may be due
        if journal is not None and config.retains:
            self._retention = Retention(config, core, journal, router.perform)
            self._retention.refresh(clock())
        return router

    async def _close_journal(self, journal: "Journal") -> None:
        """Raises JournalError if the journal may lack what it took, and nobody was told that."""
        patience = self._journal_patience
        if await in_own_thread(partial(journal.close, patience)) or not patience:
            return
        if self._router is None or self._router.failure is None:
            failure = journal.failure or JournalError(
                f"the journal was not closed within {patience:g} s: its disk does not answer"
            )
            text = "the journal was not closed in order: %s"
            log.critical(text, failure, extra={"event": "journal-failing"})
            raise failure

    def _record(
        self, stack: AsyncExitStack, core: DispatcherCore, metrics: Metrics
    ) -> RecordWriter | None:
        """Have the run recorded if that is asked for, until the very end."""
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

    def _start_watch(self, stack: AsyncExitStack, router: Router) -> None:
        def over(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                router.fail(error)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        task = asyncio.get_running_loop().create_task(
            _watch(router, self._retention), name="dispatcher-watch"
        )
        task.add_done_callback(over)
        stack.push_async_callback(end)

    async def _end(self) -> bool:
        """Let go of everything; returns whether nothing that was accepted is given up."""
        if not self._serves:
            return True
        self._serves = False
        try:
            return await (self.drained() if self._is_over else self._keep())
        finally:
            await self._open.aclose()

    async def _keep(self) -> bool:
        """With a journal there is nothing to drain: the next process goes on with what is here."""
        router = self._started
        if self.config.journal_dir is None:
            return _name_unfinished(router.core)
        if router.failure is not None:
            return True  # what is durable is
        router.stop(GOES_ON_LATER)
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await router.barrier.settled()
        except BaseException as error:  # what does not come in this time is not waited for again
            self._journal_patience = 0.0
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
    """How many connections there may be. Raises ConfigError where they are too few."""
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
    """Observe the event loop's lag, close silent and slow connections, and write log and record."""
    loop, record_at = asyncio.get_running_loop(), 0.0
    interval = router.config.progress_interval
    run_log = RunLog(router.core, router.health, interval, router.clock())
    while True:
        due, due_by_clock = loop.time() + LAG_PROBE_SECONDS, router.clock() + LAG_PROBE_SECONDS
        await asyncio.sleep(LAG_PROBE_SECONDS)
        router.metrics.event_loop_lag.observe(max(0.0, loop.time() - due))
        away = max(0.0, router.clock() - due_by_clock)
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


def _name_unfinished(core: DispatcherCore) -> bool:
    """Name what an end that was not waited for gives up; returns whether there is nothing."""
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
    """Written beside and renamed, so that whoever waits for it never reads half of it.

    Under a name that nobody knows before: the directory may be one that others write to as well.
    Raises OSError that names `path`.
    """
    beside = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        write_new(beside, text.encode(), mode=0o666, sync=False)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
