"""A DP rank hears of another attempt at a step, or that a step is none any more."""

import pytest

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from tests.workers.rank.cores import connected, deliver, hear, reconnect
from tests.workers.support.peers import sample, step


def attempt(number: int, at: int) -> m.StepHeader:
    return step(number, digest=f"d{at}", attempt=at)


def test_a_new_attempt_takes_the_place_of_what_is_held_and_is_trained_alone() -> None:
    core = connected(prefetch=2, max_open_steps=4)
    hear(core, attempt(0, 0), step(1))
    deliver(core, 0)
    assert hear(core, attempt(0, 1)) == [m.Prepared(step=0, digest="d1", attempt=1)]
    assert core.hello().received == [(0, 0), (1, 0)]
    assert core.hello().attempts == [(0, 1)]
    deliver(core, 0, 0, sample([7, 8]), attempt=1)
    hear(core, m.Release(step=0))
    held = core.ready()
    assert held is not None
    assert [received.header.tokens for received in held.micro_batches] == [[2]]


@pytest.mark.parametrize("taken", [False, True])
def test_another_attempt_at_a_step_that_is_released_is_an_error(taken: bool) -> None:
    core = connected(prefetch=2, max_open_steps=4)
    hear(core, attempt(0, 0), m.Release(step=0))
    held = core.ready()
    assert held is not None
    if taken:
        core.take(held)
    assert core.hello().released == 0, "a dispatcher that was restarted knows only from this"
    with pytest.raises(ProtocolError, match="attempt 0, then 1"):
        hear(core, attempt(0, 1))
    with pytest.raises(ProtocolError, match=r"step 0 is withdrawn, and it is (released|taken)"):
        hear(core, m.StepWithdrawn(step=0))


def test_an_earlier_attempt_and_micro_batches_of_another_one_are_errors() -> None:
    core = connected(prefetch=2, max_open_steps=4)
    hear(core, attempt(0, 1))
    with pytest.raises(ProtocolError, match="attempt 1, then 0"):
        hear(core, attempt(0, 0))
    for other in (0, 2):
        with pytest.raises(
            ProtocolError, match=f"of attempt {other} at step 0, of which attempt 1"
        ):
            deliver(core, 0, attempt=other)


def test_a_step_that_is_withdrawn_is_let_go_of_and_its_number_may_come_again() -> None:
    core = connected(prefetch=2, max_open_steps=4)
    hear(core, step(0), attempt(1, 0))
    hear(core, m.StepWithdrawn(step=1))
    assert core.hello().received == [(0, 0)]
    reconnect(core)
    hear(core, m.StepWithdrawn(step=1))  # as it is told again after a reconnect
    assert hear(core, attempt(1, 2)) == [m.Prepared(step=1, digest="d2", attempt=2)]


def test_the_stream_ends_where_the_last_step_is_withdrawn_behind_its_end() -> None:
    core = connected(prefetch=2, max_open_steps=4)
    hear(core, attempt(0, 0), m.End(reason=EndReason.ENDED))
    ended = [(core.exhausted, core.finished)]
    hear(core, m.StepWithdrawn(step=0))
    ended.append((core.exhausted, core.finished))
    assert ended == [(False, False), (True, True)]
