"""Payloads of retained steps are read back from the log, wherever it has put them meanwhile."""

import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_dispatcher.core.facts import CheckpointSaved, Committed, Fact, Planned, Resumed
from rollout_dispatcher.errors import JournalCorrupt, JournalError
from rollout_dispatcher.payload import InJournal, InMemory
from rollout_dispatcher.sample import DType, Field, Schema
from tests.journal.support import BATCH, OFF, SCHEMAS, accepted, opened, payload_of, recovered

NBYTES = SCHEMAS[0].nbytes(100)


def step(number: int, *tickets: int) -> list[Fact]:
    """A step that is planned, committed and retained."""
    plan = Planned(number, f"d{number}", 0.0, ((tickets,), ()), ())
    return [plan, Committed(number, retained=True)]


def test_retained_steps_come_back_without_their_payloads_which_can_be_fetched(
    tmp_path: Path,
) -> None:
    facts = [accepted(0, tokens=100), accepted(1, tokens=100), *step(0, 0), *step(1, 1)]
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([*facts, Resumed(0)], {}))
    with opened(tmp_path / "j", BATCH) as (journal, _, found):
        assert found.rewound
        assert [step.number for step in found.steps] == [1]
        assert [step.number for step in found.retained] == [0]
        for one in (*found.steps, *found.retained):
            (entry,) = one.micro_batches[0][0]
            assert not entry.sample.is_in_memory
            assert journal.fetch(entry.ticket) == payload_of(entry.ticket, NBYTES)


def test_payloads_of_buffered_samples_come_up_to_a_budget_oldest_first(tmp_path: Path) -> None:
    facts: list[Fact] = [accepted(ticket, tokens=100) for ticket in range(6)]
    plan = Planned(0, "d", 0.0, (((1, 4),),), ())
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([*facts, plan], {}))
    for budget, held in [(None, 4), (0, 0), (NBYTES - 1, 0), (3 * NBYTES, 3), (10**9, 4)]:
        with opened(tmp_path / "j", BATCH, payload_bytes=budget) as (journal, _, found):
            assert [e.ticket for e in found.entries] == [0, 2, 3, 5]
            assert [type(e.sample.payload) for e in found.entries] == (
                [InMemory] * held + [InJournal] * (4 - held)
            )
            for entry in found.entries:
                assert journal.fetch(entry.ticket) == payload_of(entry.ticket, NBYTES)
                expected = payload_of(entry.ticket, NBYTES)
                assert entry.sample.payload in (expected, InJournal(NBYTES))
            (step,) = found.steps
            assert all(entry.sample.is_in_memory for entry in step.micro_batches[0][0])


def test_a_payload_without_bytes_comes_back_from_where_it_was(tmp_path: Path) -> None:
    none = Schema((Field("reward", DType.FLOAT32, shape=(0,)),))
    facts: list[Fact] = []
    for ticket in range(2):
        fact = accepted(ticket)
        sample = fact.entry.sample._replace(schema=none, payload=InMemory(b""))
        facts.append(replace(fact, entry=replace(fact.entry, sample=sample)))
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([*facts, *step(0, 0)], {}))
    with opened(tmp_path / "j", BATCH) as (journal, _, found):
        (buffered,), (retained,) = found.entries, found.retained[0].micro_batches[0][0]
        assert buffered.sample.payload == InMemory(b"")
        assert retained.sample.payload == InJournal(0)
        assert journal.fetch(retained.ticket) == b""


def test_a_budget_keeps_payloads_out_of_memory(tmp_path: Path) -> None:
    """32 MB of them, of which 1 MB is read."""
    with opened(tmp_path / "j", segment_bytes=4 << 20) as (journal, listener, _):
        for ticket in range(32):
            lsn = journal.append([accepted(ticket, tokens=125_000)], {})
        listener.wait(lsn)
    tracemalloc.start()
    try:
        options = {"segment_bytes": 4 << 20, "payload_bytes": 1_000_000}
        with opened(tmp_path / "j", OFF, **options) as (_, _, found):
            assert sum(entry.sample.memory_bytes for entry in found.entries) == 1_000_000
            assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_what_a_saved_checkpoint_covers_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([accepted(0), *step(0, 0), CheckpointSaved(0)], {}))
        assert journal.statistics().live_samples == 0
        with pytest.raises(JournalError, match="does not keep sample 0"):
            journal.fetch(0)
    found = recovered(tmp_path / "j")
    assert (found.saved, found.retained, found.steps) == (0, (), ())


def test_a_payload_that_has_changed_on_the_disk_is_not_handed_out(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([accepted(0, tokens=100), *step(0, 0)], {}))
        (segment,) = (tmp_path / "j").glob("*.segment")
        data = segment.read_bytes()
        at = data.index(bytes(payload_of(0, NBYTES)))
        with segment.open("r+b") as file:
            file.seek(at + 5)
            file.write(bytes([data[at + 5] ^ 1]))
        with pytest.raises(JournalCorrupt, match="does not match its checksum"):
            journal.fetch(0)


def test_payloads_are_read_while_the_writer_moves_them(tmp_path: Path) -> None:
    """Every tenth sample stays, so that nearly empty segments are written again and reused."""
    done = threading.Event()
    failures: list[BaseException] = []
    kept = [0]
    with opened(tmp_path / "j") as (journal, listener, _):
        listener.wait(journal.append([accepted(0, tokens=100)], {}))

        def read() -> None:
            try:
                while not done.is_set():
                    for ticket in kept[:]:
                        assert journal.fetch(ticket) == payload_of(ticket, NBYTES)
            except BaseException as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(150):
            tickets = tuple(range(10 * number + 1, 10 * number + 11))
            facts: list[Fact] = [accepted(ticket, tokens=100) for ticket in tickets]
            gone = Planned(number, "d", 0.0, ((tickets[1:],), ()), ())
            listener.wait(journal.append([*facts, gone, Committed(number)], {}))
            kept.append(tickets[0])
        done.set()
        reader.join()
        segments = journal.statistics().segments
    assert failures == []
    assert segments < 40  # of the 75 and more that were written
