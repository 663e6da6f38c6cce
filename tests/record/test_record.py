"""The record's files: what is written is read, whatever happened to the process or the disk."""

import gzip
import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record import writer as writer_module
from rollout_dispatcher.record.reader import Reader
from rollout_dispatcher.record.segments import FORMAT, Event, segments
from rollout_dispatcher.record.writer import RecordWriter
from tests.support.server import eventually

HEADER = {"run": "r", "process": "p", "release": "1.0", "unix": 1000.0, "config": {"dp_size": 2}}
MIB = 2**20


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., RecordWriter]:
    """`write(events)`: have them written, all at once."""

    def run(events: list[Event], budget: int = MIB) -> RecordWriter:
        writer = RecordWriter(tmp_path / "record", budget, HEADER)
        for event in events:
            writer.put(event)
        writer.close(10)
        return writer

    return run


def read(folder: Path) -> tuple[list[Event], list[str]]:
    reader = Reader(folder / "record")
    return [event for _, event in reader.events()], reader.notes


def numbered(count: int, start: int = 0) -> list[Event]:
    return [{"event": "state", "at": float(at), "buffered": at} for at in range(start, count)]


def test_what_is_written_is_read_and_begins_with_whose_it_is(
    tmp_path: Path, write: Callable[..., RecordWriter]
) -> None:
    write(numbered(5))
    (path,) = (path for _, path in segments(tmp_path / "record"))
    first, *rest = gzip.decompress(path.read_bytes()).splitlines()
    assert json.loads(first) == {"event": "segment", "format": FORMAT, "number": 1, **HEADER}
    assert list(map(json.loads, rest)) == numbered(5)
    reader = Reader(tmp_path / "record")
    assert [(header.run, header.unix) for header, _ in reader.events()] == [("r", 1000.0)] * 5
    assert reader.notes == []


def test_a_file_that_is_cut_anywhere_is_read_up_to_there(
    tmp_path: Path, write: Callable[..., RecordWriter]
) -> None:
    write(numbered(200))
    ((_, path),) = segments(tmp_path / "record")
    whole = path.read_bytes()
    most = 0
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        events, notes = read(tmp_path)
        assert events == numbered(len(events))
        assert notes or length in {0, whole.index(b"\x1f\x8b", 1)}  # between two members
        most = max(most, len(events))
    assert most > 150


def test_damage_costs_what_is_behind_it_in_its_segment_alone(
    tmp_path: Path, write: Callable[..., RecordWriter]
) -> None:
    write(numbered(50))
    write(numbered(60, 50))
    (_, path), _ = segments(tmp_path / "record")
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"no json\n"))
    events, (note,) = read(tmp_path)
    assert events == numbered(60)
    assert "damaged in line 52" in note


def test_the_oldest_goes_when_the_budget_is_spent(
    tmp_path: Path, write: Callable[..., RecordWriter]
) -> None:
    noise = gzip.compress(bytes(range(256)) * 64).hex()
    for at in range(60):
        write([{"event": "noise", "at": at, "what": f"{at}{noise}" * 300}], budget=MIB // 8)
    kept = segments(tmp_path / "record")
    assert sum(path.stat().st_size for _, path in kept) <= MIB // 8 * 1.2
    assert 1 < len(kept) < 60
    assert kept[-1][0] == 60
    assert [event["at"] for event in read(tmp_path)[0]] == [*range(60 - len(kept), 60)]


def test_what_comes_at_once_keeps_to_the_budget_and_the_newest_of_it_stays(
    tmp_path: Path, write: Callable[..., RecordWriter]
) -> None:
    random = Random(0)
    events: list[Event] = [
        {"event": "state", "at": float(at), "seen": [random.random() for _ in range(1000)]}
        for at in range(400)
    ]
    writer = write(events)
    files = [path for _, path in segments(tmp_path / "record")]
    assert writer.nbytes == sum(path.stat().st_size for path in files)
    assert MIB // 2 < writer.nbytes <= MIB
    found, notes = read(tmp_path)
    assert (found, notes) == (events[-len(found) :], [])


def test_what_is_not_a_segment_is_left_alone(
    tmp_path: Path, write: Callable[..., RecordWriter]
) -> None:
    (tmp_path / "record").mkdir()
    other = tmp_path / "record" / "notes.txt"
    other.write_text("mine")
    write(numbered(1), budget=1)
    write(numbered(1), budget=1)
    assert other.read_text() == "mine"
    assert read(tmp_path)[0] == numbered(1)


def test_a_disk_that_takes_nothing_is_counted_and_said_once_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "WRITE_EVERY_SECONDS", 0.01)
    place = tmp_path / "record"
    place.write_text("a file where the directory would be")
    writer = RecordWriter(place, MIB, HEADER)
    writer.put({"event": "state", "at": 0.0})
    eventually(lambda: writer.errors > 2, "several tries")
    place.unlink()
    eventually(place.is_dir, "the directory")
    writer.put({"event": "state", "at": 1.0})
    writer.close(10)
    events, _ = read(tmp_path)
    assert {"event": "lost", "events": 1} in events
    assert {"event": "state", "at": 1.0} in events
    assert [log.levelname for log in caplog.records if "recorded" in log.message][:1] == ["ERROR"]
    assert sum(log.levelname == "ERROR" for log in caplog.records) == 1


def test_a_full_disk_is_not_filled_with_empty_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WRITE_EVERY_SECONDS", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # as if there were room for so much
    try:
        writer = RecordWriter(tmp_path / "record", MIB, HEADER)
        eventually(lambda: writer.errors > 3, "several tries")
        assert len(segments(tmp_path / "record")) <= 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    eventually(lambda: bool(segments(tmp_path / "record")), "a segment")
    writer.put({"event": "state", "at": 1.0})
    writer.close(10)
    assert {"event": "state", "at": 1.0} in read(tmp_path)[0]


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_WAITING_NUMBERS", 10)
    writer = RecordWriter(tmp_path / "record", MIB, HEADER)
    for at in range(5):
        writer.put({"event": "state", "at": float(at)}, 4)
    assert writer.errors == 3
    writer.close(10)
    assert [event["event"] for event in read(tmp_path)[0]] == ["lost", "state", "state"]


def test_another_format_is_refused_by_name(
    tmp_path: Path, write: Callable[..., RecordWriter]
) -> None:
    write(numbered(3))
    ((_, path),) = segments(tmp_path / "record")
    text = gzip.decompress(path.read_bytes()).replace(b'"format":1', b'"format":9')
    path.write_bytes(gzip.compress(text))
    with pytest.raises(ConfigError, match="has format 9, and this release reads format 1"):
        read(tmp_path)


@pytest.mark.parametrize("make", [True, False])
def test_a_directory_without_a_record_is_a_usage_error(tmp_path: Path, make: bool) -> None:
    if make:
        (tmp_path / "record").mkdir()
    with pytest.raises(ConfigError, match="no record" if make else "cannot be read"):
        read(tmp_path)
