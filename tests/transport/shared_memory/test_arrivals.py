"""Descriptors that wait for their frames: in order, bounded, and never left open."""

import os

import pytest

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.transport.shared_memory.arrivals import Arrivals


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def some(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


def test_they_are_claimed_in_the_order_in_which_they_came() -> None:
    arrivals, came = Arrivals(4), some(4)
    arrivals.put(came[:1])
    arrivals.put(came[1:])
    assert [arrivals.take(1), arrivals.take(0), arrivals.take(2)] == [came[:1], [], came[1:3]]
    with pytest.raises(ProtocolError, match="speaks of 2 file descriptors, and 1 came"):
        arrivals.take(2)
    arrivals.close()
    assert [is_open(one) for one in came] == [True, True, True, False]
    for one in came[:3]:
        os.close(one)


def test_more_than_may_wait_are_closed_all() -> None:
    arrivals, came = Arrivals(2), some(3)
    arrivals.put(came[:2])
    with pytest.raises(ProtocolError, match="more than 2"):
        arrivals.put(came[2:])
    assert not any(map(is_open, came))


def test_what_nobody_claims_ends_with_the_connection() -> None:
    arrivals, came = Arrivals(2), some(2)
    arrivals.put(came)
    del arrivals
    assert not any(map(is_open, came))
