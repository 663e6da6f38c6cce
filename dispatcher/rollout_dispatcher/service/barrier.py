"""The barrier: what the core decided leaves the process once what it rests on is durable.

An answer to a producer, a step on its way to a rank, the number of a new generation: whoever hears
of one may act on it, so it must not be forgotten by a crash. Each waits here for the facts that
were noted before it. Order is kept. Without a journal the barrier stands open.

What goes wrong when something is let out is a bug of ours and ends the service; whoever waits
behind it is answered all the same.

What waits is bounded, however long the journal's disk is full: a speaker of whom `MAX_UNANSWERED`
messages wait is not listened to until half of them are through.
"""

import asyncio
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVarTuple

from rollout_dispatcher.core.facts import Fact
from rollout_dispatcher.errors import DispatcherError, JournalError
from rollout_dispatcher.service.completion import Failure

_T = TypeVarTuple("_T")

#: What a sample takes of the journal's log besides its payload. Names of more than some forty
#: characters may take more, which the journal's spare makes up for.
BYTES_BESIDES_PAYLOAD = 2048
#: Messages of one speaker that may wait here. Some hundred bytes each; a producer that respects its
#: credits says a few dozen things at most before it is answered.
MAX_UNANSWERED = 256
#: A disk that takes so long to make a batch durable holds up who waits for it: others take
#: milliseconds.
SLOW_SECONDS = 0.25


class Speaker(Protocol):
    """Whoever says what is answered only when facts are durable."""

    def hold(self) -> None:
        """Be silent until `go_on`."""

    def go_on(self) -> None:
        """Speak."""


class Log(Protocol):
    """What the barrier needs of a journal; the callbacks come from another thread."""

    on_durable: Callable[[int], None]
    on_broken: Callable[[JournalError], None]
    on_capacity: Callable[[], None]

    @property
    def failure(self) -> JournalError | None:
        """Why new samples are to be refused, if they are."""

    def capacity(self, wanted: int = 0) -> int:
        """Bytes that new samples may take now; `on_capacity` follows if less than `wanted`."""

    def fetch(self, ticket: int) -> bytes:
        """The payload of a sample that is neither dropped nor done with. Raises JournalError."""

    def append(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> int:
        """Queue facts; `on_durable` follows with this number or a later one."""


def _nobody_waits() -> None:
    """What `on_capacity` is for those who never ask."""


class DurabilityBarrier:
    """Runs thunks in order, each when all facts noted before it are durable.

    failure: is told when the journal is broken, or a thunk has failed.
    on_capacity: called when the journal may have what `capacity` was asked for and fell short of.
    """

    def __init__(
        self,
        journal: Log | None,
        failure: Failure,
        on_capacity: Callable[[], None] = _nobody_waits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._guard, self._fail = journal, failure.guard, failure.fail
        self._noted = self._durable = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._unanswered: Counter[Speaker] = Counter()
        #: Since when facts wait for the disk, None while none do; until when it counts as slow.
        self._since: float | None = None
        self._slow_until = -math.inf
        self._clock = clock
        if journal is not None:
            loop = asyncio.get_running_loop()
            journal.on_durable = lambda lsn: _tell(loop, self._open, lsn)
            journal.on_broken = lambda error: _tell(loop, failure.fail, error)
            journal.on_capacity = lambda: _tell(loop, self._guard, on_capacity)

    @property
    def failure(self) -> DispatcherError | None:
        """Why nothing becomes durable at present, if so."""
        return None if self._journal is None else self._journal.failure

    @property
    def is_shut(self) -> bool:
        """Whether what is decided now has to wait."""
        return bool(self._waiting) or self._durable < self._noted

    def has_capacity(self, samples: int, nbytes: int) -> bool:
        """Whether the journal takes so many new samples, of so many bytes of payload together.

        What was decided and not noted yet is not counted; whoever decides more has to ask for both.
        """
        wanted = nbytes + samples * BYTES_BESIDES_PAYLOAD
        return self.capacity(wanted) >= wanted

    def capacity(self, wanted: int = 0) -> int:
        """Bytes that new samples may take now; `on_capacity` follows if less than `wanted`."""
        return sys.maxsize if self._journal is None else self._journal.capacity(wanted)

    def is_slow(self) -> bool:
        """Whether the disk keeps facts waiting for long, or did until not longer ago than that."""
        if self.failure is not None:
            return True
        now = self._clock()
        return now < self._slow_until or (
            self._since is not None and now - self._since >= SLOW_SECONDS
        )

    def fetch(self, ticket: int) -> bytes:
        """The payload of a sample that only the journal has. Raises JournalError."""
        if self._journal is None:
            raise JournalError(f"there is no journal to read the payload of sample {ticket} from")
        return self._journal.fetch(ticket)

    def note(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> None:
        """Have facts made durable, and the totals with them."""
        if facts and self._journal is not None:
            if self._since is None:
                self._since = self._clock()
            self._noted = self._journal.append(facts, totals)

    def after(self, then: Callable[[], None]) -> None:
        """Run `then` once everything noted so far is durable; at once if it is."""
        if self.is_shut:
            self._waiting.append((self._noted, then))
            return
        try:  # as `guard` does, which would be a call more for each effect
            then()
        except Exception as error:
            self._fail(error)

    def heard(self, speaker: Speaker) -> bool:
        """A message of this speaker was handled; returns whether its answer waits here."""
        if not self.is_shut:
            return False
        self._unanswered[speaker] += 1
        self.after(partial(self._answered, speaker))
        if self._unanswered[speaker] == MAX_UNANSWERED:
            speaker.hold()
        return True

    async def settled(self) -> None:
        """Return once everything noted so far is durable."""
        durable = asyncio.Event()
        self.after(durable.set)
        await durable.wait()

    def _answered(self, speaker: Speaker) -> None:
        self._unanswered[speaker] -= 1
        if self._unanswered[speaker] == MAX_UNANSWERED // 2:
            speaker.go_on()
        if not self._unanswered[speaker]:
            del self._unanswered[speaker]

    def _open(self, lsn: int) -> None:
        self._durable, now = lsn, self._clock()
        if self._since is not None and now - self._since >= SLOW_SECONDS:
            self._slow_until = 2 * now - self._since
        self._since = None if lsn >= self._noted else now
        while self._waiting and self._waiting[0][0] <= lsn:
            self._guard(self._waiting.popleft()[1])


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[*_T], None], *values: *_T) -> None:
    """Call from the journal's thread; a loop that is closed has nobody left to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(what, *values)
