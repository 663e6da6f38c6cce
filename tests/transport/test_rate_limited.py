"""Strangers do not flood the log: a few lines of a kind, then how many more."""

import logging

import pytest

from rollout_dispatcher.transport.rate_limited import IN_FULL, WINDOW_SECONDS, RateLimitedLog


class Clock:
    """Says what it is told."""

    reading = 0.0

    def __call__(self) -> float:
        return self.reading


def test_of_each_kind_the_first_are_told_and_the_others_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    log = RateLimitedLog(logging.getLogger("strangers"), clock)
    for number in range(1244):
        log.tell("unauthorized", "connection of %d ended", number)
    log.tell("tls", "a handshake failed")
    assert len(caplog.messages) == IN_FULL + 1
    clock.reading = WINDOW_SECONDS
    log.tell_more()
    log.tell_more()
    assert caplog.messages[IN_FULL + 1 :] == [
        "... and 1,234 more that ended so (unauthorized), in 60 s"
    ]
    log.tell("unauthorized", "connection of %d ended", 1245)
    assert caplog.messages[-1] == "connection of 1245 ended"
