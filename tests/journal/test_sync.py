"""A batch is durable when its policy says so, and one sync serves many batches."""

import os
import threading
import time
from pathlib import Path

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.journal.policy import SyncMode, SyncPolicy, parse_sync
from tests.journal.support import BATCH, OFF, accepted, opened, recovered

INTERVAL = parse_sync("interval:100ms")


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("off", SyncPolicy(SyncMode.OFF)),
        ("batch", SyncPolicy(SyncMode.BATCH)),
        ("interval:100ms", SyncPolicy(SyncMode.INTERVAL, 0.1)),
        ("interval:1.5s", SyncPolicy(SyncMode.INTERVAL, 1.5)),
    ],
)
def test_policies_have_a_notation(text: str, policy: SyncPolicy) -> None:
    assert parse_sync(text) == policy


@pytest.mark.parametrize(
    "text", ["", "on", "interval", "interval:5", "interval:0ms", "interval:2h"]
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"journal sync '{text}'"):
        parse_sync(text)


def test_batch_syncs_before_it_tells(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        for ticket in range(5):
            listener.wait(journal.append([accepted(ticket)], {}))
        assert listener.order == ["sync", "durable"] * 5


def test_off_does_not_sync_for_a_batch(tmp_path: Path) -> None:
    with opened(tmp_path / "j", OFF) as (journal, listener, _):
        for ticket in range(5):
            listener.wait(journal.append([accepted(ticket)], {}))
        assert listener.syncs == 0
        assert journal.close()
        assert listener.syncs == 1


def test_interval_tells_at_once_and_syncs_within_the_interval(tmp_path: Path) -> None:
    with opened(tmp_path / "j", INTERVAL) as (journal, listener, _):
        for ticket in range(5):
            listener.wait(journal.append([accepted(ticket)], {}))
        assert listener.order[:2] == ["durable", "durable"]
        with listener.heard:
            assert listener.heard.wait_for(lambda: listener.order[-1] == "sync", 5)


def test_interval_does_not_sync_what_is_idle(tmp_path: Path) -> None:
    with opened(tmp_path / "j", parse_sync("interval:10ms")) as (journal, listener, _):
        listener.wait(journal.append([accepted(0)], {}))
        with listener.heard:
            assert listener.heard.wait_for(lambda: listener.syncs == 1, 5)
        time.sleep(0.1)
        assert listener.syncs == 1


def test_one_sync_serves_all_that_came_meanwhile(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        gate, tell = threading.Event(), journal.on_durable

        def slow(lsn: int) -> None:
            assert gate.wait(20)
            tell(lsn)

        journal.on_durable = slow
        for ticket in range(51):
            lsn = journal.append([accepted(ticket)], {})
        gate.set()
        listener.wait(lsn)
        assert listener.syncs <= 4
        assert journal.statistics().batches == 51


def test_statistics_are_a_snapshot_of_what_was_done(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([accepted(0), accepted(1)], {}))
        assert journal.close()
        found = journal.statistics()
        assert (found.durable_lsn, found.appended_lsn, found.queued_batches) == (1, 1, 0)
        assert found.batches == 1
        assert (found.live_samples, found.live_bytes, found.segments) == (2, 64, 1)
        assert found.nbytes == (1 << 20) + 3 * (16 << 10)


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, _, _):
        for ticket in range(30):
            journal.append([accepted(ticket)], {})
        assert journal.close()
    assert len(recovered(tmp_path / "j").entries) == 30


def test_a_journal_that_breaks_and_cannot_be_let_go_of_either_is_told(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        os.close(journal._store.active.handle)  # syncing it fails, and so does closing it
        journal.append([accepted(0)], {})
        assert "cannot" in str(listener.wait_broken())
        assert not journal.close()


def test_a_journal_that_breaks_while_it_is_closed_says_so(tmp_path: Path) -> None:
    with opened(tmp_path / "j", OFF) as (journal, listener, _):
        listener.wait(journal.append([accepted(0)], {}))
        handle = journal._store.active.handle
        reader, writer = os.pipe()  # which nobody can sync
        os.dup2(writer, handle)
        assert not journal.close()
        assert "cannot sync" in str(listener.wait_broken())
        os.close(reader)
        os.close(writer)
