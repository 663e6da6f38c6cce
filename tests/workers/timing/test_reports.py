"""A stream reports the times of its micro-batches with the commit, without a line in the loop."""

import logging
import time
from typing import Any

import pytest
from torch import nn

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from tests.workers.support.peers import ScriptedDispatcher

TAKES_S = 0.05


class Joined:
    """A stream and the dispatcher's end of it."""

    def __init__(self, dispatcher: ScriptedDispatcher, **options: Any) -> None:
        self.stream, self.peer = dispatcher.stream(**options)

    def train(self, number: int) -> None:
        """The loop of a trainer, on a step of two micro-batches."""
        self.peer.give(number, [1, 2], [1, 2])
        taken = next(self.stream)
        for _ in taken:
            time.sleep(TAKES_S)
        taken.commit()

    def received(self, last: type[m.Message]) -> list[m.Message]:
        """What the dispatcher receives, up to a message of this kind, but for demands."""
        messages: list[m.Message] = []
        while not messages or not isinstance(messages[-1], last):
            messages.append(self.peer.expect(m.Message))
        return [one for one in messages if not isinstance(one, (m.Demand, m.Prepared))]


def assert_is_reported(times: m.PassTimes) -> None:
    """What the loop of `Joined.train` takes."""
    assert times.cost_key == "update"
    assert times.collective_s == [0, 0]
    assert len(times.busy_s) == 2
    assert all(TAKES_S <= busy < 20 * TAKES_S for busy in times.busy_s)


def test_times_go_with_the_commit(dispatcher: ScriptedDispatcher) -> None:
    joined = Joined(dispatcher)
    for number in range(2):
        joined.train(number)
        (commit,) = joined.received(m.Commit)
        assert isinstance(commit, m.Commit)
        assert commit.step == number
        assert commit.times is not None
        (times,) = commit.times
        assert_is_reported(times)


def test_nothing_is_timed_if_the_trainer_does_not_want_it(dispatcher: ScriptedDispatcher) -> None:
    joined = Joined(dispatcher, measure=False)
    joined.train(0)
    assert joined.received(m.Commit) == [m.Commit(step=0)]


def test_unknown_waits_are_reported_with_a_reason_and_logged_once(
    dispatcher: ScriptedDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Two DP ranks without a process group: how they wait for each other is unknown."""
    joined = Joined(dispatcher, dp_size=2, generation=1)
    with caplog.at_level(logging.WARNING, "rollout_workers"):
        for number in range(5):
            joined.train(number)
            commit = joined.received(m.Commit)[-1]
            assert isinstance(commit, m.Commit)
            assert commit.times is not None
            (times,) = commit.times
            assert times.collective_s is None
            assert "no process group joins this rank with other DP ranks" in times.why
    timing = [record for record in caplog.records if "timing" in record.name]
    (line,) = (record.getMessage() for record in timing)
    assert "what DP ranks lose by waiting for each other is not measured (update)" in line
    assert "step.waiting()" in line


def test_a_model_that_waits_for_nobody_cannot_be_measured(dispatcher: ScriptedDispatcher) -> None:
    stream, _ = dispatcher.stream()
    with pytest.raises(ConfigError, match=r"no DistributedDataParallel .*waiting"):
        stream.measure_model(nn.Linear(2, 2))
