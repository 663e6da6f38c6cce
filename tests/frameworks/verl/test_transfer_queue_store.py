"""`transferqueue://`, against a TransferQueue that runs here."""

from collections.abc import Iterator

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.spans import join
from rollout_workers.stores.registry import open_store
from tests.support.payload_stores import PayloadStoreTests, read
from tests.support.ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    with ray_cluster(num_cpus=4):
        tq.init()
        yield
        tq.close()


@pytest.mark.usefixtures("queue")
class TestTransferQueue(PayloadStoreTests):
    @pytest.fixture
    def address(self) -> str:
        return "transferqueue://rollouts"

    def test_samples_that_others_have_put_are_the_spans_of_their_fields(self) -> None:
        ids, mask = (
            [torch.arange(5), torch.arange(3)],
            [torch.ones(5).bool(), torch.zeros(3).bool()],
        )
        columns = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            for name, values in (("input_ids", ids), ("loss_mask", mask))
        }
        tq.kv_batch_put(["x", "y"], "train", TensorDict(columns, batch_size=2))
        address = "transferqueue://train?fields=loss_mask,input_ids"
        store = open_store(address)
        spans = [
            join([m.numpy().tobytes(), i.numpy().tobytes()]) for m, i in zip(mask, ids, strict=True)
        ]
        keys = {"y": spans[1], "x": spans[0], "z": b"12345678"}
        wanted = [
            Reference(StoredObject(address, key, len(span)), 0, len(span))
            for key, span in keys.items()
        ]
        assert read(store, *wanted) == [spans[1], spans[0], "missing"]
        with pytest.raises(StoreFailed, match="push references"):
            store.put("w", [b"abc"])
        assert store.release(["x", "y"]) == []
        assert store.list("") == []
