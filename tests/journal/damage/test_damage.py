"""A torn tail is ignored; damage to what was durable is an error that names its place."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from rollout_dispatcher.core.facts import Fact, Planned
from rollout_dispatcher.errors import JournalCorrupt, JournalError
from rollout_dispatcher.journal.files.blocks import checksum
from rollout_dispatcher.journal.files.directory import NewestSegment
from rollout_dispatcher.journal.files.segments import SegmentFiles
from rollout_dispatcher.journal.index import Index
from rollout_dispatcher.journal.replay import replay
from rollout_dispatcher.journal.state import State
from rollout_dispatcher.payload import InJournal
from tests.journal.support import (
    BATCH,
    OFF,
    accepted,
    as_if_killed,
    opened,
    payload_of,
    recovered,
)
from tests.support.samples import span_of

MAP = 1 << 20
SEGMENT = "000000000001.segment"
#: Bytes of each sample's payload, with which its block ends.
PAYLOAD = 32


class Image:
    """A killed journal of three blocks, of which so many are synced.

    starts: where each block begins, and where the last ends.
    """

    def __init__(self, directory: Path, synced: int) -> None:
        self.directory = directory / "killed"
        self.starts = []
        with opened(directory / "journal", OFF) as (journal, listener, _):
            self.starts.append(journal._store.active.end)
            for ticket in range(3):
                listener.wait(journal.append([accepted(ticket)], {}))
                self.starts.append(journal._store.active.end)
                if ticket < synced:
                    journal._store.sync()
            as_if_killed(directory / "journal", self.directory)
        self.segment = self.directory / SEGMENT
        self.intact = self.segment.read_bytes()

    def replayed(self) -> tuple[int, bool]:
        """The last sequence that the log has, and whether its tail is torn."""
        index = Index(self.directory / "index", MAP)
        try:
            state = State(100, 100)
            position = index.load(state)
            assert position is not None
            newest = NewestSegment(self.directory).number
            found = replay(state, SegmentFiles(self.directory, 16 << 10), position, newest)
        finally:
            index.close()
        assert sorted(state.kept) == list(range(found.end.sequence))
        return found.end.sequence, found.torn


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """The last block is not synced."""
    return Image(tmp_path, synced=2)


def cuts(intact: bytes, at: int) -> Iterator[bytes]:
    """The file as it may be when nothing from `at` on was written whole."""
    yield intact[:at]
    yield intact[:at] + bytes(len(intact) - at)
    yield intact[:at] + Random(at).randbytes(len(intact) - at)
    yield intact[:at] + bytes([intact[at] ^ 0xFF]) + intact[at + 1 :]


def test_a_checksum_covers_all_of_a_payload_and_whose_it_is() -> None:
    payload = bytes(1 << 20)
    found = checksum(payload, 7)
    assert found not in (checksum(payload[:-1] + b"x", 7), checksum(payload, 8))


def test_an_unsynced_tail_torn_at_any_byte_costs_only_the_last_block(image: Image) -> None:
    assert image.replayed() == (3, False)
    *_, start, end = image.starts
    padding = {at for at in range(start, end) if image.intact[at] == 0}
    for at in range(start, end):
        for content in cuts(image.intact, at):
            image.segment.write_bytes(content)
            if len(content) < len(image.intact):
                continue  # a file is never shorter than it was made, whatever becomes of its blocks
            sequence, _ = image.replayed()
            # Zeros for zeros is no damage at all, nor is a flip in what nothing covers.
            assert sequence == 2 or (sequence == 3 and padding)
            if sequence == 3:
                assert not image.intact[at:end].strip(b"\0") or at in padding


def test_a_synced_block_that_is_torn_is_damage_though_it_is_the_last(tmp_path: Path) -> None:
    image = Image(tmp_path, synced=3)
    *_, start, end = image.starts
    survived = 0
    for at in range(start, end):
        for content in cuts(image.intact, at):
            image.segment.write_bytes(content)
            damage = damage_found(image)
            survived += damage is None
            cut = len(content) < len(image.intact)
            assert damage in {None, (image.segment, at if cut else start)}
    # A payload's damage is told when that is read.
    assert survived <= 2 * 15 + 3 * PAYLOAD, "only zeros for zeros and padding may change unnoticed"


def test_a_torn_tail_is_told_and_the_next_run_goes_on_behind_it(image: Image) -> None:
    end = image.starts[-1]
    image.segment.write_bytes(image.intact[: end - 9] + bytes(len(image.intact) - end + 9))
    with opened(image.directory) as (journal, listener, remembered):
        assert [entry.ticket for entry in remembered.entries] == [0, 1]
        assert journal.statistics().torn_tail
        listener.wait(journal.append([accepted(2)], {}))
    found = recovered(image.directory)
    assert [entry.ticket for entry in found.entries] == [0, 1, 2]


def damage_found(image: Image) -> tuple[object, int] | None:
    try:
        image.replayed()
    except JournalCorrupt as error:
        return error.path, error.offset
    return None


@pytest.mark.parametrize("block", [0, 1])
def test_damage_before_the_last_block_is_never_taken_for_a_torn_tail(
    image: Image, block: int
) -> None:
    start, end = image.starts[block : block + 2]
    survived = 0
    for at in range(start, end):
        flipped = bytes([image.intact[at] ^ 0x10])
        image.segment.write_bytes(image.intact[:at] + flipped + image.intact[at + 1 :])
        damage = damage_found(image)
        survived += damage is None
        assert damage in {None, (image.segment, start)}
    assert survived <= 7 + PAYLOAD, "only padding, and a payload, may change unnoticed"


def test_a_damaged_journal_is_left_as_it_is(image: Image) -> None:
    at = image.starts[1] - PAYLOAD - 8  # in its rows
    image.segment.write_bytes(image.intact[:at] + b"?" + image.intact[at + 1 :])
    names = sorted(path.name for path in image.directory.iterdir())
    for _ in range(2):
        with pytest.raises(JournalCorrupt, match=r"000000000001.segment is damaged at offset"):
            recovered(image.directory)
    assert sorted(path.name for path in image.directory.iterdir()) == names
    image.segment.write_bytes(image.intact)
    assert len(recovered(image.directory).entries) == 3


def closed(directory: Path) -> Path:
    """A journal that was closed in order, with live samples."""
    with opened(directory) as (journal, _, _):
        facts: list[Fact] = [accepted(ticket) for ticket in range(8)]
        journal.append([*facts, Planned(0, "d", 0.0, (((0, 1),),), (2,))], {})
    return directory


def test_a_damaged_payload_is_named(tmp_path: Path) -> None:
    segment = closed(tmp_path / "j") / SEGMENT
    content = bytearray(segment.read_bytes())
    at = content.index(span_of(accepted(5).entry.sample).tobytes())
    content[at + 3] ^= 1
    segment.write_bytes(content)
    with opened(tmp_path / "j") as (journal, _, found):  # it costs that sample, when it is wanted
        payloads = {entry.ticket: entry.sample.payload for entry in found.entries}
        assert payloads[5] == InJournal(32)
        assert payloads[4] == payload_of(4, 32)
        with pytest.raises(JournalCorrupt, match="payload of sample s-5 does not match") as caught:
            journal.fetch(5)
    assert caught.value.offset == at


def test_a_foreign_segment_is_an_error(tmp_path: Path) -> None:
    (closed(tmp_path / "j") / SEGMENT).write_bytes(bytes(16 << 10))
    with pytest.raises(JournalCorrupt, match="not the header of that segment"):
        recovered(tmp_path / "j")


def test_a_missing_index_is_an_error(tmp_path: Path) -> None:
    (closed(tmp_path / "j") / "index").unlink()
    with pytest.raises(JournalCorrupt, match="it has no snapshot"):
        recovered(tmp_path / "j")


def test_an_index_that_is_something_else_is_an_error(tmp_path: Path) -> None:
    (closed(tmp_path / "j") / "index").write_bytes(b"something else" * 10_000)
    with pytest.raises(JournalError, match="index"):
        recovered(tmp_path / "j")


def test_a_segment_lost_from_the_middle_of_the_log_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path / "j", BATCH, map_bytes=40 << 10) as (journal, listener, _):
        ticket = 0
        while journal._store.active.number < 6:  # the index is full early on, and the log goes on
            listener.wait(journal.append([accepted(ticket), accepted(ticket + 1)], {}))
            ticket += 2
        assert journal.failure is not None
        killed = as_if_killed(tmp_path / "j", tmp_path / "killed")
    assert len(recovered(as_if_killed(killed, tmp_path / "whole")).entries) == ticket
    (killed / "000000000005.segment").unlink()
    with pytest.raises(JournalCorrupt, match=r"000000000005.segment.*missing"):
        recovered(killed)
