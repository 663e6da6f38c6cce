"""A stream tells what its micro-batches took, with their commit, without a line in the loop."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from rollout_workers import MicroBatchStream
from tests.workers.support.peers import Peer, ScriptedDispatcher, micro_batch, sample, step

TAKES_S = 0.05


class Joined:
    """A stream and the dispatcher's end of it."""

    def __init__(
        self,
        dispatcher: ScriptedDispatcher,
        threads: ThreadPoolExecutor,
        **options: int,
    ) -> None:
        where: dict[str, Any] = {"dp_rank": 0, "dp_size": 1} | options
        joining = threads.submit(MicroBatchStream, dispatcher.endpoint, generation=5, **where)
        self.peer: Peer = dispatcher.accept()
        self.peer.welcome_rank(generation=5)
        self.stream: MicroBatchStream = joining.result(10)

    def train(self, number: int) -> None:
        """The loop of a trainer, on a step of two micro-batches."""
        self.peer.send(step(number, 2))
        self.peer.send(m.Release(step=number))
        for index in range(2):
            self.peer.send_bytes(micro_batch(number, index, sample([1, 2])))
        taken = next(self.stream)
        for _ in taken:
            time.sleep(TAKES_S)
        taken.commit()

    def heard(self, last: type[m.Message]) -> list[m.Message]:
        """What the dispatcher hears, up to a message of this kind, but for demands."""
        messages: list[m.Message] = []
        while not messages or not isinstance(messages[-1], last):
            messages.append(self.peer.expect(m.Message))
        return [one for one in messages if not isinstance(one, (m.Demand, m.Prepared))]


def assert_is_told(told: m.PassTimes) -> None:
    """What the loop of `Joined.train` takes."""
    assert told.cost_key == "update"
    assert told.collective_s == [0, 0]
    assert len(told.busy_s) == 2
    assert all(TAKES_S <= busy < 20 * TAKES_S for busy in told.busy_s)


def test_it_is_told_with_the_commit(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    joined = Joined(dispatcher, threads)
    with joined.stream:
        for number in range(2):
            joined.train(number)
            (commit,) = joined.heard(m.Commit)
            assert isinstance(commit, m.Commit)
            assert commit.step == number
            assert commit.times is not None
            (told,) = commit.times
            assert_is_told(told)
        dispatcher.hang_up()


def test_nothing_is_timed_if_the_trainer_does_not_want_it(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    joined = Joined(dispatcher, threads, measure=False)
    with joined.stream:
        joined.train(0)
        joined.train(1)
        assert joined.heard(m.Commit) + joined.heard(m.Commit) == [
            m.Commit(step=0), m.Commit(step=1),
        ]  # fmt: skip
        dispatcher.hang_up()


def test_what_cannot_be_told_apart_is_said_to_the_dispatcher_and_once_in_the_log(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Two DP ranks without a process group: nobody can see how they wait for each other."""
    joined = Joined(dispatcher, threads, dp_size=2)
    with joined.stream, caplog.at_level(logging.WARNING, "rollout_workers"):
        for number in range(5):
            joined.train(number)
            commit = joined.heard(m.Commit)[-1]
            assert isinstance(commit, m.Commit)
            assert commit.times is not None
            (told,) = commit.times
            assert told.collective_s is None
            assert "no process group joins this rank with other DP ranks" in told.why
        dispatcher.hang_up()
    timing = [record for record in caplog.records if "timing" in record.name]
    (line,) = (record.getMessage() for record in timing)
    assert "what DP ranks lose by waiting for each other is not measured (update)" in line
    assert "step.waiting()" in line


def test_a_model_that_waits_for_nobody_cannot_be_measured(
    dispatcher: ScriptedDispatcher, threads: ThreadPoolExecutor
) -> None:
    joined = Joined(dispatcher, threads)
    with joined.stream, pytest.raises(ConfigError, match=r"no DistributedDataParallel .*waiting"):
        joined.stream.measure_model(nn.Linear(2, 2))
    dispatcher.hang_up()
