"""Space is reclaimed, and where there is none nothing is lost."""

import os
import resource
from pathlib import Path

import pytest

from rollout_dispatcher.core.facts import Committed, Dropped, DropReason, FloorRaised, Planned
from rollout_dispatcher.errors import JournalError, JournalFull
from rollout_dispatcher.journal.files.segment_header import FIRST_BLOCK
from rollout_dispatcher.journal.files.segments import FIRST_BYTES, SPARES, SegmentFiles
from rollout_dispatcher.journal.journal import Journal, Trouble
from tests.journal.support import (
    BATCH,
    OFF,
    accepted,
    as_if_killed,
    eventually,
    opened,
    payload_of,
    recovered,
)
from tests.support.disks import remount, small_disk
from tests.support.samples import span_of

SEGMENT_BYTES, MAP_BYTES = 16 << 10, 1 << 20


def step(journal: Journal, number: int, samples: int = 8) -> int:
    """A batch of samples comes, is planned, and the step before is committed."""
    tickets = tuple(range(number * samples, (number + 1) * samples))
    planned = Planned(number, "d", 0.0, ((tickets,),), ())
    done = [Committed(number - 1)] if number else []
    return journal.append([*(accepted(ticket) for ticket in tickets), planned, *done], {})


def test_steady_load_takes_bounded_space(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, listener, _):
        most = 0
        for number in range(400):  # some 30 segments
            listener.wait(step(journal, number))
            most = max(most, journal.statistics().nbytes - MAP_BYTES)
        assert journal._store.active.number > 25
        assert most <= 5 * SEGMENT_BYTES
    assert sum(path.stat().st_size for path in (tmp_path / "j").iterdir()) <= MAP_BYTES + 6 * (
        SEGMENT_BYTES
    )


def test_samples_that_stay_do_not_hold_whole_segments(tmp_path: Path) -> None:
    """One sample in 40 stays for good; the others would leave their segments nearly empty."""
    with opened(tmp_path / "j") as (journal, listener, _):
        for number in range(60):
            tickets = range(number * 40, (number + 1) * 40)
            journal.append([accepted(ticket) for ticket in tickets], {})
            listener.wait(journal.append([Dropped(tuple(tickets[1:]), DropReason.STALE)], {}))
        now = journal.statistics()
        assert now.live_samples == 60
        assert now.nbytes - MAP_BYTES <= 2 * now.live_bytes + 10 * SEGMENT_BYTES
        assert journal._store.active.number > 15
    found = recovered(tmp_path / "j").entries
    assert [entry.ticket for entry in found] == list(range(0, 2400, 40))
    assert all(entry.sample.payload == payload_of(entry.ticket, 32) for entry in found)


def test_a_damaged_payload_stops_no_other_segment_from_being_reclaimed(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, listener, _):
        segment = tmp_path / "j" / "000000000001.segment"
        for number in range(60):
            tickets = range(number * 40, (number + 1) * 40)
            journal.append([accepted(ticket) for ticket in tickets], {})
            listener.wait(journal.append([Dropped(tuple(tickets[1:]), DropReason.STALE)], {}))
            if number == 0:
                with segment.open("r+b") as file:
                    file.seek(segment.read_bytes().index(bytes(payload_of(0, 32))) + 3)
                    file.write(b"\0\0")
        assert journal.failure is None
        assert journal.statistics().nbytes - MAP_BYTES <= 2 * 60 * 32 + 11 * SEGMENT_BYTES
        assert journal._store._files.damaged == {1}
    assert len(recovered(tmp_path / "j").entries) == 60


def test_a_killed_journal_reclaims_what_its_predecessor_left(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    for life in range(6):
        with opened(directory) as (journal, listener, _):
            listener.wait(step(journal, life))
            assert journal.statistics().segments <= 4
            directory = as_if_killed(directory, tmp_path / f"{life + 1}")


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, hard))
        try:
            lsn = 0
            for ticket in range(1_000):
                lsn = journal.append([accepted(ticket)], {})
            assert isinstance(error := listener.wait_failing(), JournalFull)
            assert "ulimit -f" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        listener.wait(lsn)
    assert len(recovered(tmp_path / "j").entries) == 1_000


def test_segments_grow_to_the_limit_on_the_size_of_files(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 16 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, hard))
    try:
        for _ in range(3):
            files.grow()
            files.ensure_spares()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.next_bytes == 2 * FIRST_BYTES


def test_a_write_without_room_is_kept_and_tried_again(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        handle = journal._store.active.handle
        kept, full = os.dup(handle), os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, handle)
        lsn = journal.append([accepted(0)], {})
        failure = listener.wait_failing()
        assert isinstance(failure, JournalFull)
        assert failure.retriable
        assert "no room to write to" in str(failure)
        more = journal.append([accepted(1)], {})
        assert listener.durable < lsn
        os.dup2(kept, handle)
        listener.wait(more)
        eventually(lambda: journal.failure is None)
        assert journal.statistics().errors == {Trouble.FULL: 1, Trouble.BROKEN: 0}
        os.dup2(full, handle)
        last = journal.append([accepted(2)], {})
        listener.wait_failing()
        os.dup2(kept, handle)
        listener.wait(last)
        assert journal.close()
        assert journal.failure is None
        assert journal.statistics().errors == {Trouble.FULL: 2, Trouble.BROKEN: 0}
        os.close(kept)
        os.close(full)
    assert len(recovered(tmp_path / "j").entries) == 3


def test_closing_without_room_is_bounded_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        handle, full = journal._store.active.handle, os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, handle)
        journal.append([accepted(0)], {})
        listener.wait_failing()
        assert not journal.close(timeout=5)
        os.close(full)
    assert recovered(tmp_path / "j").entries == ()


@pytest.mark.parametrize(("device", "what"), [("/dev/null", "cannot sync"), ("/", "cannot write")])
def test_any_other_fault_breaks_it_for_good(tmp_path: Path, device: str, what: str) -> None:
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([accepted(0)], {}))
        other = os.open(device, os.O_WRONLY if device == "/dev/null" else os.O_RDONLY)
        os.dup2(other, journal._store.active.handle)
        os.close(other)
        journal.append([accepted(1)], {})
        error = listener.wait_broken()
        assert what in str(error)
        assert journal.broken
        assert journal.failure is error
        assert journal.statistics().errors == {Trouble.FULL: 0, Trouble.BROKEN: 1}
        assert listener.durable == 1
        with pytest.raises(JournalError, match=what):
            journal.append([accepted(2)], {})
    assert [entry.ticket for entry in recovered(tmp_path / "j").entries] == [0]


def test_a_full_index_is_told_and_costs_no_batch(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH, map_bytes=40 << 10) as (journal, listener, _):
        for ticket in range(600):
            listener.wait(journal.append([accepted(ticket)], {"accepted": ticket + 1}))
        failure = listener.wait_failing()
        assert isinstance(failure, JournalFull)
        assert "restart with a larger map" in str(failure)
        killed = as_if_killed(tmp_path / "j", tmp_path / "killed")
    for directory in (killed, tmp_path / "j"):
        found = recovered(directory)
        assert [entry.ticket for entry in found.entries] == list(range(600))
        assert found.totals == {"accepted": 600}


def test_a_full_index_recovers_when_samples_go(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH, map_bytes=256 << 10) as (journal, listener, _):
        count = 0
        while journal.failure is None:
            listener.wait(journal.append([accepted(count + at) for at in range(100)], {}))
            count += 100
        listener.wait(journal.append([FloorRaised("p", count)], {}))
        listener.wait(journal.append([Dropped(tuple(range(count)), DropReason.STALE)], {}))
        eventually(lambda: journal.failure is None)
        eventually(lambda: journal.statistics().segments <= 2)


def test_a_map_that_cannot_hold_anything_is_refused_on_opening(tmp_path: Path) -> None:
    with pytest.raises(JournalFull, match="full at 512 bytes"):
        recovered(tmp_path / "j", map_bytes=512)


def test_a_full_disk_delays_and_loses_nothing(disk: Path) -> None:
    with opened(disk / "j", BATCH, segment_bytes=256 << 10) as (journal, listener, _):
        count = 0
        while journal.failure is None:  # known of while there is still room to write
            listener.wait(journal.append([accepted(count, tokens=4000)], {}))
            count += 1
        assert "no room to allocate" in str(journal.failure)
        more = [journal.append([accepted(count + at, tokens=4000)], {}) for at in range(20)]
        with listener.heard:
            assert not listener.heard.wait_for(lambda: listener.durable >= more[-1], 1.5)
        assert listener.durable >= more[0], "the rest of the segment is used"
        waiting = journal.statistics().queued_batches
        assert waiting > 0
        remount(disk, "size=8m")
        listener.wait(more[-1])
    found = recovered(disk / "j", segment_bytes=256 << 10).entries
    assert [entry.ticket for entry in found] == list(range(count + 20))
    assert all(span_of(e.sample) == payload_of(e.ticket, 32_000) for e in found)


def test_a_full_disk_is_freed_by_commits_alone(disk: Path) -> None:
    with opened(disk / "j", BATCH, segment_bytes=256 << 10) as (journal, listener, _):
        count = 0
        while journal.failure is None:
            listener.wait(journal.append([accepted(count, tokens=4000)], {}))
            count += 1
        listener.wait(journal.append([Dropped(tuple(range(count)), DropReason.STALE)], {}))
        eventually(lambda: journal.failure is None)


def test_no_room_for_the_index_is_told_on_opening(disk: Path) -> None:
    with pytest.raises(JournalFull, match="no room to reserve 4194304 bytes"):
        recovered(disk / "j", map_bytes=16 << 20)


def test_a_read_only_directory_is_told_on_opening(disk: Path) -> None:
    remount(disk, "ro")
    with pytest.raises(JournalError, match=r"cannot use the journal directory .*[Rr]ead-only"):
        recovered(disk / "j")


def test_steady_load_under_no_sync_at_all_is_reclaimed_too(tmp_path: Path) -> None:
    with opened(tmp_path / "j", OFF) as (journal, listener, _):
        for number in range(100):
            lsn = step(journal, number)
        listener.wait(lsn)
        assert journal.statistics().live_samples == 8


def test_a_journal_is_small_at_first_and_grows_with_what_comes(tmp_path: Path) -> None:
    full = 4 * FIRST_BYTES
    options = {"map_bytes": 512 << 20, "segment_bytes": full}
    with opened(tmp_path / "j", OFF, **options) as (journal, listener, _):
        idle = journal.statistics().nbytes
        assert idle <= 25 << 20
        assert on_disk(tmp_path / "j") <= idle + 4096 * 8
        sizes = set()
        for ticket in range(60):  # of a megabyte each
            listener.wait(journal.append([accepted(ticket, tokens=125_000)], {}))
            sizes |= set(journal._store._files.sizes.values())
        assert sizes == {FIRST_BYTES, 2 * FIRST_BYTES, full}
        assert journal.statistics().nbytes > 3 * full
    with opened(tmp_path / "j", OFF, **options) as (journal, _, found):
        assert [entry.ticket for entry in found.entries] == list(range(60))
        assert journal._store._files.next_bytes == full, "it goes on as large as it was"


def test_spares_of_before_give_way_to_larger_ones_where_the_disk_has_them(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 4 * FIRST_BYTES)
    files.ensure_spares()
    assert spares(tmp_path) == [FIRST_BYTES] * 2
    files.grow()
    files.ensure_spares()
    assert spares(tmp_path) == [2 * FIRST_BYTES] * 2
    assert files.capacity == 2 * FIRST_BYTES - FIRST_BLOCK
    again = SegmentFiles(tmp_path, 4 * FIRST_BYTES)
    again.ensure_spares(3 * FIRST_BYTES)
    assert spares(tmp_path) == [2 * FIRST_BYTES] * 2 + [4 * FIRST_BYTES]


def test_a_disk_without_room_for_larger_spares_keeps_those_that_there_are(disk: Path) -> None:
    files = SegmentFiles(disk, 8 * FIRST_BYTES)
    files.next_bytes = 512 << 10
    files.ensure_spares()
    files.grow()  # two of 1 MiB do not fit beside these
    files.ensure_spares()
    files.grow()
    files.ensure_spares()
    assert len(spares(disk)) == SPARES
    assert files.capacity > 0


def test_segments_that_grow_leave_a_small_disk_room_to_go_on(tmp_path: Path) -> None:
    options = {"map_bytes": 512 << 20, "segment_bytes": 16 * FIRST_BYTES}
    with (
        small_disk(tmp_path / "disk", megabytes=40) as disk,
        opened(disk / "j", OFF, **options) as (journal, listener, _),
    ):
        for ticket in range(60):  # of a megabyte each, of which four are kept
            journal.append([accepted(ticket, tokens=125_000)], {})
            gone = tuple(range(max(0, ticket - 4), max(0, ticket - 3)))
            listener.wait(journal.append([Dropped(gone, DropReason.STALE)] if gone else [], {}))
            assert journal.failure is None
        assert journal._store.active.number > 10


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def spares(directory: Path) -> list[int]:
    return sorted(path.stat().st_size for path in directory.glob("*.spare"))
