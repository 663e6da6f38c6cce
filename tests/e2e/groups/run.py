"""A dispatcher in use by groups: real ranks, a watch over progress, and every sample's fate.

    with in_use(tmp_path) as run:                          # `dispatcher serve`, and two ranks
        run.produce(together(run.books, run.endpoint, shares(4, 32)))
        found = run.finish()                               # all is committed, all have left
    found.assert_all_committed(run.books, ...)

Where nothing moves for `STALL_S` a run fails, and shows what the dispatcher said of itself.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.groups.found import Found
from tests.e2e.groups.ranks import DP_SIZE, STALL_S, Ranks
from tests.e2e.groups.rollouts import Books, side_by_side
from tests.support.server import ServeProcess

BATCH, WINDOW = 32, 48
#: What a user has to say, and nothing more.
DEFAULTS: dict[str, Any] = {
    "dp_size": DP_SIZE,
    "global_batch_size": BATCH,
    "micro_batch_tokens": 1024,
}
#: What shows progress ...
_MOVES = (
    "samples_received_total{outcome=accepted}", "samples_received_total{outcome=refused}",
    "steps_committed_total", "samples_committed_total", "samples_dropped_total",
)  # fmt: skip
#: ... and where samples are when there is none.
_PLACES = (
    "buffer_samples", "buffer_bytes", "ready_samples", "open_groups", "pushes_held",
    "samples_in_flight",
)  # fmt: skip
#: Far above what the longest of these runs needs on a slow machine.
PATIENCE_S = 75.0


@dataclass
class Run:
    """A dispatcher, its ranks once they have joined, and the books of its producers."""

    server: ServeProcess
    _stack: ExitStack
    books: Books = field(default_factory=Books)
    #: /metrics, four times a second while producers work.
    looks: list[dict[str, float]] = field(default_factory=list, repr=False)
    _ranks: list[Ranks] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """Where producers push."""
        return self.server.endpoint

    def join(self, step_s: float = 0.0, version: Callable[[int], int] | None = None) -> None:
        """The ranks begin to train; step_s: what a step takes at least."""
        pause = threading.Event()
        self._ranks.append(Ranks(self.endpoint, lambda: pause.wait(step_s), version))
        self._stack.callback(self._ranks[-1].close)

    def produce(self, *work: Coroutine[Any, Any, object]) -> None:
        """Run producers to their ends; fails when nothing moves any more."""
        asyncio.run(self._produce(work))

    async def _produce(self, work: Iterable[Coroutine[Any, Any, object]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                await side_by_side(*work)
                watch.cancel()
        except TimeoutError:
            raise AssertionError(f"not done within {PATIENCE_S:g} s: {self.status()}") from None
        except BaseExceptionGroup as several:
            raise _first(several) from None

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        before, since = "", loop.time()
        while True:
            self.looks.append(await asyncio.to_thread(self.server.scrape))
            now = _shown(self.looks[-1], _MOVES)
            if now != before:
                before, since = now, loop.time()
            if loop.time() - since > STALL_S:
                raise AssertionError(f"nothing moves for {STALL_S:g} s: {self.status()}")
            await asyncio.sleep(0.25)

    def status(self) -> str:
        """How far it has come, and where samples are now."""
        return _shown(self.server.scrape(), _MOVES + _PLACES)

    async def until(
        self, true: Callable[[dict[str, float]], object], what: str, within: float = STALL_S
    ) -> None:
        """Wait, bounded, until /metrics satisfies a condition while others work."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within
        while not true(await asyncio.to_thread(self.server.scrape)):
            assert clock() < deadline, f"{what}: not within {within:g} s: {self.status()}"
            await asyncio.sleep(0.05)

    @property
    def trained(self) -> set[str]:
        """Samples of the steps that all ranks have committed by now."""
        first, second = ([step.samples for step in diary] for diary in self._ranks[-1].diaries)
        both = zip(first, second, strict=False)
        return {name for one, other in both for name in one + other}

    def finish(self) -> Found:
        """Wait until all is committed, read the metrics, let all leave; what came of it."""
        steps = self._ranks[-1].await_end()
        self.server.await_status(run_state="drained", balanced=True)
        metrics = self.server.scrape()
        self._ranks[-1].close()
        assert self.server.wait() == 0
        return Found(steps, metrics)


def _shown(metrics: dict[str, float], names: tuple[str, ...]) -> str:
    found = {name: int(value) for name, value in metrics.items() if value}
    return json.dumps({name: value for name, value in found.items() if name.startswith(names)})


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that says most: a failed assertion before what followed from it."""
    flat = [
        _first(one) if isinstance(one, BaseExceptionGroup) else one for one in several.exceptions
    ]
    return next((one for one in flat if isinstance(one, AssertionError)), flat[0])


@contextmanager
def in_use(
    folder: Path, *, ranks: bool = True, step_s: float = 0.0, ballast: int = 0, **options: Any
) -> Iterator[Run]:
    """A dispatcher at defaults but for `options` (None takes one away), and ranks that train.

    ranks: whether they are there from the beginning; step_s: what a step takes at least.
    ballast: bytes that each sample is larger by.
    """
    chosen = {name: value for name, value in (DEFAULTS | options).items() if value is not None}
    chosen = {"checked": False, "warm": "module" not in chosen} | chosen
    with ServeProcess(folder, **chosen) as server, ExitStack() as stack:
        run = Run(server, stack, Books(ballast))
        if ranks:
            run.join(step_s)
        yield run
