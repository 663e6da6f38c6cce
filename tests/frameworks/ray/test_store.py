"""`ray://`, in a Ray cluster that runs here."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import StoredObject
from rollout_workers.stores.interface import Missing, PayloadStore
from rollout_workers.stores.ray import RayStore
from rollout_workers.stores.registry import open_store
from tests.support.payload_stores import PayloadStoreTests, read, whole
from tests.support.ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_cluster() as address, pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", address)  # or processes of ours may join another one
        yield address


@pytest.mark.usefixtures("cluster")
class TestRay(PayloadStoreTests):
    @pytest.fixture
    def address(self) -> str:
        return "ray://rollouts/payloads"

    def test_what_a_holder_had_is_missing_once_it_has_ended(self, address: str) -> None:
        store = open_store(address)
        assert isinstance(store, RayStore)
        stored = store.put("p.8/0", [b"abc"])
        node = stored.key.rpartition("@")[2]
        holder = ray.get_actor(f"payloads@{node}", "rollouts")
        ray.kill(holder)
        deadline = time.monotonic() + 60
        while not gone(store, stored):
            assert time.monotonic() < deadline
        assert store.release([stored.key]) == []
        again = eventually_put(store, "p.8/1")
        assert read(store, whole(again)) == [b"abc"]
        store.release([again.key])

    def test_who_knew_a_holder_that_ended_asks_its_successor(self, address: str) -> None:
        """To read, to list and to release what was put since."""
        other = open_store(address)
        stored = other.put("p.8/2", [b"abc"])
        knowing = [open_store(address) for _ in range(3)]
        for store in knowing:
            assert read(store, whole(stored)) == [b"abc"]
        ray.kill(ray.get_actor(f"payloads@{stored.key.rpartition('@')[2]}", "rollouts"))
        again = eventually_put(other, "p.8/3")
        assert read(knowing[0], whole(again), whole(stored)) == [b"abc", "missing"]
        assert knowing[1].list("p.8/") == [again.key]
        assert knowing[2].release([again.key]) == []
        assert other.list("p.8/") == []

    def test_what_a_holder_took_too_long_to_keep_is_not_kept(
        self, store: PayloadStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def too_late(*_: object, **__: object) -> None:
            raise GetTimeoutError("it has not answered yet")

        store.release([eventually_put(store, "p.9/0").key])
        with monkeypatch.context() as patched:
            patched.setattr(ray, "get", too_late)
            with pytest.raises(StoreFailed, match="not answered"):
                store.put("p.9/1", [bytes(1 << 20)])
        assert store.list("p.9/") == [], "it is asked in the order of the calls"

    def test_an_object_that_ray_does_not_come_to_is_asked_for_again(
        self, store: PayloadStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored, get, late = eventually_put(store, "p.9/2"), ray.get, 0

        def late_once(ids: Any, **options: Any) -> Any:
            nonlocal late
            if isinstance(ids, list) and not late:
                late += 1
                raise GetTimeoutError("it has not come yet")
            return get(ids, **options)

        with monkeypatch.context() as patched:
            patched.setattr(ray, "get", late_once)
            assert read(store, whole(stored)) == [b"abc"]
        assert late, "this test has to make objects late"
        store.release([stored.key])

    def test_an_address_without_a_name_is_refused(self) -> None:
        with pytest.raises(StoreFailed, match="ray://NAMESPACE/NAME"):
            open_store("ray://rollouts")


def gone(store: PayloadStore, stored: StoredObject) -> bool:
    """Whether it is missing; False while Ray cannot say."""
    try:
        return isinstance(store.get([whole(stored)])[0], Missing)
    except StoreFailed:
        return False


def eventually_put(store: PayloadStore, key: str) -> StoredObject:
    """Put an object once Ray has seen that the holder is no more."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return store.put(key, [b"abc"])
        except StoreFailed:
            assert time.monotonic() < deadline
