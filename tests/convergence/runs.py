"""Runs: one policy trained through a real dispatcher.

In the closed loop the policy at hand writes what comes next, as much as it trains on. Long answers
are there beforehand, so every way to choose trains on the very same samples.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean
from typing import Any

from rollout_dispatcher import Dispatcher, ServeConfig
from rollout_planner.types import Layout
from rollout_workers import RolloutProducer, RolloutSample
from rollout_workers.client.process import LoopThread
from tests.convergence import answers
from tests.convergence.evaluation import by_digits, expected_reward
from tests.convergence.policy import Policy
from tests.convergence.rollouts import Rollout, Rollouts, without_the_longest
from tests.convergence.trainer import Trainer, Training, cross_entropy, grpo

#: Rollouts of which the longest tenth is dropped, so that a batch is left.
BATCH_AND_A_TENTH = 80
DROPPED = 0.1


class Task(StrEnum):
    """What is learnt."""

    CLOSED = "closed-loop"
    LONG = "long-answers"


class Arm(StrEnum):
    """What happens to samples on their way to training."""

    FIFO = "fifo"
    WINDOW = "window"
    UNBOUNDED = "window-unbounded"
    EXPECTED = "window-unbounded-expected"
    CONTROL = "control"


#: Samples of a step. Advantages come with rollouts, so groups need not stay together, and do not:
#: that is where the window has the most to choose from.
BATCH = {Task.CLOSED: 72, Task.LONG: 64}
#: Samples padded together; the less alike they are, the more there is to gain by choosing.
MICRO_BATCH: dict[Task, dict[str, Any]] = {
    Task.CLOSED: {"micro_batch_size": 9},
    Task.LONG: {"micro_batch_tokens": answers.LONGEST},
}
TRAINING = {
    Task.CLOSED: Training(4, 4e-4, grpo),
    Task.LONG: Training(8, 1e-2, cross_entropy, long=answers.LONG),
}
_FIFO: dict[str, Any] = {"strategy": "round-robin", "window": 1}
_UNBOUNDED = {"strategy": "window", "window": 1.25, "max_step_variation": "off"}
#: How serve chooses in each arm; the control differs from FIFO by what is lost of the longest.
ARMS: dict[Task, dict[Arm, dict[str, Any]]] = {
    Task.CLOSED: {
        Arm.FIFO: _FIFO,
        Arm.WINDOW: {"strategy": "window", "window": 2},
        Arm.CONTROL: _FIFO,
    },
    Task.LONG: {
        Arm.FIFO: _FIFO,
        Arm.WINDOW: {"strategy": "window", "window": 1.25},
        Arm.UNBOUNDED: _UNBOUNDED,
        Arm.EXPECTED: _UNBOUNDED,
        Arm.CONTROL: _FIFO,
    },
}
#: What has to train as FIFO does; that the unbounded window does is not claimed.
CLAIMED = (Arm.WINDOW, Arm.EXPECTED)
#: What the trainer of an arm does otherwise; the control's long samples weigh half.
OTHERWISE: dict[tuple[Task, Arm], dict[str, Any]] = {
    (Task.LONG, Arm.EXPECTED): {"loss_normalisation": "token-mean-expected"},
    (Task.LONG, Arm.CONTROL): {"long_factor": 0.5},
}


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one.

    score: at the end, the expected reward (by class: of each number of digits), or less the loss
    on the longest hundredth of held-out texts (by class: the loss on each). samples: committed.
    staleness, max_staleness: versions behind when trained on, the mean sample and the worst.
    long_weight: what a loss token of the longest hundredth weighed, over the mean token's.
    """

    score: float
    by_class: Mapping[str, float]
    steps: int
    samples: int
    tokens: int
    staleness: float
    max_staleness: int
    long_weight: float | None


def score(task: Task, policy: Policy) -> tuple[float, dict[str, float]]:
    """How good a policy is at a task, see `Run`."""
    if task is Task.CLOSED:
        return expected_reward(policy), dict(zip("123456", by_digits(policy), strict=True))
    found = answers.held_out(policy)
    return -found["longest 1 %"], found


def train(task: Task, arm: Arm, first: Policy, seed: int, steps: int) -> Run:
    """Train a copy of the first policy on `steps` batches."""
    policy = copy.deepcopy(first)
    training = replace(TRAINING[task], **OTHERWISE.get((task, arm), {}))
    with ExitStack() as stack:
        endpoint = stack.enter_context(_dispatcher(task, arm))
        trainer = stack.enter_context(Trainer(policy, endpoint, steps, training))
        producer = stack.enter_context(RolloutProducer(endpoint))
        if task is Task.LONG:
            tokens = _from_examples(producer, answers.Answers(seed), trainer, steps)
        else:
            source = _Source(producer, Rollouts(seed), arm)
            _closed_loop(source, trainer, policy, steps)
            tokens = source.tokens
    found, by_class = score(task, policy)
    return Run(
        score=found,
        by_class=by_class,
        steps=trainer.version,
        samples=trainer.samples,
        tokens=tokens,
        staleness=fmean(trainer.staleness),
        max_staleness=max(trainer.staleness),
        long_weight=trainer.long_weight,
    )


@contextmanager
def _dispatcher(task: Task, arm: Arm) -> Iterator[str]:
    """A dispatcher in a thread of its own; its endpoint. All that it accepts has to be committed.

    It plans when its window is full and no sooner, so that a run repeats itself.
    """
    config = ServeConfig(
        listen=("127.0.0.1:0",),
        http="127.0.0.1:0",
        dp_size=TRAINING[task].ranks,
        global_batch_size=BATCH[task],
        layout=Layout.PADDED,
        max_imbalance=0,
        max_wait=3600,
        **MICRO_BATCH[task],
        **ARMS[task][arm],
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
        self.window = ARMS[Task.CLOSED][arm]["window"]
        self.tokens = 0

    def write(self, policy: Policy) -> list[Rollout]:
        """A batch; every arm sees the same problems, and the control one group more."""
        written = self._rollouts.write(policy, BATCH_AND_A_TENTH)
        if self._arm is Arm.CONTROL:
            return without_the_longest(written, DROPPED)
        return written[: BATCH[Task.CLOSED]]

    def push(self, batch: Sequence[Rollout], version: int) -> None:
        """Push a batch, and wait while there is no room."""
        self.tokens += _push(self.producer, batch, version)


def _push(producer: RolloutProducer, batch: Sequence[Rollout], version: int) -> int:
    producer.push_many([RolloutSample(one.fields, policy_version=version) for one in batch])
    return sum(one.tokens for one in batch)


def _from_examples(
    producer: RolloutProducer, source: answers.Answers, trainer: Trainer, steps: int
) -> int:
    """Push all that a seed has, and train on it; its tokens."""

    def push() -> int:
        tokens = sum(_push(producer, source.write(BATCH[Task.LONG]), 0) for _ in range(steps))
        producer.end_stream()
        return tokens

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push)
        while trainer.train_step():
            pass
        return pushing.result()


def _closed_loop(source: _Source, trainer: Trainer, policy: Policy, steps: int) -> None:
    """A window's worth to begin with, then a batch for every step."""
    pushed = 0
    for step in range(steps):
        while pushed < min(steps, step + source.window):
            source.push(source.write(policy), trainer.version)
            pushed += 1
        if pushed == steps:
            source.producer.end_stream()
        assert trainer.train_step()
    assert not trainer.train_step()
