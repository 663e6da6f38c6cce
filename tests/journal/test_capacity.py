"""New samples that keep to the capacity never touch what plans and commits need on a full disk."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.facts import (
    Accepted,
    Committed,
    Dropped,
    DropReason,
    Fact,
    Planned,
    VersionReported,
)
from rollout_dispatcher.errors import JournalFull
from rollout_dispatcher.journal.capacity import Capacity
from rollout_dispatcher.journal.files.blocks import draft
from rollout_dispatcher.journal.files.segment_header import SegmentHeader
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.records import Encoder
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.sample import DType, Field, Schema
from tests.journal.player import Player
from tests.journal.support import (
    BATCH,
    OFF,
    PATIENCE,
    SCHEMAS,
    Listener,
    accepted,
    as_if_killed,
    eventually,
    opened,
    payload_of,
    recovered,
)
from tests.support.disks import remount
from tests.support.examples import examples
from tests.support.samples import span_of

SEGMENT = 256 << 10
#: Where samples lie: in the log, or in an object of the longest name that there may be.
STORED = [None, StoredObject("\N{BUG}" * 1024, "\0" * 512, 2**53)]


def pushed(journal: Journal, tickets: Iterator[int], tokens: int) -> Accepted | None:
    """One more sample, if there is room for it."""
    if journal.capacity(8 * tokens + 2048) < 8 * tokens + 2048:
        return None
    return accepted(next(tickets), tokens=tokens)


# -- the count ------------------------------------------------------------------------------


def test_what_is_queued_counts_until_it_is_written() -> None:
    capacity = Capacity(100)
    assert capacity.ask(60) == 100
    capacity.queue(60)
    assert capacity.ask(40) == 40
    assert not capacity.written(60, 40)
    assert capacity.available == 40


def test_who_was_short_of_capacity_is_told_once_when_it_is_there() -> None:
    capacity = Capacity(100)
    capacity.queue(90)
    assert capacity.ask(50) == 10
    assert capacity.ask(30) == 10
    assert not capacity.written(10, 100)
    assert capacity.written(40, 100), "enough for the smaller one"
    assert not capacity.written(40, 100), "once"


def test_no_room_is_never_less_than_none() -> None:
    capacity = Capacity(10)
    capacity.queue(20)  # a plan, say, which does not ask
    assert capacity.available == 0
    assert capacity.ask(1) == 0


def test_what_is_moved_may_use_what_is_left_of_a_segment_when_there_is_no_room() -> None:
    capacity = Capacity(0)
    assert not capacity.reserve(10, left=9)
    assert capacity.reserve(9, left=9)
    assert not capacity.reserve(1, left=9)


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_a_batch_never_takes_more_than_it_is_counted_for(seed: int) -> None:
    player, encoder = Player(Random(seed)), Encoder({}, lambda time: time + 2.0**30)
    for _ in range(40):
        facts, totals = player.batch()
        batch = encoder.batch(1, facts, {**totals, '"\\\0': '"\\\0ä'})
        block = draft(batch.rows, batch.payloads, batch.totals)
        block.sum_up()
        assert block.head_bytes + block.payload_bytes <= batch.most


@pytest.mark.parametrize("stored", STORED)
def test_the_largest_numbers_that_a_sample_may_have_are_counted(
    stored: StoredObject | None,
) -> None:
    fact = accepted(2**63, group=2**63, version=2**53, stored=stored)
    fact.entry.sample = fact.entry.sample._replace(
        tokens=2**31, loss_tokens=2**31, group_size=2**31, group_id="g", sample_id="s"
    )
    fact.entry.skips = 2**31
    batch = Encoder({2**31: SCHEMAS[0]}, lambda _: 1.2345678901234567e-300).batch(1, [fact], {})
    block = draft(batch.rows, batch.payloads, batch.totals)
    assert block.head_bytes + block.payload_bytes <= batch.most


@pytest.mark.parametrize("stored", STORED)
def test_names_that_json_makes_long_are_counted_as_long(stored: StoredObject | None) -> None:
    for name in ("\0" * 128, "\N{BUG}" * 128, '"' * 128):
        fact = accepted(0, producer=name, given_id=name, stored=stored)
        batch = Encoder({}, float).batch(1, [fact], {})
        block = draft(batch.rows, batch.payloads, batch.totals)
        assert block.head_bytes + block.payload_bytes <= batch.most


@pytest.mark.parametrize("stored", STORED)
def test_rows_of_as_many_fields_as_there_may_be_are_counted(stored: StoredObject | None) -> None:
    fields = tuple(Field(f"f{n:02}", DType.UINT8, False, (), ragged=True) for n in range(64))
    fact = accepted(0, schema=Schema(fields), stored=stored)
    fact.entry.sample = fact.entry.sample._replace(rows=(2**31 - 1,) * 64)
    batch = Encoder({}, float).batch(1, [fact], {})
    block = draft(batch.rows, batch.payloads, batch.totals)
    assert block.head_bytes + block.payload_bytes <= batch.most


# -- the journal ----------------------------------------------------------------------------


def test_asking_for_room_costs_less_than_a_microsecond(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, _, _):
        best = 1.0
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(1000):
                journal.capacity(100)
            best = min(best, (time.perf_counter() - begun) / 1000)
        assert best < 1e-6


def test_room_comes_back_when_what_is_queued_is_written_and_that_is_told(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH, segment_bytes=SEGMENT) as (journal, listener, _):
        told, gate = threading.Event(), threading.Event()
        journal.on_capacity = told.set
        first = journal.append([accepted(0)], {})
        durable = journal.on_durable

        def slow(lsn: int) -> None:
            assert gate.wait(PATIENCE)
            durable(lsn)

        listener.wait(first)
        assert journal.capacity() >= SEGMENT - 4096
        journal.on_durable = slow
        for ticket in range(1, 8):
            lsn = journal.append([accepted(ticket, tokens=4000)], {})
        assert journal.capacity(200_000) < 200_000
        assert not told.is_set()
        gate.set()
        listener.wait(lsn)
        assert told.wait(PATIENCE)
        assert journal.capacity(200_000) >= 200_000


def test_room_for_more_than_a_segment_is_made_when_it_is_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path / "j", segment_bytes=16 << 10) as (journal, listener, _):
        told = threading.Event()
        journal.on_capacity = told.set
        assert journal.capacity(100_000) < 16 << 10
        assert told.wait(PATIENCE)
        assert journal.capacity(100_000) >= 100_000
        listener.wait(journal.append([accepted(0, tokens=12_000)], {}))
        assert journal.failure is None
        for ticket in range(1, 100):
            listener.wait(journal.append([accepted(ticket, tokens=100)], {}))
        listener.wait(journal.append([Dropped(tuple(range(100)), DropReason.STALE)], {}))
        for ticket in range(100, 150):
            listener.wait(journal.append([accepted(ticket, tokens=100)], {}))
        assert journal.statistics().nbytes < (1 << 20) + 10 * (16 << 10), "it does not stay large"
    assert len(recovered(tmp_path / "j").entries) == 50


def test_there_is_no_room_while_the_journal_is_failing_or_broken(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH, map_bytes=80 << 10) as (journal, listener, _):
        ticket = 0
        while journal.failure is None:
            listener.wait(journal.append([accepted(ticket)], {}))
            ticket += 1
        assert journal.capacity() == 0
    with opened(tmp_path / "k") as (journal, listener, _):
        assert journal.capacity() > 0
        journal.append([Committed(5)], {})
        listener.wait_broken()
        assert journal.capacity() == 0


# -- a disk that is really full -------------------------------------------------------------


def fill(journal: Journal, listener: Listener, tickets: Iterator[int], tokens: int) -> list[int]:
    """Push faster than the disk until there is no room; the tickets that were taken.

    A full disk may have room again by itself, once what nobody needs is freed; that is filled too.
    """
    taken: list[int] = []
    lsn = 0
    while journal.failure is None or journal.capacity() > 0:
        fact = pushed(journal, tickets, tokens)
        if fact is None:
            time.sleep(0.001)
        else:
            lsn = journal.append([fact], {})
            taken.append(fact.entry.ticket)
        if journal.failure is not None:
            listener.wait(lsn)
    return taken


@pytest.mark.parametrize("tokens", [50, 900, 4000, 12_000, 30_000])
def test_a_full_disk_never_stops_plans_and_commits(disk: Path, tokens: int) -> None:
    """All that was taken is planned, committed and freed with not a byte more of disk."""
    with opened(disk / "j", BATCH, segment_bytes=SEGMENT) as (journal, listener, _):
        tickets = iter(range(10**9))
        for _ in range(3):
            taken = fill(journal, listener, tickets, tokens)
            assert journal.statistics().queued_batches == 0
            assert len(journal._store._files._spares) >= 1, "the spare was touched"
            step = taken[0]
            rest = tuple(taken[1:])
            for _ in range(3):
                plan = Planned(step, "d", 0.0, (((step,),),), rest)
                listener.wait(journal.append([plan], {}))
            facts: list[Fact] = [Committed(step), Dropped(rest, DropReason.STALE)]
            listener.wait(journal.append(facts, {}))
            eventually(lambda: journal.failure is None)
            assert journal.capacity() > 0
        survivor = next(tickets)
        listener.wait(journal.append([accepted(survivor, tokens=tokens)], {}))
    (entry,) = recovered(disk / "j", segment_bytes=SEGMENT).entries
    assert span_of(entry.sample) == payload_of(survivor, 8 * tokens)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_sizes_samples_have_the_spare_is_not_touched(disk: Path, seed: int) -> None:
    random, tickets = Random(seed), iter(range(10**9))

    def push(sizes: list[int]) -> list[int]:
        wanted = sum(8 * tokens + 2048 for tokens in sizes)
        if journal.capacity(wanted) < wanted:
            return []
        facts = [accepted(next(tickets), tokens=tokens) for tokens in sizes]
        listener.wait(journal.append(facts, {}))
        return [fact.entry.ticket for fact in facts]

    with opened(disk / "j", OFF, segment_bytes=128 << 10) as (journal, listener, _):
        taken: list[int] = []
        for _ in range(4):
            while journal.failure is None:
                sizes = [1, 10, 300, 2000, 9000, 15_000, 40_000]
                taken += push(random.choices(sizes, k=random.randrange(1, 4)))
                taken += push([1]) if random.random() < 0.3 else []
            assert len(journal._store._files._spares) >= 1, "the spare was touched"
            kept = random.randrange(3)
            gone, taken = taken[kept:], taken[:kept]
            listener.wait(journal.append([Dropped(tuple(gone), DropReason.STALE)], {}))
            eventually(lambda: journal.failure is None)


def test_room_is_told_when_the_disk_has_some_again(disk: Path) -> None:
    with opened(disk / "j", BATCH, segment_bytes=SEGMENT) as (journal, listener, _):
        tickets = iter(range(10**9))
        fill(journal, listener, tickets, 4000)
        told = threading.Event()
        journal.on_capacity = told.set
        assert journal.capacity(40_000) == 0
        assert not told.is_set()
        remount(disk, "size=8m")
        assert told.wait(PATIENCE)
        assert journal.capacity(40_000) >= 40_000


def test_who_wants_more_than_the_disk_has_stops_nobody_and_asks_again(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_dispatcher.journal.journal.ASK_AGAIN_SECONDS", 0.1)
    wanted = 4 << 20
    with opened(disk / "j", BATCH, segment_bytes=128 << 10) as (journal, listener, _):
        told = threading.Event()
        journal.on_capacity = told.set
        assert journal.capacity(wanted) < wanted
        assert told.wait(PATIENCE)
        assert journal.failure is None
        assert journal.capacity(100_000) >= 100_000
        listener.wait(journal.append([accepted(0, tokens=4000)], {}))
        remount(disk, "size=8m")
        told.clear()
        assert journal.capacity(wanted) < wanted
        assert told.wait(PATIENCE)
        assert journal.capacity(wanted) >= wanted


def test_restarts_on_a_full_disk_use_nothing_up(disk: Path) -> None:
    """They go on in the last segment, whose old blocks are none any more under its new salt."""
    taken: list[int] = []
    tickets = iter(range(10**9))
    fronts = []
    for life in range(6):
        with opened(disk / "j", BATCH, segment_bytes=SEGMENT) as (journal, listener, found):
            assert [entry.ticket for entry in found.entries] == taken
            taken += fill(journal, listener, tickets, 4000)
            front = SegmentHeader.read(journal._store.active.path.read_bytes())
            fronts.append(front)
            listener.wait(journal.append([VersionReported(life, life)], {}))
            assert len(journal._store._files._spares) >= 1
            killed = as_if_killed(disk / "j", disk.parent / f"killed-{life}")
        assert recovered(killed, segment_bytes=SEGMENT).policy_step == life
    assert len({front.number for front in fronts if front}) == 1
    assert len({front.salt for front in fronts if front}) == 6
    with opened(disk / "j", BATCH, segment_bytes=SEGMENT) as (journal, listener, found):
        assert [entry.ticket for entry in found.entries] == taken
        listener.wait(journal.append([Dropped(tuple(taken), DropReason.STALE)], {}))
        eventually(lambda: journal.failure is None)
    assert recovered(disk / "j", segment_bytes=SEGMENT).entries == ()


def test_a_restart_on_a_full_disk_says_so_before_anything_is_written(disk: Path) -> None:
    """Else it would be called ready until the first push."""
    with opened(disk / "j", BATCH, segment_bytes=SEGMENT) as (journal, listener, _):
        fill(journal, listener, iter(range(10**9)), 4000)
        assert journal.failure is not None
    with opened(disk / "j", BATCH, segment_bytes=SEGMENT) as (journal, _, _):
        assert isinstance(journal.failure, JournalFull)
        remount(disk, "size=8m")
        eventually(lambda: journal.failure is None)  # nobody has to write for that
