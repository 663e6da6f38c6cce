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
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.rollouts import Books, Prompt, group_of, tokens_of
from tests.support.server import ServeProcess
from workers import MicroBatchStream

DP_SIZE, BATCH, WINDOW = 2, 32, 48
#: What a user has to say, and nothing more.
DEFAULTS: dict[str, Any] = {
    "dp_size": DP_SIZE,
    "dispatch_batch_size": BATCH,
    "micro_batch_tokens": 1024,
}
#: No sample is accepted, committed or dropped for so long while producers want to go on: stuck.
STALL_S = 15.0
#: What /metrics says of where samples are, and of progress.
_STANDING = (
    "samples_received_total{outcome=accepted}", "samples_received_total{outcome=refused}",
    "buffer_samples", "buffer_bytes", "ready_samples", "open_groups", "pushes_held",
    "samples_in_flight", "steps_committed_total", "samples_committed_total",
    "samples_dropped_total",
)  # fmt: skip
#: Far above what the longest of these runs needs on a slow machine.
PATIENCE_S = 75.0


@dataclass(frozen=True, slots=True)
class Trained:
    """One step as one rank applied it."""

    number: int
    digest: str
    samples: list[str]


class Ranks:
    """A process group as threads, each with a `MicroBatchStream`; checks each sample's tokens.

    pace: waits as long as a step takes. version: policy version that a step trains with, if any.
    """

    def __init__(
        self, endpoint: str, pace: Callable[[], object], version: Callable[[int], int] | None = None
    ) -> None:
        self._pace, self._version = pace, version
        first = MicroBatchStream(endpoint, dp_rank=0, dp_size=DP_SIZE)
        second = MicroBatchStream(endpoint, dp_rank=1, dp_size=DP_SIZE, generation=first.generation)
        self._streams = [first, second]
        self.diaries: list[list[Trained]] = [[], []]
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(rank,), name=f"rank {rank}")
            for rank in range(DP_SIZE)
        ]
        for thread in self._threads:
            thread.start()

    def await_end(self) -> dict[int, list[str]]:
        """Wait for the stream's end; the samples of each step. Fails where ranks disagree."""
        for thread in self._threads:
            thread.join(STALL_S)
            assert not thread.is_alive(), f"{thread.name} waits for a step, or for the end"
        assert self._errors == []
        first, second = self.diaries
        assert [(at.number, at.digest) for at in first] == [(at.number, at.digest) for at in second]
        return {a.number: a.samples + b.samples for a, b in zip(first, second, strict=True)}

    def close(self) -> None:
        """End the streams, wherever they are, and the threads."""
        for stream in self._streams:
            stream.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _guarded(self, rank: int) -> None:
        try:
            self._train(rank)
        except BaseException as error:  # told by whoever waits for this rank
            self._errors.append(error)

    def _train(self, rank: int) -> None:
        stream = self._streams[rank]
        self._report(stream, 0)
        for step in stream:
            samples: list[str] = []
            for micro_batch in step:
                if not micro_batch.is_filler:
                    _check_tokens(micro_batch)
                    samples += micro_batch.sample_ids
            self._pace()
            step.commit()
            self.diaries[rank].append(Trained(step.number, step.digest, samples))
            self._report(stream, step.number + 1)

    def _report(self, stream: MicroBatchStream, step: int) -> None:
        if self._version is not None:
            stream.set_policy_version(self._version(step))


def _check_tokens(micro_batch: Any) -> None:
    bounds = micro_batch.cu_seqlens.tolist()
    ids = micro_batch.input_ids.numpy().reshape(-1)
    for at, name in enumerate(micro_batch.sample_ids):
        assert np.array_equal(ids[bounds[at] : bounds[at + 1]], tokens_of(name)), name


def dropped(metrics: Mapping[str, float]) -> dict[str, int]:
    """Accepted samples that were given up, by reason."""
    prefix = "samples_dropped_total{reason="
    return {
        name.removeprefix(prefix).rstrip("}"): int(value)
        for name, value in metrics.items()
        if name.startswith(prefix) and value
    }


@dataclass(frozen=True)
class Found:
    """What came of a run. metrics: /metrics after the last commit."""

    steps: dict[int, list[str]]
    metrics: dict[str, float]

    @cached_property
    def committed(self) -> set[str]:
        """Samples of committed steps; fails on one that is there twice."""
        counts = Counter(name for names in self.steps.values() for name in names)
        assert {name: count for name, count in counts.items() if count > 1} == {}
        return set(counts)

    @property
    def dropped(self) -> dict[str, int]:
        """Accepted samples that were given up, by reason."""
        return dropped(self.metrics)

    def groups_of(self, step: int) -> int:
        """Different groups in a step."""
        return len({group_of(name) for name in self.steps[step]})

    def planned(self, trigger: str) -> int:
        """Steps that were planned for this reason."""
        return int(self.metrics.get(f"steps_planned_total{{trigger={trigger}}}", 0))

    def assert_accounted(self, books: Books, *, unheard: Iterable[str] = ()) -> None:
        """Every accepted sample is committed or counted as dropped; the books balance.

        unheard: samples whose producer did not live to hear the answer.
        """
        perhaps = set(unheard) - books.accepted
        assert self.committed <= books.accepted | perhaps
        received = int(self.metrics["samples_received_total{outcome=accepted}"])
        assert len(books.accepted) <= received <= len(books.accepted | perhaps)
        assert received == len(self.committed) + sum(self.dropped.values())
        assert self.metrics["samples_committed_total"] == len(self.committed)
        assert self.metrics["steps_committed_total"] == len(self.steps)
        for still in ("buffer_samples", "samples_in_flight", "open_groups", "pushes_held"):
            assert self.metrics[still] == 0, still
        assert self.split_groups == {}

    @property
    def split_groups(self) -> dict[str, set[int]]:
        """Steps of the groups that are in more than one."""
        places: defaultdict[str, set[int]] = defaultdict(set)
        for number, names in self.steps.items():
            for name in names:
                places[group_of(name)].add(number)
        return {name: found for name, found in places.items() if len(found) > 1}

    def assert_all_committed(self, books: Books, shares: Iterable[Iterable[Prompt]]) -> None:
        """Every sample of every prompt is in a whole step; nothing was refused or dropped."""
        wanted = {name for share in shares for prompt in share for name in prompt.samples}
        assert books.refused == {}
        assert books.accepted == wanted
        assert self.dropped == {}
        assert self.committed == wanted
        self.assert_accounted(books)
        assert self.metrics["small_steps_total"] == 0


@dataclass
class Run:
    """A dispatcher, its ranks once they have joined, and the books of its producers."""

    server: ServeProcess
    _stack: ExitStack
    books: Books = field(default_factory=Books)
    #: /metrics, four times a second while producers work.
    looks: list[dict[str, float]] = field(default_factory=list, repr=False)
    #: Set when producers have done their work.
    produced: threading.Event = field(default_factory=threading.Event)
    _ranks: list[Ranks] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """Where producers push."""
        return self.server.endpoint

    def join(self, step_s: float = 0.0, version: Callable[[int], int] | None = None) -> None:
        """The ranks begin to train; step_s: what a step takes at least."""
        pause = threading.Event()
        self._join(lambda: pause.wait(step_s), version)

    def join_slower_than_producers(self) -> None:
        """The ranks begin to train, and are with each step until the window is full again."""
        self._join(self._until_full, None)

    def _join(self, pace: Callable[[], object], version: Callable[[int], int] | None) -> None:
        self._ranks.append(Ranks(self.endpoint, pace, version))
        self._stack.callback(self._ranks[-1].close)

    def _until_full(self) -> None:
        while not self.produced.wait(0.02):
            now = self.server.scrape()
            if now["ready_samples"] >= now["window_samples"]:
                return

    def produce(self, *work: Coroutine[Any, Any, object]) -> None:
        """Run producers to their ends; fails when nothing moves any more."""
        try:
            asyncio.run(self._produce(work))
        finally:
            self.produced.set()

    async def _produce(self, work: Iterable[Coroutine[Any, Any, object]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                async with asyncio.TaskGroup() as producers:
                    for one in work:
                        producers.create_task(one)
                watch.cancel()
        except TimeoutError:
            raise AssertionError(f"not done within {PATIENCE_S:g} s: {self.standing()}") from None
        except BaseExceptionGroup as several:
            raise _first(several) from None

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        before, since = "", loop.time()
        while True:
            now = await asyncio.to_thread(self.standing)
            if now != before:
                before, since = now, loop.time()
            assert loop.time() - since < STALL_S, f"nothing moves for {STALL_S:g} s: {now}"
            await asyncio.sleep(0.25)

    def standing(self) -> str:
        """Where samples are now, and what tells progress from none."""
        self.looks.append(self.server.scrape())
        return json.dumps(
            {
                name: value
                for name, value in self.looks[-1].items()
                if name.startswith(_STANDING) and value
            }
        )

    async def until(
        self, true: Callable[[dict[str, float]], object], what: str, within: float = STALL_S
    ) -> None:
        """Wait, bounded, until /metrics satisfies a condition while others work."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within
        while not true(await asyncio.to_thread(self.server.scrape)):
            assert clock() < deadline, f"{what}: not within {within:g} s: {self.standing()}"
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
        self.server.await_status(phase="drained", balanced=True)
        metrics = self.server.scrape()
        self._ranks[-1].close()
        assert self.server.wait() == 0
        return Found(steps, metrics)


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
