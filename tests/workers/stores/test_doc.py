"""The example in docs/payload-stores.md does what it says."""

import re
from types import SimpleNamespace

import numpy as np

from rollout_workers.producer.encode import EncodedSample, encode_references
from rollout_workers.stores.file import FileStore
from tests.support.source import ROOT


def test_what_is_put_as_in_the_document_can_be_pushed(store: FileStore) -> None:
    text = (ROOT / "docs" / "payload-stores.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    pushed: list[EncodedSample] = []
    producer = SimpleNamespace(
        push_references=lambda samples: pushed.extend(
            encode_references(samples, [store.address], None)
        )
    )
    ids, mask = np.arange(5), np.array([0, 1, 1, 0, 1], bool)
    names = {"producer": producer, "input_ids": ids, "loss_mask": mask}
    exec(code.replace("file:///mnt/shared/rollouts", store.address), names)
    (sample,) = pushed
    assert (sample.tokens, sample.loss_tokens) == (5, 3)
    assert sample.reference is not None
    (span,) = store.get([sample.reference])
    assert span == memoryview(ids.tobytes() + mask.tobytes() + bytes(3))
