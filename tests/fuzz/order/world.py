"""A dispatcher without sockets or files: a real router and core, a log in memory, virtual time.

It can crash: the next one goes on from what was durable, and all connections are lost.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout_dispatcher.core import facts as f
from rollout_dispatcher.core.config import SteadyClock
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.router import Router
from tests.fuzz.order.books import Books
from tests.fuzz.order.line import Line, VirtualLoop
from tests.support.core.memory import Memory

DP_SIZE, BATCH, BUDGET = 2, 4, 64
#: What a connection may be told in an Error; anything else is a fault of ours.
KNOWN_CODES = frozenset(
    {"protocol", "rank-refused", "fenced", "checkpoint", "version", "stopping", "frame-too-large"}
)

_COMMON: dict[str, Any] = {
    "dp_size": DP_SIZE,
    "global_batch_size": BATCH,
    "micro_batch_tokens": BUDGET,
    "max_wait": 1.0,
    "group_timeout": 5.0,
    "producer_timeout": 5.0,
    "max_open_steps": 3,
}
_JOURNAL = {"journal_dir": Path("in-memory")}
#: Settings by which promises differ.
CONFIGS: dict[str, ServeConfig] = {
    "in memory": ServeConfig(**_COMMON),
    "journal": ServeConfig(**_COMMON, **_JOURNAL, sample_retention="commit", max_staleness=2),
    "retains": ServeConfig(**_COMMON, **_JOURNAL, final_batch="drop"),
    "tight": ServeConfig(
        **_COMMON, **_JOURNAL, buffer_bytes=4096, blocked_push_bytes=1024, incomplete_groups="keep"
    ),
}


@dataclass(frozen=True, slots=True)
class _Batch:
    lsn: int
    facts: Sequence[f.Fact]
    totals: Mapping[str, object]


class MemoryLog:
    """A journal in memory; what was appended is durable when it is told to `sync`."""

    failure: JournalError | None = None

    def __init__(self, memory: Memory, books: Books, first: int) -> None:
        self.on_durable: Callable[[int], None] = lambda _: None
        self.on_broken: Callable[[JournalError], None] = lambda _: None
        self.on_capacity: Callable[[], None] = lambda: None
        self._memory, self._books = memory, books
        self._queue: deque[_Batch] = deque()
        self.last = first

    def capacity(self, wanted: int = 0) -> int:
        """There is always room."""
        return max(wanted, 1 << 40)

    def append(self, facts: Sequence[f.Fact], totals: Mapping[str, object]) -> int:
        """Queue what the core has decided, as it is now."""
        self.last += 1
        self._queue.append(_Batch(self.last, [_copy(fact) for fact in facts], dict(totals)))
        self._books.noted(facts)
        return self.last

    def fetch(self, ticket: int) -> bytes:
        """What was durable."""
        return self._memory.payload(ticket)

    def sync(self, batches: int, *, tell: bool = True) -> None:
        """So many more batches are durable, and the barrier hears of it unless the process died."""
        for _ in range(min(batches, len(self._queue))):
            batch = self._queue.popleft()
            self._memory.note(batch.facts, batch.totals)
            self._books.durable(batch.facts)
            if tell:
                self.on_durable(batch.lsn)


def _copy(fact: f.Fact) -> f.Fact:
    """A sample's entry changes later; what is written of it does not."""
    if isinstance(fact, f.Accepted):
        return replace(fact, entry=replace(fact.entry, oldest=None))
    return fact


class World:
    """One run of the dispatcher, however many processes it takes.

    prompt: what the core decides is durable at once, or when `sync` is called.
    """

    def __init__(self, loop: VirtualLoop, kind: str) -> None:
        self.loop = loop
        self.config = CONFIGS[kind]
        self.durable = self.config.journal_dir is not None
        self.books = Books()
        self.books.retains = self.config.retains
        self.prompt = True
        self.clock = SteadyClock(loop.time)
        self.lines: list[Line] = []
        self._memory = Memory()
        self._runs = self._last = 0
        self._begin(f.RecoveredState())

    # -- the process

    def _begin(self, remembered: f.RecoveredState) -> None:
        self._runs += 1
        core = replace(core_config(self.config), durable=True)
        self.core = DispatcherCore(core, f"run-{self._runs}")
        self.log = MemoryLog(self._memory, self.books, self._last)
        restored = self.core.restore(remembered, self.clock())
        metrics = Metrics(self.config, self.core, self.clock)
        journal = self.log if self.durable else None
        self.router = Router(self.config, self.core, metrics, self.clock, journal)
        if journal is None:
            self.router.barrier.note = self._note  # type: ignore[method-assign]
        elif restored.facts:
            self.log.append(restored.facts, restored.totals)
            self.log.sync(1)
        self.router.perform(self.core.tick(self.clock()))

    def _note(self, facts: Sequence[f.Fact], totals: Mapping[str, object]) -> None:
        """Without a journal what is decided is as durable as it gets."""
        if facts:
            self.log.append(facts, totals)
            self.log.sync(1)

    def crash(self, kept: int) -> None:
        """The process dies; of what was on its way to the disk so many batches have arrived."""
        if not self.durable:
            return
        self.log.sync(kept, tell=False)
        self._last = self.log.last
        self.end()
        self.books.crashed()
        self._begin(self._memory.remembered())

    def end(self) -> None:
        """Let go of the process and its connections."""
        self.router.close()
        for line in self.lines:
            line.cut()
        self.lines.clear()

    # -- what happens

    def connect(self, hear: Callable[[Line, m.Message, memoryview], None]) -> Line:
        """A connection to it."""
        line = Line(self.router, self.clock, hear)
        self.lines.append(line)
        return line

    def after(self, seconds: float) -> None:
        """Time passes."""
        self.loop.now += seconds
        self.router.close_silent(0.0)
        self.router.keep_pace(0.0)

    def sync(self, batches: int = 1 << 30) -> None:
        """What was decided becomes durable."""
        if self.durable:
            self.log.sync(batches)

    def check(self) -> None:
        """What is true at any moment."""
        if (failure := self.router.failure) is not None:
            raise failure
        at, decided = self.core.statistics(), self.books.decided
        assert at.balanced, "the books do not balance"
        assert at.accepted == len(decided.accepted), "accepted and not noted"
        self.lines = [line for line in self.lines if line.open]
        for line in self.lines:
            assert line.failed is None or line.failed.code in KNOWN_CODES, line.failed
