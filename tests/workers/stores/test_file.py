"""Objects as files: whole or not there, inside of the root, gone when released."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_workers.stores.file import PART, ROOT, FileStore, key_of, place
from rollout_workers.stores.interface import Missing
from tests.support.payload_stores import PayloadStoreTests

SPANS = [bytes(range(8)), b"\0" * 8, bytes(range(100, 116))]
BYTES = b"".join(SPANS)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def part(stored: StoredObject, offset: int, nbytes: int) -> Reference:
    return Reference(stored, offset, nbytes)


def as_read(found: memoryview | Missing) -> bytes | Missing:
    return found if isinstance(found, Missing) else bytes(found)


def read(store: FileStore, *references: Reference) -> list[bytes | Missing]:
    return list(map(as_read, store.get(references)))


def test_more_buffers_than_one_write_takes(store: FileStore) -> None:
    spans = [bytes([i % 256]) * 8 for i in range(3000)]
    stored = store.put("p.1/0", spans)
    assert read(store, part(stored, 0, stored.nbytes)) == [b"".join(spans)]


def test_an_object_is_a_file_of_safetensors(store: FileStore, root: Path) -> None:
    store.put("p.1/0", SPANS)
    data = (root / "p.1" / "0").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header["spans"] == {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}
    assert data[8 + size :] == BYTES
    assert (8 + size) % 64 == 0


def test_what_another_writer_of_safetensors_has_put_is_an_object(
    store: FileStore, root: Path
) -> None:
    text = b'{"x":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}}'
    (root / "theirs").write_bytes(len(text).to_bytes(8, "little") + text + BYTES[:16])
    stored = StoredObject(store.address, "theirs", 16)
    assert read(store, part(stored, 8, 8)) == [BYTES[8:16]]
    assert store.list("") == ["theirs"]


@pytest.mark.parametrize("size", [0, 4, 100])
def test_a_file_that_is_not_whole_is_missing(store: FileStore, root: Path, size: int) -> None:
    stored = store.put("p.1/0", SPANS)
    os.truncate(root / "p.1" / "0", size)
    assert isinstance(store.get([part(stored, 0, 8)])[0], Missing)


def test_what_is_no_file_is_missing(store: FileStore, root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    (root / "link").symlink_to("/etc/passwd")
    (root / "elsewhere").symlink_to("/etc")
    for key in ("pipe", "folder", "link", "elsewhere/passwd", "a" * 400):
        stored = StoredObject(store.address, key, 8)
        assert isinstance(store.get([part(stored, 0, 8)])[0], Missing), key
    assert store.list("") == []


def test_a_link_is_not_written_through(store: FileStore, root: Path, tmp_path: Path) -> None:
    (root / "p.1").symlink_to(tmp_path)
    with pytest.raises(StoreFailed):
        store.put("p.1/0", SPANS)
    assert files(tmp_path) == ["payloads", "payloads/p.1"]


def test_keys_are_listed_by_how_they_begin(store: FileStore) -> None:
    keys = ["p.1/0", "p.1/10", "p.10/0", "q.1/0", "alone"]
    for key in keys:
        store.put(key, SPANS)
    assert store.list("") == sorted(keys)
    assert store.list("p.1/") == ["p.1/0", "p.1/10"]
    assert store.list("p.") == ["p.1/0", "p.1/10", "p.10/0"]
    assert store.list("p.1/1") == ["p.1/10"]
    assert store.list("x") == []


def _begin_to_write(address: str, at_write: int) -> None:
    """Die by kill -9 when the file is written to."""
    os.writev = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    FileStore.open(address).put("p.1/0", SPANS)


def test_what_a_killed_writer_leaves_is_listed_and_not_read_and_goes(
    store: FileStore, root: Path
) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_begin_to_write, args=(store.address, 0)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert files(root) == ["p.1", "p.1/0" + PART]
    assert store.list("p.") == ["p.1/0"]
    stored = StoredObject(store.address, "p.1/0", 0)
    assert isinstance(store.get([part(stored, 0, 0)])[0], Missing)
    assert store.release(["p.1/0"]) == []
    assert files(root) == []


def test_a_disk_without_room_leaves_nothing(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreFailed, match="No space left"):
        store.put("p.1/0", SPANS)
    assert files(root) == []


def test_a_put_whose_folder_cannot_be_made_durable_leaves_nothing(
    store: FileStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        if S_ISDIR(os.fstat(descriptor).st_mode) and files(root)[-1:] == ["p.1/0"]:
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreFailed, match="Input/output"):
        store.put("p.1/0", SPANS)
    assert files(root) == []


def test_of_a_root_that_is_not_there_nothing_is_known(store: FileStore, root: Path) -> None:
    stored = store.put("p.1/0", SPANS)
    away = root.rename(root.with_name("away"))
    for ask in (
        lambda: store.get([part(stored, 0, 8)]),
        lambda: store.release(["p.1/0"]),
        lambda: store.list(""),
        lambda: store.put("p.1/1", SPANS),
    ):
        with pytest.raises(StoreFailed):
            ask()
    root.mkdir()  # as a mount point is there when nothing is mounted
    with pytest.raises(StoreFailed, match="mounted"):
        store.get([part(stored, 0, 8)])
    with pytest.raises(StoreFailed, match="mounted"):
        store.list("")
    with pytest.raises(StoreFailed, match="mounted"):
        store.put("p.1/1", [BYTES])
    root.rmdir()  # nothing was written there, where nobody would see it again
    away.rename(root)
    assert read(store, part(stored, 0, 8)) == [BYTES[:8]]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("file:///nowhere/at/all", "mount it"),
        ("file://elsewhere/tmp", "whole path"),
        ("file:tmp", "whole path"),
        ("file:///", "whole path"),
        ("file:///tmp?mode=x", "%3F"),
    ],
)
def test_an_address_that_is_none(address: str, why: str) -> None:
    with pytest.raises(StoreFailed, match=why):
        FileStore.open(address)


@pytest.mark.parametrize("key", ["..", "../x", "../../etc/x", "/etc/x", "a/../../x", ".", "", "a/"])
def test_no_key_leads_out_of_the_root(store: FileStore, root: Path, key: str) -> None:
    store.put(key, SPANS)
    assert store.list("") == [key]
    assert [path for path in root.parent.rglob("*") if path.is_file()] == [
        path for path in root.rglob("*") if path.is_file()
    ]
    assert store.release([key]) == []
    assert files(root) == []


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_every_key_has_a_path_of_its_own(key: str, writing: bool) -> None:
    folder, name = place(key)
    for item in (folder, name):
        assert item == ROOT or (item and not item.startswith(".") and "/" not in item)
    assert name != ROOT
    assert key_of(folder, name + PART if writing else name) == key


@pytest.mark.parametrize("name", [".nfs0001", "a b", "%2e", "%zz", ".hidden" + PART])
def test_what_is_no_objects_file_has_no_key(name: str) -> None:
    assert key_of(ROOT, name) is None


class TestFiles(PayloadStoreTests):
    """What every payload store has to do; other engines in tests/frameworks."""

    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}"
