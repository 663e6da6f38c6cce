"""The dispatcher's requests to a client's payload stores: to delete objects, and to list them.

    receive --take--> perform, in a thread --answered--> take_answers

Invariant: an answer goes over the connection that its request came on, or is dropped: after a loss
the dispatcher sends the request again, to this client or another one.

Calls into payload stores may block for as long as a file server is away, and have threads of their
own. They are daemons, as an interpreter waits for all others when it exits: a call that hangs would
keep its process from ending.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.protocol import messages as m
from rollout_workers.stores.registry import OpenedStores

Request = m.Free | m.Sweep
Answer = m.Freed | m.Swept


class StoreRequests:
    """Requests that are not answered yet; not thread-safe."""

    def __init__(self) -> None:
        self._new: list[Request] = []
        self._open: list[Request] = []
        self._answers: list[Answer] = []

    def receive(self, request: Request) -> None:
        """A request came."""
        self._new.append(request)

    def take(self) -> list[Request]:
        """Requests to perform now; call `answered` for each in the end."""
        taken, self._new = self._new, []
        self._open += taken
        return taken

    def answered(self, request: Request, answer: Answer) -> None:
        """A request is performed."""
        before = len(self._open)
        self._open = [one for one in self._open if one is not request]
        if len(self._open) < before:
            self._answers.append(answer)

    def take_answers(self) -> Iterator[Answer]:
        """Answers to send now; each counts as sent once yielded."""
        while self._answers:
            yield self._answers.pop(0)

    def lost(self) -> None:
        """The connection is over."""
        self._new, self._open, self._answers = [], [], []


def perform(stores: OpenedStores, request: Request) -> Answer:
    """Delete or list; blocks. An error of the store is part of the answer."""
    try:
        if isinstance(request, m.Free):
            there = set(stores.release(request.store, request.keys))
            left = [key for key in request.keys if key in there]
            why = f"{request.store} has not released them; the log says more" if left else ""
            return m.Freed(number=request.number, left=left, why=_short(why))
        found = stores.list(request.store, request.prefix)
    except StoreFailed as error:
        return failed(request, error)
    keys = [key for key in found if 0 < len(key) <= m.MAX_KEY_LETTERS]
    return m.Swept(number=request.number, keys=keys[: m.MAX_KEYS], more=len(keys) > m.MAX_KEYS)


def failed(request: Request, why: object) -> Answer:
    """The answer to a request that failed as a whole."""
    if isinstance(request, m.Free):
        return m.Freed(number=request.number, left=request.keys, why=_short(why))
    return m.Swept(number=request.number, why=_short(why))


def _short(why: object) -> str:
    return str(why)[: m.MAX_WHY_LETTERS]


T = TypeVar("T")
_Call = Callable[[], None]


class DaemonExecutor(Executor):
    """Runs calls in at most `count` threads, which are started as calls come."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Raises RuntimeError after `shutdown`, and where no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is shut down")
            if self._threads < self._count:
                name = f"{self._name}-{self._threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
                self._threads += 1
            self._calls.put(lambda: _call(future, fn, *args, **kwargs))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Accept no more calls; those that were submitted still run, and this does not wait."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or its arguments would stay until the next


def _call(future: Future[T], fn: Callable[..., T], *args: Any, **kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = fn(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(found)
