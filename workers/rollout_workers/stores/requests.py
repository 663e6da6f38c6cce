"""What the dispatcher asks of a client's payload stores: to free objects, and what is there.

    heard --take--> perform, in a thread --answered--> take_answers

Invariant: an answer is said on the connection on which it was asked for, or not at all: after a
loss the dispatcher asks again, this client or another one.
"""

from collections.abc import Iterator

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.protocol import messages as m
from rollout_workers.stores.opened import OpenedStores

Request = m.Free | m.Sweep
Answer = m.Freed | m.Swept


class StoreRequests:
    """Requests that are not answered yet; whoever shares it between threads guards it."""

    def __init__(self) -> None:
        self._new: list[Request] = []
        self._open: list[Request] = []
        self._answers: list[Answer] = []

    def heard(self, request: Request) -> None:
        """The dispatcher has asked for something."""
        self._new.append(request)

    def take(self) -> list[Request]:
        """What is to be performed now; each is `answered` in the end."""
        taken, self._new = self._new, []
        self._open += taken
        return taken

    def answered(self, request: Request, answer: Answer) -> None:
        """It is performed."""
        before = len(self._open)
        self._open = [one for one in self._open if one is not request]
        if len(self._open) < before:
            self._answers.append(answer)

    def take_answers(self) -> Iterator[Answer]:
        """What to say now; taken as said once yielded."""
        while self._answers:
            yield self._answers.pop(0)

    def lost(self) -> None:
        """The connection is over."""
        self._new, self._open, self._answers = [], [], []


def perform(stores: OpenedStores, request: Request) -> Answer:
    """Do what is asked; blocks. What a store cannot do is part of the answer."""
    match request:
        case m.Free():
            return _free(stores, request)
        case m.Sweep():
            return _sweep(stores, request)


def failed(request: Request, why: object) -> Answer:
    """The answer where nothing could be done."""
    if isinstance(request, m.Free):
        return m.Freed(number=request.number, left=request.keys, why=_short(why))
    return m.Swept(number=request.number, why=_short(why))


def _free(stores: OpenedStores, request: m.Free) -> Answer:
    try:
        there = set(stores.release(request.store, request.keys))
    except StoreFailed as error:
        return failed(request, error)
    left = [key for key in request.keys if key in there]
    why = f"{request.store} has not released them; the log says more" if left else ""
    return m.Freed(number=request.number, left=left, why=_short(why))


def _sweep(stores: OpenedStores, request: m.Sweep) -> Answer:
    try:
        found = stores.list(request.store, request.prefix)
    except StoreFailed as error:
        return failed(request, error)
    keys = [key for key in found if 0 < len(key) <= m.MAX_KEY_LETTERS]
    told = keys[: m.MAX_KEYS]
    return m.Swept(number=request.number, keys=told, more=len(told) < len(keys))


def _short(why: object) -> str:
    return str(why)[: m.MAX_WHY_LETTERS]
