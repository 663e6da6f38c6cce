"""`examples/stored_sample.py`: what it puts there can be pushed, and is read back as it was."""

import numpy as np

from examples.stored_sample import stored_sample
from rollout_workers.producer.encode import encode_references
from rollout_workers.stores.file import FileStore


def test_a_sample_that_lies_in_a_store_can_be_pushed(store: FileStore) -> None:
    ids, mask = np.arange(5), np.array([0, 1, 1, 0, 1], bool)
    referenced = stored_sample(store.address, "worker-3/17", ids, mask)
    (sample,) = encode_references([referenced], [store.address], None)
    assert (sample.tokens, sample.loss_tokens) == (5, 3)
    assert sample.reference is not None
    (span,) = store.get([sample.reference])
    assert span == memoryview(ids.tobytes() + mask.tobytes() + bytes(3))
