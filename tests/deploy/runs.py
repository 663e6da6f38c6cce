"""A run whose troubles are known: real sockets, ranks in lockstep that train nothing, a producer.

with Run(server.endpoint) as run:
    time.sleep(5)
    run.now.slow_rank = 2  # conditions may change while it runs
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from rollout_dispatcher.protocol import messages as m
from rollout_planner.types import FloatArray
from tests.support.client import PATIENCE_S, Producer, Rank, Trainer

RANKS = 4
BATCH = 16
#: Options of `dispatcher serve` that these runs have, unless told otherwise.
OPTIONS: dict[str, object] = {
    "dp_size": RANKS,
    "global_batch_size": BATCH,
    "micro_batch_size": 2,
    "buffer_capacity": 8 * BATCH,
    "cost": "tokens",
    "groups": "ignore",
}
TRANSPORT_S = 0.002
#: Sigma of the log of what a micro-batch takes beside its cost.
NOISE = 0.01
#: Policy versions.
OLD = 40


def even_lengths(rng: np.random.Generator) -> list[int]:
    """Of a batch: any split of these is nearly even."""
    lengths: list[int] = rng.integers(96, 104, BATCH).tolist()
    return lengths


def tailed_lengths(rng: np.random.Generator) -> list[int]:
    """Of a batch: with one that is far longer than the others together."""
    return [1500, *rng.integers(16, 64, BATCH - 1).tolist()]


def mixed_lengths(rng: np.random.Generator) -> list[int]:
    """Of a batch: short ones and long ones, which a window splits evenly."""
    lengths: list[int] = rng.integers(16, 400, BATCH).tolist()
    return lengths


def long_lengths(rng: np.random.Generator) -> list[int]:
    """Of a batch that fills disks."""
    lengths: list[int] = rng.integers(8000, 9000, BATCH).tolist()
    return lengths


def unwieldy_lengths(rng: np.random.Generator) -> list[int]:
    """Of a larger batch: long ones under a token budget of 512, so no split of these is even."""
    lengths: list[int] = np.minimum(rng.lognormal(4.5, 1, 4 * BATCH) + 1, 500).astype(int).tolist()
    return lengths


@dataclass(slots=True)
class Conditions:
    """What the run is like.

    step_s: how long a step takes while no rank is slow. push_s: pause between batches that a
    producer pushes; None for one when a step is done. slow_rank: needs `slow_factor` times as long.
    lag: policy versions that samples are old. square: a sample of s tokens takes as long as
    s + square * s * s do. separated: whether ranks can tell collectives apart. paused: trainers do
    something else. silent_rank: says nothing. hung_rank: takes a step and gets no further.
    old_every: one of so many batches is by far too old. look_s: pause
    between two looks at what has come for a rank. in_turn: rollouts wait for training, as training
    for rollouts. reports_versions: whether the trainer says which policy version it has.
    """

    step_s: float = 0.4
    push_s: float | None = None
    pushing: bool = True
    slow_rank: int | None = None
    slow_factor: float = 1.4
    lag: int = 1
    square: float = 0.0
    separated: bool = True
    paused: bool = False
    silent_rank: int | None = None
    hung_rank: int | None = None
    old_every: int | None = None
    look_s: float = 0.05
    in_turn: bool = False
    reports_versions: bool = True
    lengths: Callable[[np.random.Generator], list[int]] = even_lengths


@dataclass(slots=True)
class Run:
    """Trainers and a producer, each in a thread; what troubles them is in `now`."""

    endpoint: str
    now: Conditions = field(default_factory=Conditions)
    ranks: list[Rank] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    _version: int = 0
    _pushed: int = 0
    _trained: int = 0
    _paces: dict[object, float] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _steps: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(4))
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for does in (self._train, self._produce):
            self._threads.append(threading.Thread(target=self._until_the_end, args=(does,)))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_S + 5)
        if kind is None and self.failures:
            raise self.failures[0]

    def _until_the_end(self, does: Callable[[], None]) -> None:
        try:
            does()
        except (OSError, EOFError, AssertionError) as error:
            if not self._ended.is_set():
                self.failures.append(error)

    # -- the trainers ------------------------------------------------------------------------

    def _train(self) -> None:
        rng = np.random.default_rng(0)
        with Trainer(self.endpoint, RANKS) as trainer:
            self.ranks = trainer.ranks
            while not self._ended.is_set():
                if not self.now.paused and (parts := self._next(trainer)) is not None:
                    self._step(trainer, parts, rng)
                else:
                    self._breathe(trainer)

    def _breathe(self, trainer: Trainer) -> None:
        """Heartbeats, which also take what has come meanwhile."""
        for rank in trainer.ranks:
            if rank.dp_rank != self.now.silent_rank:
                rank.settle()
        time.sleep(self.now.look_s)

    def _next(self, trainer: Trainer) -> int | None:
        """The next step, once every rank has all of it."""
        if self.now.silent_rank is not None:
            return None
        for rank in trainer.ranks:
            rank.demand(taken=trainer.committed)
        self._breathe(trainer)
        step = trainer.committed + 1
        whole = all(step in rank.steps and rank.steps[step].whole for rank in trainer.ranks)
        return step if whole else None

    def _step(self, trainer: Trainer, step: int, rng: np.random.Generator) -> None:
        self._version = step + 1
        told = m.PolicyVersion(policy_version=self._version, first_step=step)
        if self.now.reports_versions:
            trainer.ranks[0].send(told)
        for rank in trainer.ranks:
            rank.prepare(step)
        parts = [rank.await_release(step) for rank in trainer.ranks]
        for rank in trainer.ranks:
            rank.demand(taken=step, hungry=False)
        tokens = [[head.tokens for head, _ in part.micro_batches] for part in parts]
        compute = self._as_measured(np.array([[*map(self._work, rank)] for rank in tokens]), rng)
        self._compute(trainer, float(compute.max(axis=0).sum()))
        while self.now.hung_rank is not None and not self._ended.is_set():
            self._hang(trainer, self.now.hung_rank)
        trainer.commit(step)
        self._report(trainer.ranks, step, compute)
        for rank in trainer.ranks:
            del rank.steps[step]
        self._trained += 1
        self._steps.release()

    def _work(self, lengths: Sequence[int]) -> float:
        return sum(s + self.now.square * s * s for s in lengths)

    def _compute(self, trainer: Trainer, seconds: float) -> None:
        """A step; in long ones heartbeats go on."""
        over = time.monotonic() + seconds
        while (left := over - time.monotonic()) > 1 and not self._ended.is_set():
            self._breathe(trainer)
            time.sleep(1)
        time.sleep(max(0.0, min(left, 1.0)))

    def _hang(self, trainer: Trainer, hung: int) -> None:
        """The others are in a collective of the step, and this rank is not; heartbeats go on."""
        for rank in trainer.ranks:
            rank.settle(handed_out=1, collectives=int(rank.dp_rank != hung))
        time.sleep(1)

    def _as_measured(self, work: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Seconds: `step_s` in the first step of such lengths, and by the same pace in others."""
        pace = self.now.step_s / float(work.max(axis=0).sum())
        compute = self._paces.setdefault((self.now.lengths, self.now.step_s), pace) * work
        if self.now.slow_rank is not None:
            compute[self.now.slow_rank] *= self.now.slow_factor
        return compute * np.exp(rng.normal(0, NOISE, compute.shape))

    def _report(self, ranks: Sequence[Rank], step: int, compute: FloatArray) -> None:
        """Every rank is in each micro-step as long as the slowest one, and transport."""
        busy = compute.max(axis=0) + TRANSPORT_S
        for rank, own in zip(ranks, compute, strict=True):
            inside = (busy - own).tolist() if self.now.separated else None
            why = "" if self.now.separated else "collectives cannot be timed here"
            rank.send(m.StepTimes(step=step, busy_s=busy.tolist(), collective_s=inside, why=why))

    # -- the producer ------------------------------------------------------------------------

    def _produce(self) -> None:
        rng = np.random.default_rng(1)
        with Producer(self.endpoint, "p") as producer:
            while not self._ended.is_set():
                if self.now.pushing and self._is_time():
                    self._push(producer, self.now.lengths(rng))
                else:
                    producer.ping()
                    time.sleep(0.05)

    def _is_time(self) -> bool:
        if self.now.in_turn:
            time.sleep(0.05)
            return self._pushed == self._trained
        if self.now.push_s is None:
            return self._steps.acquire(timeout=0.05)
        time.sleep(self.now.push_s)
        return True

    def _push(self, producer: Producer, lengths: list[int]) -> None:
        self._pushed += 1
        of_old = self.now.old_every is not None and self._pushed % self.now.old_every == 0
        if of_old:
            self._steps.release()  # nobody trains on it, so it counts for no step
        version = max(0, self._version - (OLD if of_old else self.now.lag))
        first = producer.send_push(lengths, policy_versions=[version] * len(lengths))
        while not self._ended.is_set():
            try:
                message, _ = producer.receive(0.5)
            except TimeoutError:
                continue  # it waits for room
            if isinstance(message, m.Pushed):
                assert message.first_seq == first
                break
            assert isinstance(message, m.Blocked), message
