"""Runs: one policy trained through a real dispatcher, in open loop or in closed loop.

In open loop all rollouts are the first policy's, so every way to choose trains on the very same
samples. In closed loop the policy at hand writes what comes next, as much as it trains on.
"""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from rollout_dispatcher import Dispatcher, ServeConfig
from rollout_dispatcher.plan import Layout
from rollout_workers import RolloutProducer, RolloutSample
from rollout_workers.client.loop_thread import LoopThread
from tests.convergence.evaluation import by_digits, expected_reward
from tests.convergence.policy import Policy
from tests.convergence.rollouts import Rollout, Rollouts, without_the_longest
from tests.convergence.trainer import RANKS, Trainer

#: Samples of a step. Advantages come with them, so groups need not stay together, and do not: that
#: is where the window has the most to choose from.
BATCH = 72
#: Padded together; the less alike the samples of a step, the more there is to gain by choosing.
MICRO_BATCH = 9
#: Rollouts of which the longest tenth is dropped, so that a batch is left.
BATCH_AND_A_TENTH = 80
DROPPED = 0.1
WINDOW_MULTIPLE = 2


class Arm(StrEnum):
    """What happens to samples on their way to training."""

    FIFO = "fifo"
    WINDOW = "window"
    CONTROL = "control"


#: The control differs from FIFO by nothing but what is dropped.
STRATEGIES: dict[Arm, dict[str, Any]] = {
    Arm.FIFO: {"strategy": "round-robin", "window_multiple": 1},
    Arm.WINDOW: {"strategy": "window", "window_multiple": WINDOW_MULTIPLE},
    Arm.CONTROL: {"strategy": "round-robin", "window_multiple": 1},
}


class Loop(StrEnum):
    """Whose rollouts a run trains on."""

    OPEN = "open-loop"
    CLOSED = "closed-loop"


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one.

    reward: expected, at the end; by_digits: of problems of 1, 2, ... digits. samples: committed.
    staleness, max_staleness: versions behind when trained on, the mean sample and the worst.
    """

    reward: float
    by_digits: list[float]
    steps: int
    samples: int
    tokens: int
    staleness: float
    max_staleness: int


def train(loop: Loop, arm: Arm, first: Policy, seed: int, steps: int) -> Run:
    """Train a copy of the first policy on `steps` batches."""
    policy = copy.deepcopy(first)
    with ExitStack() as stack:
        endpoint = stack.enter_context(_dispatcher(arm))
        trainer = stack.enter_context(Trainer(policy, endpoint, steps))
        producer = stack.enter_context(RolloutProducer(endpoint))
        source = _Source(producer, Rollouts(seed), arm)
        if loop is Loop.OPEN:
            _open_loop(source, trainer, first, steps)
        else:
            _closed_loop(source, trainer, policy, steps)
    return Run(
        reward=expected_reward(policy),
        by_digits=by_digits(policy),
        steps=trainer.version,
        samples=trainer.samples,
        tokens=source.tokens,
        staleness=fmean(trainer.staleness),
        max_staleness=max(trainer.staleness),
    )


@contextmanager
def _dispatcher(arm: Arm) -> Iterator[str]:
    """A dispatcher in a thread of its own; its endpoint. All that it accepts has to be committed.

    It plans when its window is full and no sooner, so that a run repeats itself.
    """
    config = ServeConfig(
        listen=("127.0.0.1:0",),
        http="127.0.0.1:0",
        dp_size=RANKS,
        dispatch_batch_size=BATCH,
        layout=Layout.PADDED,
        micro_batch_size=MICRO_BATCH,
        target_excess=0,
        max_wait=3600,
        **STRATEGIES[arm],
    )
    dispatcher, thread = Dispatcher(config), LoopThread("dispatcher")
    try:
        thread.submit(dispatcher.start()).result()
        yield dispatcher.endpoint
        assert thread.submit(dispatcher.drained()).result(), "samples were given up"
    finally:
        thread.finish(dispatcher.stop())
        thread.join(10)


class _Source:
    """Writes rollouts and pushes them, a batch at a time; of the control's the longest are lost."""

    def __init__(self, producer: RolloutProducer, rollouts: Rollouts, arm: Arm) -> None:
        self.producer, self._rollouts, self._arm = producer, rollouts, arm
        self.window = BATCH * (WINDOW_MULTIPLE if arm is Arm.WINDOW else 1)
        self.tokens = 0

    def write(self, policy: Policy) -> list[Rollout]:
        """A batch; every arm sees the same problems, and the control one group more."""
        written = self._rollouts.write(policy, BATCH_AND_A_TENTH)
        if self._arm is Arm.CONTROL:
            return without_the_longest(written, DROPPED)
        return written[:BATCH]

    def push(self, batch: Sequence[Rollout], version: int) -> None:
        """Push a batch, and wait while there is no room."""
        self.tokens += sum(one.tokens for one in batch)
        samples = [RolloutSample(one.fields, policy_version=version) for one in batch]
        self.producer.push_many(samples)


def _open_loop(source: _Source, trainer: Trainer, first: Policy, steps: int) -> None:
    written = [source.write(first) for _ in range(steps)]

    def push() -> None:
        for batch in written:
            source.push(batch, 0)
        source.producer.end_stream()

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push)
        while trainer.train_step():
            pass
        pushing.result()


def _closed_loop(source: _Source, trainer: Trainer, policy: Policy, steps: int) -> None:
    """A window's worth to begin with, then a batch for every step."""
    pushed = 0
    for step in range(steps):
        while pushed < min(steps, step + source.window // BATCH):
            source.push(source.write(policy), trainer.version)
            pushed += 1
        if pushed == steps:
            source.producer.end_stream()
        assert trainer.train_step()
    assert not trainer.train_step()
