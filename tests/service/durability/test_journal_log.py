"""A journal that cannot be written, and one that can again, is told once each, and what to do."""

import pytest

from rollout_dispatcher.errors import JournalFull
from rollout_dispatcher.service.barrier import DurabilityBarrier
from rollout_dispatcher.service.completion import Failure
from rollout_dispatcher.service.reporter import JournalLog
from tests.service.durability.test_barrier import SlowLog


async def test_a_trouble_is_told_when_it_begins_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = SlowLog()
    watch = JournalLog(DurabilityBarrier(log, Failure()))
    watch.check()
    assert caplog.messages == []
    for words in ("no room: free some", "no room at all"):
        log.failure = JournalFull(words)
        watch.check()
    assert caplog.messages == [
        "the journal cannot be written, and nothing is acknowledged: no room: free some"
    ]
    log.failure = None
    watch.check()
    watch.check()
    assert caplog.messages[1:] == [
        "the journal can be written again; what waited for it is answered"
    ]
