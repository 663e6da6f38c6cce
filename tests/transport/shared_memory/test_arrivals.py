"""Descriptors that wait for their frames: in order, bounded, and never left open."""

import os

import pytest

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.transport.shared_memory.arrivals import Arrivals
from tests.support.descriptors import are_closed_again, open_descriptors


def some(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


def test_they_are_claimed_in_the_order_in_which_they_came() -> None:
    before, arrivals, came = open_descriptors(), Arrivals(4), some(4)
    arrivals.put(came[:1])
    arrivals.put(came[1:])
    assert [arrivals.take(1), arrivals.take(0), arrivals.take(2)] == [came[:1], [], came[1:3]]
    with pytest.raises(ProtocolError, match="speaks of 2 file descriptors, and 1 came"):
        arrivals.take(2)
    arrivals.close()
    assert are_closed_again(before | set(map(str, came[:3])))
    assert set(map(str, came[:3])) <= open_descriptors()
    for one in came[:3]:
        os.close(one)


def test_more_than_may_wait_are_closed_all() -> None:
    before, arrivals, came = open_descriptors(), Arrivals(2), some(3)
    arrivals.put(came[:2])
    with pytest.raises(ProtocolError, match="more than 2"):
        arrivals.put(came[2:])
    assert are_closed_again(before)


def test_what_nobody_claims_ends_with_the_connection() -> None:
    before, arrivals = open_descriptors(), Arrivals(2)
    arrivals.put(some(2))
    del arrivals
    assert are_closed_again(before)


def test_what_is_kept_stays_until_it_is_let_go_or_the_connection_ends() -> None:
    before, arrivals = open_descriptors(), Arrivals(2)
    for end in (arrivals.let_go, arrivals.close):
        arrivals.put(some(1))
        arrivals.kept = [(arrivals.take(1)[0], 8)]
        assert len(open_descriptors()) == len(before) + 1
        end()
        assert open_descriptors() == before
        end()  # once more closes nothing of others'
        assert open_descriptors() == before
