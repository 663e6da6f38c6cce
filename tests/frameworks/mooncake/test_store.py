"""`mooncake://`, against a Mooncake Store that runs here."""

import pytest

from rollout_dispatcher.errors import StoreFailed
from rollout_workers.stores.registry import open_store
from tests.support.payload_stores import PayloadStoreTests


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
