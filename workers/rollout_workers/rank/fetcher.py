"""The threads of a DP rank that talk to payload stores: they fetch what its core lacks.

A store that cannot be asked is asked again for as long as the step is wanted; only what it says to
be gone is told. What the dispatcher asks of the stores has a thread of its own, so that it waits
for no sample, nor any sample for it.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from rollout_dispatcher.errors import DispatcherError, ProtocolError, StoreFailed
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.role import LOG_INTERVAL_S, Backoff
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.held_steps import Fetch
from rollout_workers.rank.payload import lay_out
from rollout_workers.stores.interface import Missing, Part
from rollout_workers.stores.registry import OpenedStores
from rollout_workers.stores.requests import DaemonExecutor, Request, perform

log = logging.getLogger(__name__)

#: Micro-batches that are fetched at a time: enough for a store to be busy while another one's bytes
#: are copied. With an engine that hands out memory of its own as many are held twice meanwhile.
FETCHED_AT_ONCE = 4
#: Seconds between two tries, at most: every rank waits for the one whose store is back last.
LONGEST_DELAY_S = 1.0


class Fetcher:
    """Serves one core. changed: guards it, and is notified.

    memory: gives what payloads are put together in. spoken: called when the core has something to
    say. failed: called, with `changed` held, when something is wrong that does not go away.
    """

    def __init__(
        self,
        core: RankCore,
        changed: threading.Condition,
        memory: Memory,
        *,
        spoken: Callable[[], object],
        failed: Callable[[DispatcherError], object],
    ) -> None:
        self._core, self._changed, self._memory = core, changed, memory
        self._spoken, self._failed = spoken, failed
        self._stopped = threading.Event()
        self._stores = OpenedStores()
        self._fetching = DaemonExecutor(FETCHED_AT_ONCE, "dispatcher-fetch")
        self._serving = DaemonExecutor(1, "dispatcher-store")

    def start_due(self) -> None:
        """Begin what there is to do; hold `changed`. Cheap where there is nothing."""
        welcome = self._core.welcome
        if welcome is None or not welcome.payload_stores or self._stopped.is_set():
            return
        self._stores.allow(welcome.payload_stores)
        for fetch in self._core.take_fetches():
            self._fetching.submit(self._run, self._fetch, fetch)
        for request in self._core.store_requests.take():
            self._serving.submit(self._run, self._perform, request)

    def stop(self) -> None:
        """End the threads, soon; nobody waits for them."""
        with self._changed:
            self._stopped.set()
            self._fetching.shutdown()
            self._serving.shutdown()
        self._stores.close()

    # -- in the threads

    def _run(self, work: Callable[..., None], what: Fetch | Request) -> None:
        try:
            work(what)
            return
        except DispatcherError as error:
            failure = error
        except Exception as error:
            log.exception("what a DP rank asks of payload stores failed")
            failure = ProtocolError(f"the client failed: {error!r}")
        with self._changed:
            self._failed(failure)
            self._changed.notify_all()

    def _fetch(self, fetch: Fetch) -> None:
        received = fetch.received
        schema = fetch.held.header.schema_
        payload, parts = lay_out(schema, received.header, received.payload, self._memory)
        found = self._get(fetch, payload, parts)
        with self._changed:
            if any(found):
                self._core.missed(fetch, _missing(fetch, found))
            elif found:
                self._core.found(fetch, payload)
            self._changed.notify_all()
            self.start_due()
        self._spoken()

    def _get(
        self, fetch: Fetch, memory: memoryview, parts: Sequence[Sequence[Part]]
    ) -> list[Missing | None]:
        """Which samples the stores lack; nothing at all once it is not wanted any more."""
        backoff, logged = Backoff(math.inf, longest=LONGEST_DELAY_S), -math.inf
        while not self._stopped.is_set():
            with self._changed:
                if not self._core.wanted(fetch):
                    break
            try:
                return self._stores.get_into(fetch.references, memory, parts)
            except StoreFailed as error:
                delay = backoff.failed(now := monotonic()) or 0.0
                if now >= logged + LOG_INTERVAL_S:  # a store may be away for hours
                    step, logged = fetch.held.header.step, now
                    log.warning("step %d: cannot fetch samples: %s; retrying", step, error)
                self._stopped.wait(delay)
        return []

    def _perform(self, request: Request) -> None:
        answer = perform(self._stores, request)
        with self._changed:
            self._core.store_requests.answered(request, answer)
        self._spoken()


def _missing(fetch: Fetch, found: list[Missing | None]) -> dict[str, str]:
    """The samples that are gone, by id, and why."""
    header = fetch.received.header
    placed = [
        sample_id
        for sample_id, place in zip(header.sample_ids, header.places or (), strict=True)
        if place is not None
    ]
    return {
        sample_id: item.why
        for sample_id, item in zip(placed, found, strict=True)
        if item is not None
    }
