"""Payloads are never read as blocks, whatever bytes they have and wherever they lie.

The attacker here pushes samples and reads the journal's own files: it knows the format, every
number that is next, and every salt but those that are still to be drawn.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import Accepted, Dropped, DropReason
from rollout_dispatcher.journal.files.blocks import _HEADER, HEADER_SIZE, MAGIC, draft
from rollout_dispatcher.journal.files.segment_header import FIRST_BLOCK, SegmentHeader
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from tests.journal.support import BATCH, as_if_killed, opened, recovered

BYTES = Schema((Field("bytes", DType.UINT8),))
SEGMENT_BYTES = 256 << 10


def pushed(ticket: int, payload: bytes) -> Accepted:
    """A sample with these bytes."""
    padded = payload + bytes(-len(payload) % 8)
    sample = Sample(f"s-{ticket}", len(padded), 0, BYTES, memoryview(padded))
    return Accepted(Entry(sample, ticket, 0.0), "p", ticket, None)


def headers(directory: Path) -> Iterator[bytes]:
    """Every header of a block in the files, genuine or not."""
    for path in sorted(directory.glob("*.segment")):
        data, at = path.read_bytes(), -1
        while (at := data.find(MAGIC, at + 1)) >= 0:
            yield data[at : at + HEADER_SIZE]


def grown(header: bytes, sequence: int) -> bytes:
    """It claims to be another block, with rows up to the end of the file."""
    found = bytearray(header)
    found[32:40] = sequence.to_bytes(8, "little")
    found[48:56] = (SEGMENT_BYTES // 2).to_bytes(8, "little")
    return bytes(found)


@pytest.mark.parametrize("step", [1, 8, 64])
def test_payloads_full_of_headers_cost_a_restart_no_time(tmp_path: Path, step: int) -> None:
    """4 MiB of copies of this journal's own headers, as they are and claiming to be long."""
    directory = tmp_path / "j"
    with opened(directory, BATCH, segment_bytes=4 << 20) as (journal, listener, _):
        listener.wait(journal.append([pushed(0, b"x" * 64)], {}))
        (known,) = headers(directory)
        unit = (known + grown(known, 3))[: 2 * HEADER_SIZE].ljust(2 * HEADER_SIZE + step, b"\1")
        listener.wait(journal.append([pushed(1, unit * ((3 << 20) // len(unit)))], {}))
        listener.wait(journal.append([pushed(2, b"y" * 64)], {}))
        killed = as_if_killed(directory, tmp_path / "killed")
    begun = time.perf_counter()
    found = recovered(killed, segment_bytes=4 << 20)
    assert time.perf_counter() - begun < 1.0
    assert [entry.ticket for entry in found.entries] == [0, 1, 2]


def forged(segment: int, offset: int, sequence: int, payload: bytes, salt: bytes) -> bytes:
    """A whole block as the journal would write it there, under this salt."""
    rows = [["accepted", 10**6, len(payload), 0, 8, 0, "forged", None, 1, None, False, 0.0, 0, -1,
             0,
             "evil", 10**6, None, None]]  # fmt: skip
    block = draft(rows, [memoryview(payload)], "{}")
    block.sum_up()
    front = SegmentHeader(segment, SEGMENT_BYTES, sequence - 1, salt)
    head = block.head(front, offset, sequence, 10**6)
    return bytes(head) + payload


def test_a_file_that_is_used_again_brings_nothing_of_before_back(tmp_path: Path) -> None:
    """Every sample holds blocks for the segments, places and sequences to come."""
    directory, random = tmp_path / "0", Random(7)
    ticket = survived = 0
    kept: list[int] = []
    for life in range(12):
        with opened(directory, BATCH, segment_bytes=SEGMENT_BYTES) as (journal, listener, found):
            assert [entry.ticket for entry in found.entries] == kept
            store = journal._store
            for _ in range(random.randrange(4, 12)):
                salt = SegmentHeader.read(store.active.path.read_bytes())
                assert salt is not None
                following = [
                    forged(store.active.number + more, at, store.sequence + 1 + ahead, b"e" * 64,
                           salt.salt)
                    for more in range(3)
                    for ahead in range(4)
                    for at in (FIRST_BLOCK, store.active.end, store.active.end + 512)
                ]  # fmt: skip
                evil = b"".join(following)
                evil *= 40_000 // len(evil)
                listener.wait(journal.append([pushed(ticket, evil)], {}))
                kept.append(ticket)
                ticket += 1
            gone, kept = kept[:-2], kept[-2:]
            listener.wait(journal.append([Dropped(tuple(gone), DropReason.STALE)], {}))
            survived = store.active.number
            directory = as_if_killed(directory, tmp_path / f"{life + 1}")
    assert survived > 12
    assert [
        entry.ticket for entry in recovered(directory, segment_bytes=SEGMENT_BYTES).entries
    ] == (kept)


def test_a_torn_block_is_not_replaced_by_what_its_file_held_before(tmp_path: Path) -> None:
    """The strongest case: the file's old bytes at that very place are a whole block of that number.

    Only the salt, drawn when the file was used again, is not the right one.
    """
    directory = tmp_path / "j"
    with opened(directory, BATCH, segment_bytes=SEGMENT_BYTES) as (journal, listener, _):
        listener.wait(journal.append([pushed(0, b"a" * 64)], {}))
        segment, end = journal._store.active, journal._store.active.end
        killed = as_if_killed(directory, tmp_path / "killed")
        killed_before = as_if_killed(killed, tmp_path / "killed-before")
    path = killed / segment.path.name
    content = bytearray(path.read_bytes())
    old = forged(segment.number, end, 2, b"e" * 64, bytes(16))
    content[end : end + len(old)] = old
    path.write_bytes(content)
    with opened(killed, BATCH, segment_bytes=SEGMENT_BYTES) as (journal, _, found):
        assert [entry.ticket for entry in found.entries] == [0]
        assert journal.statistics().torn_tail
    # With that segment's own salt it would have been a block: the test does test something.
    own = forged(segment.number, end, 2, b"e" * 64, segment.front.salt)
    content[end : end + len(own)] = own
    again = as_if_killed(killed_before, tmp_path / "again")
    (again / segment.path.name).write_bytes(content)
    found = recovered(again, segment_bytes=SEGMENT_BYTES)
    assert [entry.sample.sample_id for entry in found.entries] == ["s-0", "forged"]


@pytest.mark.parametrize("claim", [0, 1 << 10, 1 << 19])
def test_a_file_full_of_headers_of_segments_to_come_is_opened_at_once(
    tmp_path: Path, claim: int
) -> None:
    """Each of them claims to be synced, and to have so many bytes of rows that would be summed."""
    size, directory = 4 << 20, tmp_path / "j"
    with opened(directory, BATCH, segment_bytes=size) as (journal, listener, _):
        listener.wait(journal.append([pushed(0, b"x" * 64)], {}))
        sequence = 0
        for ticket in range(1, 20):
            evil = b"".join(
                _HEADER.pack(MAGIC, 1, b"", number, sequence + ahead, 10**6, claim, 0)
                for number in range(journal._store.active.number, journal._store.active.number + 8)
                for ahead in (1, 2, 3)
            )
            payload = evil * (size // 3 // len(evil))
            listener.wait(journal.append([pushed(ticket, payload)], {}))
            listener.wait(journal.append([Dropped((ticket,), DropReason.STALE)], {}))
            sequence = journal._store.sequence
        killed = as_if_killed(directory, tmp_path / "killed")
    begun = time.perf_counter()
    assert [entry.ticket for entry in recovered(killed, segment_bytes=size).entries] == [0]
    assert time.perf_counter() - begun < 1.0
