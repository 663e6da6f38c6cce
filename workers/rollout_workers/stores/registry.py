"""The class that serves an address, by its scheme: the part before the colon.

A third party's store is a subclass of `PayloadStore`, named by its scheme in an entry point of its
distribution, which has to be installed where producers and DP ranks run:

    [project.entry-points."rollout_dispatcher.payload_stores"]
    s3 = "their_package.s3:S3Store"

`OpenedStores` are those that one client uses: those that the dispatcher allows, opened when needed.
A put into a store that is down fails late, and the next store can take the object. So after a slow
failure puts skip that store for a while.

Invariant: no address is opened that was not in the last welcome, whatever is in a message.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points
from time import monotonic
from typing import NamedTuple

from pydantic import ValidationError

from rollout_dispatcher.errors import ProtocolError, StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.messages import ObjectHeader
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_workers.stores.interface import Missing, Part, PayloadStore

log = logging.getLogger(__name__)


#: Of third parties' stores.
ENTRY_POINTS = "rollout_dispatcher.payload_stores"
#: Module and class of our own stores, imported when an address needs them, as engines are large.
BUILT_IN = {
    "file": ("rollout_workers.stores.file", "FileStore"),
    "mooncake": ("rollout_workers.stores.mooncake", "MooncakeStore"),
    "ray": ("rollout_workers.stores.ray", "RayStore"),
    "transferqueue": ("rollout_workers.stores.transfer_queue", "TransferQueueStore"),
}


def open_store(address: str) -> PayloadStore:
    """The store at an address, `file:///data/rollouts` say.

    Raises StoreFailed, with a remedy, where it cannot be used from here.
    """
    return store_class(address).open(address)


def store_class(address: str) -> type[PayloadStore]:
    """The class that serves an address; raises StoreFailed."""
    scheme, colon, _ = address.partition(":")
    if not colon:
        raise StoreFailed(address, "an address begins with a scheme, as file:///data/rollouts does")
    try:
        found = _load(scheme)
    except ImportError as error:
        raise StoreFailed(
            address,
            f"what the scheme {scheme} needs cannot be loaded ({error}); install it where "
            "producers and DP ranks run",
        ) from error
    if found is None:
        raise StoreFailed(
            address,
            f"no payload store is installed for scheme {scheme}; known are {', '.join(schemes())}",
        )
    if not (isinstance(found, type) and issubclass(found, PayloadStore)):
        raise StoreFailed(address, f"{found!r}, which serves its scheme, is no PayloadStore")
    return found


def schemes() -> list[str]:
    """Every scheme that is known here."""
    return sorted({*BUILT_IN, *(item.name for item in entry_points(group=ENTRY_POINTS))})


def _load(scheme: str) -> object | None:
    if scheme in BUILT_IN:
        module, name = BUILT_IN[scheme]
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    for item in entry_points(group=ENTRY_POINTS, name=scheme):
        return item.load()  # type: ignore[no-any-return]
    return None


#: The next put tries a store again whose last put failed sooner than this, in seconds.
SLOW_S = 1.0
#: Otherwise puts skip that store for so many times as long, and for at most so many seconds.
PAUSE_RATIO, PAUSE_MOST_S = 10, 600.0


class _Failure(NamedTuple):
    """An error that calls get until that time by the clock."""

    error: Exception
    until: float


class OpenedStores:
    """Calls go to the store that they name, from any thread; each error becomes a StoreFailed.

    But for the ProtocolError of `get_into`, where a store returns another number of bytes. The next
    call tries to open again a store that could not be opened. No engine is closed during a call
    into one, as that ends the process with a SIGSEGV in some (Mooncake).
    """

    def __init__(
        self,
        opener: Callable[[str], PayloadStore] = open_store,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._opener, self._clock = opener, clock
        self._allowed: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._stores: dict[str, PayloadStore] = {}
        self._running, self._closed = 0, False
        #: Of the last put, if it took long; and of the last attempt to open a store.
        self._puts: dict[str, _Failure] = {}
        self._attempts: dict[str, _Failure] = {}

    def allow(self, addresses: Sequence[str]) -> None:
        """Allow these addresses, and no others; puts go to the first."""
        self._allowed = tuple(addresses)

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """Put an object into the first store that takes it."""
        failed: StoreFailed | None = None
        for address in self._allowed:
            if failed is not None:
                log.warning("%s; %s is tried instead", failed, address)
            try:
                return self._put(address, key, spans)
            except StoreFailed as error:
                failed = error
        raise failed or StoreFailed("", "the dispatcher allows no payload store")

    def _put(self, address: str, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """Raises the last error where that was recent, and slow."""
        began, before = self._clock(), self._puts.get(address)
        if before is not None and began < before.until:
            raise before.error
        try:
            with self._asking(address) as store:
                stored = _checked(store.put(key, spans), address, sum(map(len, spans)))
        except StoreFailed as error:
            now = self._clock()
            if (took := now - began) >= SLOW_S:
                pause = min(PAUSE_RATIO * took, PAUSE_MOST_S)
                self._puts[address] = _Failure(error, now + pause)
            raise
        self._puts.pop(address, None)
        return stored

    def get_into(
        self,
        references: Sequence[Reference],
        memory: memoryview,
        parts: Sequence[Sequence[Part]],
    ) -> list[Missing | None]:
        """Copy parts of each reference into memory; None for each that is there.

        An object of which no part is needed counts as there.
        """
        found: list[Missing | None] = [None] * len(references)
        by_store: dict[str, list[int]] = {}
        for at, reference in enumerate(references):
            if parts[at]:
                by_store.setdefault(reference.stored.store, []).append(at)
        for address, places in by_store.items():
            wanted = [references[at] for at in places], memory, [parts[at] for at in places]
            with self._asking(address, ProtocolError) as store:
                for at, missing in zip(places, store.get_into(*wanted), strict=True):
                    found[at] = missing
        return found

    def release(self, address: str, keys: Sequence[str]) -> list[str]:
        """Delete objects; returns the keys of those that remain."""
        with self._asking(address) as store:
            return store.release(keys)

    def list(self, address: str, prefix: str) -> Sequence[str]:
        """The keys of a store's objects that begin so."""
        with self._asking(address) as store:
            return store.list(prefix)

    def close(self) -> None:
        """Close the engines once the last call has returned; accept no more calls."""
        with self._lock:
            self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        """Close all stores, once closed and without a call under way."""
        with self._lock:
            if self._running or not self._closed:
                return
            stores, self._stores = self._stores, {}
        for store in stores.values():
            with suppress(Exception):
                store.close()

    @contextmanager
    def _asking(self, address: str, *passed_on: type[Exception]) -> Iterator[PayloadStore]:
        if address not in self._allowed:
            raise StoreFailed(
                address, "the dispatcher does not allow it; it would be one of --payload-stores"
            )
        with self._lock:
            if self._closed:
                raise StoreFailed(address, "this client is closed")
            self._running += 1
        try:
            yield self._opened(address)
        except Exception as error:  # an engine's own, or a bug in a third party's store
            if isinstance(error, (StoreFailed, *passed_on)):
                raise
            raise StoreFailed(address, repr(error)) from error
        finally:
            with self._lock:
                self._running -= 1
            self._close_idle()

    def _opened(self, address: str) -> PayloadStore:
        with self._lock:
            opening = self._opening.setdefault(address, threading.Lock())
        came = self._clock()
        with opening:  # which may take long: other stores are not in its way
            store = self._stores.get(address)
            if store is None:
                store = self._stores[address] = self._open(address, came)
            return store

    def _open(self, address: str, came: float) -> PayloadStore:
        """A caller that waited while another failed gets that error, and does not wait as long."""
        before = self._attempts.get(address)
        if before is not None and came < before.until:
            raise before.error
        try:
            return self._opener(address)
        except Exception as error:
            self._attempts[address] = _Failure(error, self._clock())
            raise


def _checked(stored: object, address: str, nbytes: int) -> StoredObject:
    """The object that a store's `put` returned, if a push can name it; raises StoreFailed."""
    if not isinstance(stored, StoredObject):
        raise StoreFailed(address, f"its put returns no StoredObject but {stored!r:.200}")
    try:
        ObjectHeader(store=stored.store, key=stored.key, nbytes=stored.nbytes)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise StoreFailed(address, f"no push can name what it has put, {stored}: {why}") from error
    if (stored.store, stored.nbytes) != (address, nbytes):
        raise StoreFailed(address, f"it has put {stored}, and was given {nbytes} bytes")
    return stored
