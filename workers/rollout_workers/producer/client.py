"""The asyncio shell around `ProducerCore`: callers wait here for the answers to their pushes.

The core decides which pushes are outstanding and which message is sent next. Cancelling a wait
withdraws its push if the dispatcher certainly does not hold it, and changes nothing else.

Worker threads call the payload stores. Puts have threads of their own, so that the dispatcher's
requests never wait behind a large object.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from rollout_dispatcher.errors import (
    BufferFull,
    ClientClosed,
    DispatcherError,
    PushTimeout,
    RunChanged,
    SampleRefused,
    StoreFailed,
)
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.protocol.sessions import Side
from rollout_dispatcher.sample import Outcome
from rollout_workers.client.connector import Connector, Credentials
from rollout_workers.client.process import OwnProcess, new_client_id
from rollout_workers.client.role import CLOSE_TIMEOUT_S, Role
from rollout_workers.feedback import Feedback
from rollout_workers.producer.core import ProducerCore, Settled
from rollout_workers.producer.encode import EncodedSample
from rollout_workers.producer.pushes import GRACE_S, Put, batches
from rollout_workers.stores.registry import OpenedStores
from rollout_workers.stores.requests import DaemonExecutor, Request, failed, perform

log = logging.getLogger(__name__)

#: A producer receives outcomes only: a short word or an error message per sample.
LIMITS = FrameLimits(header=16 * 1024 * 1024, payload=0)
#: Seconds after which a producer's first blocked push is logged; doubled for each further line, as
#: a slow trainer blocks every push for a while.
BLOCKED_LOG_S = 30.0
#: Seconds after which the end of a group, phase or stream that waits for a blocked push is logged.
CONTROL_LOG_S = 10.0
#: Samples that an error names.
NAMED = 4


class ProducerClient:
    """One producer's connection, for as long as the producer lives; not thread-safe.

    on_schema: called with the run's schema. raises_run_change: whether a change of the run ends it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        reconnect_timeout: float,
        credentials: Credentials,
        on_schema: Callable[[m.SchemaKnown | None], None],
        *,
        raises_run_change: bool,
    ) -> None:
        self._endpoint, self._credentials = endpoint, credentials
        self._reconnect_timeout = reconnect_timeout
        self._process = OwnProcess("producer")
        self._raises_run_change = raises_run_change
        self._core = ProducerCore(new_client_id(), on_schema, self._run_changed)
        self._putting = Putting(self._core, self._worked)
        self._waiting: dict[int, asyncio.Future[Settled]] = {}
        self._listening: set[asyncio.Future[None]] = set()
        self._connector: Connector | None = None
        self._task: asyncio.Task[None] | None = None
        self._welcomed: asyncio.Future[None] | None = None
        self._failure: DispatcherError | None = None
        self._blocked_log_s = BLOCKED_LOG_S

    async def start(self) -> None:
        """Connect; returns when welcomed, raises DispatcherError for a permanent failure."""
        self._process.check()
        loop = asyncio.get_running_loop()
        self._welcomed = loop.create_future()
        role = Role(self._core, Side.PRODUCER, LIMITS, self._on_received)
        self._connector = connector = Connector(
            loop, self._endpoint, role, self._credentials, self._reconnect_timeout
        )
        self._task = loop.create_task(self._run(connector), name="rollout-producer")
        try:
            await self._welcomed
        except BaseException:
            await self.close()
            raise

    async def deliver(
        self, samples: Sequence[EncodedSample], timeout: float | None
    ) -> list[Outcome | SampleRefused]:
        """Push samples and wait for an answer to each; the core takes all of them or none.

        Raises BufferFull or PushTimeout after `timeout` seconds; a note on the error says
        whether the samples were withdrawn.
        """
        connector = self._check()
        handles: list[int] = []
        reminder = asyncio.get_running_loop().call_later(self._blocked_log_s, self._log_blocked)
        try:
            for batch in batches(samples, self._core.max_payload_bytes):
                handles.append(self._core.submit(batch))
                self._expect(handles[-1])
            self._putting.start_due()
            connector.pump()
            async with asyncio.timeout(timeout):
                settled = [await self._waiting[handle] for handle in handles]
        except TimeoutError:
            raise self._give_up(handles, timeout, samples) from None
        except BaseException:
            self._give_up(handles, timeout, samples)
            raise
        finally:
            reminder.cancel()
            for handle in handles:
                self._waiting.pop(handle, None)
        return [outcome for item in settled for outcome in item.outcomes]

    def _log_blocked(self) -> None:
        if (cap := self._core.blocked) is not None:
            full = _buffer_full(cap)
            log.warning("a push has been blocked for %g s: %s", self._blocked_log_s, full)
            self._blocked_log_s *= 2

    def _log_waiting(self, what: str) -> None:
        if (cap := self._core.blocked) is not None:
            text = "%s has waited %g s for a push begun before it: %s"
            log.warning(text, what, CONTROL_LOG_S, _buffer_full(cap))

    async def control(self, message: m.CloseGroup | m.EndPhase | m.EndStream) -> None:
        """Send a control message behind the pushes it is about; returns once it is confirmed."""
        connector = self._check()
        handle = self._core.control(message)
        future = self._expect(handle)
        connector.pump()
        reminder = asyncio.get_running_loop().call_later(
            CONTROL_LOG_S, self._log_waiting, type(message).__name__
        )
        try:
            await future
        finally:
            reminder.cancel()
            self._waiting.pop(handle, None)
            self._core.forget(handle)

    @property
    def core(self) -> ProducerCore:
        """Its state, which any thread may read. Raises ConfigError in a forked child."""
        self._process.check()
        return self._core

    async def next_feedback(self, after: Feedback, timeout: float | None) -> Feedback:
        """Wait until the feedback differs from `after`, for at most `timeout` seconds."""
        self._check()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while (found := self._core.flow.feedback()) == after:
                    news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._listening.add(news)
                    try:
                        await news
                    finally:
                        self._listening.discard(news)
                return found
        return self._core.flow.feedback()

    async def close(self) -> None:
        """Say goodbye and end the connection; pending calls raise ClientClosed."""
        if not self._process.is_here:
            return
        task, self._task = self._task, None
        if task is None or self._connector is None:
            return
        closed = ClientClosed("the producer is closed")
        self._failure = self._failure or closed
        self._connector.leave()
        try:
            await asyncio.wait([task])  # the goodbye is bounded in time
        finally:  # a cancelled close closes too, with a shorter goodbye
            task.cancel()
            self._fail(closed)
        await asyncio.wait([task])
        self._core.conflicts.end()
        await self._putting.finish()

    def _give_up(
        self, handles: Sequence[int], timeout: float | None, samples: Sequence[EncodedSample]
    ) -> Exception:
        """Withdraw unanswered pushes, release the caller's arrays; return the error to raise."""
        waiting = [(handle, self._waiting[handle]) for handle in handles]
        # Cancelling a wait cancels the future that it is for.
        left = [handle for handle, future in waiting if future.cancelled() or not future.done()]
        now = asyncio.get_running_loop().time()
        given_up = [self._core.abandon(handle, now) for handle in left]
        if given_up and self._connector is not None:
            self._connector.copy_unsent()
            self._putting.start_due()
            self._connector.pump()  # reports of missing members are sent later
        sample_ids = tuple(sample.sample_id or "" for sample in samples)
        names = ", ".join(sample_ids) if len(sample_ids) <= NAMED else "its sample_ids"
        caps = [blocked for _, blocked in given_up if blocked is not None]
        if len(left) == len(handles) and all(withdrawn for withdrawn, _ in given_up):
            fate = (
                "the push was withdrawn; an earlier push of the same sample_id may still be "
                f"accepted. A group that lacks it is given up unless it is pushed again within "
                f"{GRACE_S:.0f} s, under the same sample_id, which this error has: {names}"
            )
        else:
            fate = (
                "samples of this push were or may still be accepted; push them again under the "
                f"same sample_id only, which this error has: {names}"
            )
        if not caps:
            text = f"the dispatcher did not answer within {timeout} s; {fate}"
            return PushTimeout(text, sample_ids)
        error = _buffer_full(caps[0])
        error.sample_ids = sample_ids
        error.add_note(fate)
        return error

    def _expect(self, handle: int) -> asyncio.Future[Settled]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[handle] = future
        return future

    def _check(self) -> Connector:
        self._process.check()
        if self._failure is not None:
            raise self._failure
        if self._connector is None:
            raise ClientClosed("the producer is not started; use `async with` or call start()")
        return self._connector

    def _run_changed(self, change: RunChanged) -> None:
        if self._raises_run_change:
            raise change
        log.warning("%s", change)

    def _on_received(self) -> None:
        """The core has handled messages: start its store work, and wake waiting calls."""
        self._putting.start_due()
        self._notify()

    def _worked(self) -> None:
        """Store work is done: it may have settled a push, or queued a message."""
        self._notify()
        if self._connector is not None:
            self._connector.pump()

    def _notify(self) -> None:
        for settled in self._core.take_settled():
            future = self._waiting.get(settled.handle)
            if future is not None and not future.done():
                future.set_result(settled)
        if self._welcomed is not None and self._core.welcomed and not self._welcomed.done():
            self._welcomed.set_result(None)
        for news in self._listening:
            if not news.done():
                news.set_result(None)

    def _fail(self, error: DispatcherError) -> None:
        self._failure = self._failure or error
        for future in (self._welcomed, *self._waiting.values(), *self._listening):
            if future is not None and not future.done():
                future.set_exception(self._failure)
                future.exception()  # mark it retrieved: perhaps no call waits any more

    async def _run(self, connector: Connector) -> None:
        failure = await connector.run()
        if failure is not None:
            self._fail(failure)


def _buffer_full(cap: m.Blocked) -> BufferFull:
    return BufferFull(cap.cap, cap.held, cap.capacity, cap.waits_for)


#: Objects put at a time: one thread alone does not saturate a network file system.
PUT_AT_ONCE = 4
#: Seconds between two log lines on a failing store, at least.
WARNING_INTERVAL_S = 10.0


class Putting:
    """Performs a core's work on payload stores; used in one event loop alone.

    changed: called when the core may have a message to send, or has settled a push.
    """

    def __init__(self, core: ProducerCore, changed: Callable[[], object]) -> None:
        self._core, self._changed = core, changed
        self._stores = OpenedStores()
        self._putting = DaemonExecutor(PUT_AT_ONCE, "rollout-put")
        self._serving = DaemonExecutor(1, "rollout-store")
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned = -math.inf

    def start_due(self) -> None:
        """Begin all due work. Cheap if there is none."""
        objects = self._core.objects
        if not objects.stores:
            return
        self._stores.allow(objects.stores)
        for put in objects.pop_puts():
            self._begin(self._put(put))
        for request in objects.requests.take():
            self._begin(self._perform(request))
        for stored in objects.pop_orphans():
            self._begin(self._release(stored))

    async def finish(self) -> None:
        """Wait for running work, for a bounded time; no work can begin afterwards."""
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
            if not done:
                log.warning("a payload store does not answer; what was put there may be left")
                break
        self._putting.shutdown()
        self._serving.shutdown()
        self._stores.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _put(self, put: Put) -> None:
        loop = asyncio.get_running_loop()
        try:
            stored = await loop.run_in_executor(self._putting, self._stores.put, put.key, put.spans)
        except (StoreFailed, RuntimeError) as error:
            self._warn(error)
            self._core.was_not_put(put, error)
        else:
            self._core.was_put(put, stored)
        self._go_on()

    def _warn(self, error: Exception) -> None:
        """Log a failing store, but not for every push."""
        now = monotonic()
        if now >= self._warned + WARNING_INTERVAL_S:
            self._warned = now
            log.warning("%s; samples are sent to the dispatcher instead", error)

    async def _perform(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._serving, perform, self._stores, request)
        except RuntimeError as error:  # the executor has shut down
            answer = failed(request, error)
        self._core.objects.requests.answered(request, answer)
        self._go_on()

    async def _release(self, stored: StoredObject) -> None:
        loop = asyncio.get_running_loop()
        with suppress(StoreFailed, RuntimeError):  # a sweep after this producer's end finds it
            await loop.run_in_executor(
                self._serving, self._stores.release, stored.store, [stored.key]
            )

    def _go_on(self) -> None:
        self.start_due()
        self._changed()
