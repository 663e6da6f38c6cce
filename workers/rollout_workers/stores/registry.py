"""Which class serves an address: by what the address begins with, before the colon.

A store of somebody else's is a class that does what `PayloadStore` says, named by its scheme in an
entry point of its distribution, which has to be installed where producers and DP ranks run:

    [project.entry-points."rollout_dispatcher.payload_stores"]
    s3 = "their_package.s3:S3Store"

`OpenedStores` are those that one client uses: those that the dispatcher allows, opened when needed.
A store that nobody answers for takes its time to say so, and whoever puts can do without it. So
after that it is not asked to take anything for a while.

Invariant: no address is opened that was not in the last welcome, whatever a message says.
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


#: Where others name theirs.
ENTRY_POINTS = "rollout_dispatcher.payload_stores"
#: Ours: the module and the class of each, loaded when an address asks for it, as engines are large.
BUILT_IN = {
    "file": ("rollout_workers.stores.file", "FileStore"),
    "mooncake": ("rollout_workers.stores.mooncake", "MooncakeStore"),
    "ray": ("rollout_workers.stores.ray", "RayStore"),
    "transferqueue": ("rollout_workers.stores.transfer_queue", "TransferQueueStore"),
}


def open_store(address: str) -> PayloadStore:
    """The store at an address, `file:///data/rollouts` say.

    Raises StoreFailed where it cannot be used from here, in words that say what to do.
    """
    return store_class(address).open(address)


def store_class(address: str) -> type[PayloadStore]:
    """Who serves an address; raises StoreFailed."""
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


#: A put that fails sooner than this is tried again by the next one.
SLOW_S = 1.0
#: Otherwise no put waits for that store for so many times as long, but no longer than the other.
PAUSE_RATIO, PAUSE_MOST_S = 10, 600.0


class _Failure(NamedTuple):
    """What went wrong. until: by the clock, what this stands for."""

    error: Exception
    until: float


class OpenedStores:
    """Calls go to the store that they name, from any thread; whatever goes wrong is a StoreFailed.

    But for the ProtocolError of `get_into`, where a store returns more or less than asked for.
    What could not be opened is tried again by the next call, but for puts. No engine is closed
    while a call is in one, as that ends the process with a SIGSEGV in some (Mooncake).
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
        """From now on these, and no others; the first is where to put."""
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
        """Unless that has just failed, and took long."""
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
        """Parts of each where they belong in some memory; what is missing.

        An object of which nothing is needed counts as there.
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
        """The keys of what is still there."""
        with self._asking(address) as store:
            return store.release(keys)

    def list(self, address: str, prefix: str) -> Sequence[str]:
        """The keys of what is there that begin so."""
        with self._asking(address) as store:
            return store.list(prefix)

    def close(self) -> None:
        """Let go of the engines, with the end of the last call that is in one; take no more."""
        with self._lock:
            self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        """Of all, if it is time to."""
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
        except Exception as error:  # an engine's own, or a mistake in somebody's store
            if isinstance(error, (StoreFailed, *passed_on)):
                raise
            raise StoreFailed(address, repr(error)) from error
        finally:
            with self._lock:
                self._running -= 1
            self._let_go()

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
        """Who came while somebody else failed to is told that, rather than waits as long again."""
        before = self._attempts.get(address)
        if before is not None and came < before.until:
            raise before.error
        try:
            return self._opener(address)
        except Exception as error:
            self._attempts[address] = _Failure(error, self._clock())
            raise


def _checked(stored: object, address: str, nbytes: int) -> StoredObject:
    """What a store's `put` returns, if a push can say so; raises StoreFailed."""
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
