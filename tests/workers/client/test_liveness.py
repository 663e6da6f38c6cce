"""Pings, patience and delays, with time as an argument."""

import pytest

from rollout_workers.client.role import LONGEST_DELAY_S, Backoff, Heartbeat


def test_a_ping_is_due_once_an_interval() -> None:
    heartbeat = Heartbeat(5.0, now=0.0)
    assert (heartbeat.wait(0.0), heartbeat.ping_due(4.9)) == (5.0, False)
    assert heartbeat.ping_due(5.0)
    assert (heartbeat.ping_due(5.0), heartbeat.wait(5.0)) == (False, 5.0)


def test_a_peer_that_is_silent_for_three_intervals_is_lost() -> None:
    heartbeat = Heartbeat(5.0, now=0.0)
    assert heartbeat.ping_due(5.0)
    assert heartbeat.ping_due(10.0)
    heartbeat.check(14.9)
    with pytest.raises(ConnectionError, match=r"not answered for 10\.0 s"):
        heartbeat.check(15.0)


def test_a_process_that_was_stopped_itself_does_not_blame_its_peer() -> None:
    heartbeat = Heartbeat(5.0, now=0.0)
    heartbeat.check(1000.0)
    assert heartbeat.ping_due(1000.0)
    heartbeat.received()
    heartbeat.check(2000.0)


def test_delays_grow_and_end_at_the_timeout() -> None:
    backoff, now, delays = Backoff(60.0, uniform=lambda: 1.0), 0.0, []
    while (delay := backoff.failed(now)) is not None:
        delays.append(delay)
        now += delay
    assert delays[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_DELAY_S]
    assert now == pytest.approx(60.0)


def test_who_is_lost_soon_looks_for_the_dispatcher_as_often_as_it_would_ping() -> None:
    backoff = Backoff(60.0, uniform=lambda: 1.0)
    backoff.connected(0.0, heartbeat_interval_s=0.5)
    delays = [backoff.failed(20.0 + at) for at in range(6)]
    assert delays == [0.1, 0.2, 0.4, 0.5, 0.5, 0.5]


def test_a_dispatcher_that_welcomes_and_is_lost_again_is_not_left_alone_for_long() -> None:
    backoff = Backoff(60.0, uniform=lambda: 1.0)
    for attempt in range(20):
        backoff.connected(float(attempt))
        delay = backoff.failed(attempt + 0.5)
        assert delay is not None
        assert delay <= 0.8


def test_a_connection_renews_the_patience_and_a_stable_one_the_short_delays() -> None:
    backoff = Backoff(1.0, uniform=lambda: 1.0)
    assert [backoff.failed(0.0), backoff.failed(0.5)] == [0.1, 0.2]
    backoff.connected(0.9)
    assert backoff.failed(1.5) == 0.4
    backoff.connected(2.0)
    assert backoff.failed(100.0) == 0.1
