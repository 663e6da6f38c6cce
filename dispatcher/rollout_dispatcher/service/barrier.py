"""The durability barrier: effects leave the process once the facts before them are durable.

Peers act on answers, steps and generation numbers, so a crash must not undo those. Each waits here,
in order, for the facts that were noted before it. Without a journal the barrier is always open.

A callback that fails is a bug and ends the service; those behind it run all the same.

The wait is bounded, however long the journal's disk is full: a sender with `MAX_UNANSWERED`
messages waiting is not read from until half of them are answered.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from rollout_dispatcher.core.facts import Fact
from rollout_dispatcher.errors import DispatcherError, JournalError
from rollout_dispatcher.service.completion import Failure

#: Bytes of a sample in the journal beside its payload. Names of more than some forty characters
#: take more, for which the journal has a reserve.
BYTES_BESIDES_PAYLOAD = 2048
#: Messages of one sender that may wait here, of some hundred bytes each; a producer within its
#: credits sends a few dozen before it is answered.
MAX_UNANSWERED = 256
#: A disk that takes so long for a batch is slow: others take milliseconds.
SLOW_SECONDS = 0.25


class Sender(Protocol):
    """A connection whose messages are answered once facts are durable."""

    def hold(self) -> None:
        """Stop reading until `go_on`."""

    def go_on(self) -> None:
        """Read again."""


class Log(Protocol):
    """The journal as the barrier uses it; another thread calls the callbacks."""

    on_durable: Callable[[int], None]
    on_broken: Callable[[JournalError], None]
    on_capacity: Callable[[], None]

    @property
    def failure(self) -> JournalError | None:
        """Why new samples have to be refused, or None."""

    def capacity(self, wanted: int = 0) -> int:
        """Bytes that new samples may take now; `on_capacity` follows if less than `wanted`."""

    def fetch(self, ticket: int) -> bytes:
        """Return the payload of a sample that is held. Raises JournalError."""

    def append(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> int:
        """Queue facts; `on_durable` follows with this number or a later one."""


class DurabilityBarrier:
    """Runs callbacks in order, each when all facts noted before it are durable.

    failure: set when the journal breaks or a callback fails.
    on_capacity: called when the journal may have room that `has_capacity` lacked.
    """

    def __init__(
        self,
        journal: Log | None,
        failure: Failure,
        on_capacity: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._guard, self._fail = journal, failure.guard, failure.fail
        self._noted = self._durable = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._unanswered: Counter[Sender] = Counter()
        #: Since when facts wait for the disk, None while none do; until when it counts as slow.
        self._since: float | None = None
        self._slow_until = -math.inf
        self._clock = clock
        if journal is not None:
            loop = asyncio.get_running_loop()
            journal.on_durable = lambda lsn: _call(loop, self._open, lsn)
            journal.on_broken = lambda error: _call(loop, failure.fail, error)
            journal.on_capacity = lambda: _call(loop, self._guard, on_capacity)

    @property
    def failure(self) -> DispatcherError | None:
        """Why nothing becomes durable at present, or None."""
        return None if self._journal is None else self._journal.failure

    @property
    def is_shut(self) -> bool:
        """Whether an effect has to wait."""
        return bool(self._waiting) or self._durable < self._noted

    def has_capacity(self, samples: int, nbytes: int) -> bool:
        """Return whether the journal has room for samples with `nbytes` of payload together.

        Facts that are not noted yet do not count.
        """
        wanted = nbytes + samples * BYTES_BESIDES_PAYLOAD
        return self._journal is None or self._journal.capacity(wanted) >= wanted

    def is_slow(self) -> bool:
        """Return whether facts wait long for the disk, or did until as long ago."""
        if self.failure is not None:
            return True
        now = self._clock()
        return now < self._slow_until or (
            self._since is not None and now - self._since >= SLOW_SECONDS
        )

    def fetch(self, ticket: int) -> bytes:
        """Return the payload of a sample that only the journal has. Raises JournalError."""
        if self._journal is None:
            raise JournalError(f"there is no journal to read the payload of sample {ticket} from")
        return self._journal.fetch(ticket)

    def note(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> None:
        """Append facts to the journal, with the totals."""
        if facts and self._journal is not None:
            if self._since is None:
                self._since = self._clock()
            self._noted = self._journal.append(facts, totals)

    def after(self, then: Callable[[], None]) -> None:
        """Run `then` once all noted facts are durable; at once if they are."""
        if self.is_shut:
            self._waiting.append((self._noted, then))
            return
        try:  # as `guard` does, which would be a call more for each effect
            then()
        except Exception as error:
            self._fail(error)

    def message_handled(self, sender: Sender) -> bool:
        """Count a handled message of this sender; returns whether its answer waits here."""
        if not self.is_shut:
            return False
        self._unanswered[sender] += 1
        self.after(partial(self._answered, sender))
        if self._unanswered[sender] == MAX_UNANSWERED:
            sender.hold()
        return True

    async def settled(self) -> None:
        """Return once all noted facts are durable."""
        durable = asyncio.Event()
        self.after(durable.set)
        await durable.wait()

    def _answered(self, sender: Sender) -> None:
        self._unanswered[sender] -= 1
        if self._unanswered[sender] == MAX_UNANSWERED // 2:
            sender.go_on()
        if not self._unanswered[sender]:
            del self._unanswered[sender]

    def _open(self, lsn: int) -> None:
        self._durable, now = lsn, self._clock()
        if self._since is not None and now - self._since >= SLOW_SECONDS:
            self._slow_until = 2 * now - self._since
        self._since = None if lsn >= self._noted else now
        while self._waiting and self._waiting[0][0] <= lsn:
            self._guard(self._waiting.popleft()[1])


def _call(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *values: object) -> None:
    """Call on the event loop, from the journal's thread; nothing is left to do on a closed loop."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(what, *values)
