"""`ray://`, in a Ray cluster that runs here."""

import time
from collections.abc import Iterator

import pytest
import ray

from rollout_dispatcher.errors import StoreFailed
from rollout_workers.stores.interface import Missing
from rollout_workers.stores.ray import RayStore
from rollout_workers.stores.registry import open_store
from tests.support.payload_stores import PayloadStoreTests, read, whole
from tests.support.ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_cluster() as address:
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
        while not isinstance(store.get([whole(stored)])[0], Missing):
            assert time.monotonic() < deadline
        assert store.release([stored.key]) == []
        again = store.put("p.8/1", [b"abc"])
        assert read(store, whole(again)) == [b"abc"]
        store.release([again.key])

    def test_an_address_without_a_name_is_refused(self) -> None:
        with pytest.raises(StoreFailed, match="ray://NAMESPACE/NAME"):
            open_store("ray://rollouts")
