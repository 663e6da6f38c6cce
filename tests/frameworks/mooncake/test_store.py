"""`mooncake://`, against a Mooncake Store that runs here."""

import time
from contextlib import suppress
from pathlib import Path

import pytest

from rollout_dispatcher.errors import StoreFailed
from rollout_workers.stores.interface import Missing
from rollout_workers.stores.mooncake import READ_FIRST, READ_MOST
from rollout_workers.stores.registry import open_store
from tests.support.mooncake import Mooncake
from tests.support.payload_stores import PayloadStoreTests, whole


class TestMooncake(PayloadStoreTests):
    @pytest.fixture
    def address(self, mooncake: str) -> str:
        return mooncake

    def test_what_does_not_fit_is_refused_and_leaves_nothing(self, address: str) -> None:
        store = open_store(address)
        with pytest.raises(StoreFailed, match="cannot be put"):
            store.put("p.9/0", [bytes(1 << 20)] * 600)
        assert store.list("p.9/") == []


def test_a_master_that_is_not_there_is_told() -> None:
    with pytest.raises(StoreFailed, match="does not answer"):
        open_store("mooncake://127.0.0.1:1")


def test_an_address_that_says_too_much_is_refused() -> None:
    with pytest.raises(StoreFailed, match="an address is mooncake://HOST:PORT"):
        open_store("mooncake://127.0.0.1:1?colour=red")


def test_how_long_a_read_takes_to_fail_does_not_grow_with_what_it_reads(tmp_path: Path) -> None:
    engine = Mooncake(tmp_path)
    try:
        store = open_store(engine.address)
        objects = [store.put(f"p.8/{at}", [bytes(1000)]) for at in range(READ_FIRST + 20)]
        engine.memory.kill()
        engine.memory.wait()
        began = time.monotonic()
        # The first tries end at once; then the engine waits for each connection that it tries.
        for _ in range(4):
            with pytest.raises(StoreFailed, match="cannot be had"):
                store.get([whole(one) for one in objects])
        assert time.monotonic() < began + len(objects) / 2
        store.close()
    finally:
        engine.close()


def test_nor_does_it_where_what_is_read_first_is_there(tmp_path: Path) -> None:
    engine = Mooncake(tmp_path)
    try:
        store = open_store(engine.address)
        objects = [store.put(f"p.8/{at}", [bytes(1000)]) for at in range(60)]
        other = engine.more_memory()  # where about every second one goes from now on
        objects += [store.put(f"p.9/{at}", [bytes(1000)]) for at in range(64)]
        wanted = [whole(one) for one in objects]
        assert Missing not in map(type, store.get(wanted))
        other.kill()
        other.wait()
        found, took = list[memoryview | Missing](), list[float]()
        while not found:
            began = time.monotonic()
            with suppress(StoreFailed):
                found = store.get(wanted)
            took.append(time.monotonic() - began)
        assert took[0] < READ_MOST + 4
        assert max(took[1:]) < 4
        assert Missing not in map(type, found[:60])
        assert Missing in map(type, found[60:])
        store.close()
    finally:
        engine.close()
