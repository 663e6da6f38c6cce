"""What every payload store has to do, whichever its engine: a test class to inherit from."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout_dispatcher.payload import Reference, StoredObject
from rollout_workers.stores.interface import Missing, Part, PayloadStore
from rollout_workers.stores.registry import open_store
from tests.support.referenced_run import train_on_references

#: A process that puts an object, and is then gone at once.
PUTS_AND_DIES = """
import os, sys
from rollout_workers.stores.registry import open_store
stored = open_store(sys.argv[1]).put(sys.argv[2], [b"left behind"])
print(stored.key, flush=True)
os.kill(os.getpid(), 9)
"""

#: A client that is closed while its threads read, as a rank is that is fenced.
CLOSES_WHILE_IT_READS = """
import sys, threading
from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference
from rollout_workers.stores.interface import Part
from rollout_workers.stores.registry import OpenedStores
stores = OpenedStores()
stores.allow([sys.argv[1]])
stored = [stores.put(f"{sys.argv[2]}/{at}", [bytes(100_000)]) for at in range(8)]
wanted = [Reference(one, 0, one.nbytes) for one in stored]
parts = [[Part(0, 100_000 * at, 100_000)] for at in range(8)]
reading = threading.Barrier(5)
def read():
    memory = memoryview(bytearray(800_000))
    stores.get_into(wanted, memory, parts)
    reading.wait()
    try:
        while True:
            stores.get_into(wanted, memory, parts)
    except StoreFailed as error:
        assert "closed" in str(error), error
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
reading.wait()
stores.close()
for thread in threads:
    thread.join()
"""


def whole(stored: StoredObject) -> Reference:
    """All of an object."""
    return Reference(stored, 0, stored.nbytes)


def read(store: PayloadStore, *references: Reference) -> list[bytes | str]:
    """Bytes, and "missing" for what is not there."""
    found = store.get(references)
    return ["missing" if isinstance(item, Missing) else bytes(item) for item in found]


def end_of(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a process that runs this."""
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


class PayloadStoreTests:
    """Inherit, and give `address` and, if there is more to do, `store` as fixtures."""

    @pytest.fixture
    def address(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, address: str) -> PayloadStore:
        return open_store(address)

    def test_what_was_put_is_there_whole_and_in_parts(
        self, store: PayloadStore, address: str
    ) -> None:
        stored = store.put("p.1/0", [b"abc", memoryview(b""), bytearray(b"defgh")])
        assert (stored.store, stored.nbytes) == (address, 8)
        assert stored.key.startswith("p.1/0")
        other = open_store(address)
        wanted = [Reference(stored, 2, 3), whole(stored), Reference(stored, 7, 1)]
        assert read(other, *wanted) == [b"cde", b"abcdefgh", b"h"]
        store.release([stored.key])

    def test_a_key_that_was_put_has_its_bytes_for_ever(self, store: PayloadStore) -> None:
        stored = store.put("p.1/1", [b"first"])
        assert store.put("p.1/1", [b"first"]) == stored
        assert read(store, whole(stored)) == [b"first"]
        store.release([stored.key])

    def test_what_is_not_there_or_not_whole_is_missing(self, store: PayloadStore) -> None:
        stored = store.put("p.1/2", [b"abc"])
        gone = store.put("p.1/3", [b"abc"])
        assert store.release([gone.key]) == []
        found = read(store, whole(gone), whole(stored), Reference(stored, 1, 3))
        assert found == ["missing", b"abc", "missing"]
        store.release([stored.key])

    def test_parts_go_where_they_belong_and_what_is_missing_is_told(
        self, store: PayloadStore
    ) -> None:
        one, two = store.put("p.1/4", [b"abcdefgh"]), store.put("p.1/5", [b"ijk"])
        gone = store.put("p.1/6", [b"xyz"])
        store.release([gone.key])
        memory = memoryview(bytearray(b"." * 10))
        wanted = [Reference(one, 2, 6), whole(two), whole(gone), Reference(two, 1, 3)]
        parts = [[Part(0, 7, 2), Part(2, 0, 0), Part(3, 1, 3)], [Part(1, 5, 2)]]
        parts += [[Part(0, 9, 1)], [Part(0, 9, 1), Part(2, 9, 1)]]
        found = store.get_into(wanted[:2], memory, parts[:2])
        assert (found, bytes(memory)) == ([None, None], b".fgh.jkcd.")
        found = store.get_into(wanted, memory, parts)
        assert [item is None for item in found] == [True, True, False, False]
        assert bytes(memory[:9]) == b".fgh.jkcd"
        store.release([one.key, two.key])

    def test_what_is_released_is_gone_and_may_be_released_again(self, store: PayloadStore) -> None:
        stored = [store.put(f"p.2/{at}", [b"x"]) for at in range(3)]
        keys = [item.key for item in stored]
        assert sorted(store.list("p.2/")) == sorted(keys)
        assert store.release(keys[:2]) == []
        assert store.release(keys[:2]) == []
        assert store.list("p.2/") == keys[2:]
        assert store.list("p.20/") == []
        assert store.release(keys) == []
        assert store.release(keys) == store.release([]) == []
        assert store.list("p.2/") == []

    def test_what_was_read_stays_as_it_is(self, store: PayloadStore) -> None:
        data = os.urandom(1 << 20)
        stored = store.put("p.3/0", [data])
        (held,) = store.get([whole(stored)])
        store.release([stored.key])
        store.release([store.put(f"p.3/{at}", [bytes(1 << 20)]).key for at in range(1, 5)])
        assert not isinstance(held, Missing)
        assert bytes(held) == data

    def test_an_object_outlives_the_process_that_has_put_it(
        self, store: PayloadStore, address: str
    ) -> None:
        ended = end_of(PUTS_AND_DIES, address, "q.7/0")
        assert ended.returncode == -9, ended.stderr
        key = ended.stdout.split()[-1]
        assert store.list("q.7/") == [key]
        assert read(store, whole(StoredObject(address, key, 11))) == [b"left behind"]
        store.release([key])

    def test_a_client_that_is_closed_while_it_reads_goes_on_to_its_end(
        self, store: PayloadStore, address: str
    ) -> None:
        ended = end_of(CLOSES_WHILE_IT_READS, address, "q.8")
        assert ended.returncode == 0, ended.stderr
        store.release(store.list("q.8/"))

    def test_many_threads_put_and_read_at_once(self, store: PayloadStore) -> None:
        def once(at: int) -> bool:
            data = os.urandom(50_000 + at)
            stored = store.put(f"p.4/{at}", [data[:1000], data[1000:]])
            same = read(store, whole(stored), Reference(stored, 1000, 9)) == [data, data[1000:1009]]
            return same and store.release([stored.key]) == []

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(once, range(32)))
        assert store.list("p.4/") == []

    def test_a_large_object_is_there_as_it_was(self, store: PayloadStore) -> None:
        data = os.urandom(1 << 20) * 64
        stored = store.put("p.5/0", [data])
        assert read(store, whole(stored), Reference(stored, 1 << 25, 1 << 20)) == [
            data,
            data[: 1 << 20],
        ]
        store.release([stored.key])

    @pytest.mark.e2e
    def test_a_run_trains_on_what_lies_there_and_leaves_nothing(
        self, store: PayloadStore, address: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        store.release(store.list(""))
        train_on_references(tmp_path_factory.mktemp("run"), address)
