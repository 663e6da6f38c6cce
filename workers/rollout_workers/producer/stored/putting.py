"""The threads of a producer that talk to payload stores, for its event loop.

Puts have threads of their own, so that what the dispatcher asks of the stores never waits behind a
large object.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import StoredObject
from rollout_workers.client.liveness import CLOSE_TIMEOUT_S
from rollout_workers.producer.core import ProducerCore
from rollout_workers.producer.stored.placing import Put
from rollout_workers.stores.daemon_executor import DaemonExecutor
from rollout_workers.stores.opened import OpenedStores
from rollout_workers.stores.requests import Request, failed, perform

log = logging.getLogger(__name__)

#: Objects that are put at a time: one thread alone does not keep a network file system busy.
PUT_AT_ONCE = 4
#: Between two words on a store that takes nothing, at least.
WARNING_INTERVAL_S = 10.0


class Putting:
    """Does what a core has to do with payload stores; used in one event loop alone.

    changed: called when the core may have something to say, or has settled something.
    """

    def __init__(self, core: ProducerCore, changed: Callable[[], object]) -> None:
        self._core, self._changed = core, changed
        self._stores = OpenedStores()
        self._putting = DaemonExecutor(PUT_AT_ONCE, "rollout-put")
        self._serving = DaemonExecutor(1, "rollout-store")
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned = -math.inf

    def look(self) -> None:
        """Begin what there is to do. Cheap where there is nothing."""
        objects = self._core.objects
        if not objects.stores:
            return
        self._stores.allow(objects.stores)
        for put in objects.take_puts():
            self._begin(self._put(put))
        for request in objects.requests.take():
            self._begin(self._perform(request))
        for stored in objects.take_orphans():
            self._begin(self._release(stored))

    async def finish(self) -> None:
        """Let what was begun come to its end, for a bounded time; nothing can be begun after."""
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
        """Say that it is so, and not of every push."""
        now = monotonic()
        if now >= self._warned + WARNING_INTERVAL_S:
            self._warned = now
            log.warning("%s; samples are sent to the dispatcher instead", error)

    async def _perform(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._serving, perform, self._stores, request)
        except RuntimeError as error:  # there is no thread for it
            answer = failed(request, error)
        self._core.objects.requests.answered(request, answer)
        self._go_on()

    async def _release(self, stored: StoredObject) -> None:
        loop = asyncio.get_running_loop()
        with suppress(StoreFailed, RuntimeError):  # it is swept when this producer has ended
            await loop.run_in_executor(
                self._serving, self._stores.release, stored.store, [stored.key]
            )

    def _go_on(self) -> None:
        self.look()
        self._changed()
