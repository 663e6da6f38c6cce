"""Samples that lie in a payload store before they are pushed: what is said has to be so."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples.stored_sample import stored_sample
from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_workers.producer.encode import ReferencedSample, encode_references
from rollout_workers.producer.pushes import batches, header
from rollout_workers.stores.file import FileStore

STORE = "file:///data"
SCHEMA = Schema((Field("input_ids", DType.INT64), Field.text("env")))
STORED = StoredObject(STORE, "theirs/1", 64)
ONE = ReferencedSample(Reference(STORED, 16, 32), SCHEMA, 3, 2, {"env": 5}, sample_id="a")


def test_they_are_pushed_without_a_payload() -> None:
    other = replace(ONE, reference=Reference(StoredObject(STORE, "theirs/2", 32), 0, 32))
    samples = encode_references([ONE, other, replace(ONE, group_id="g")], [STORE], 4)
    (batch,) = batches(samples[:2], 1)
    push = header(batch, "me", 7)
    assert push.objects == [
        m.ObjectHeader(store=STORE, key="theirs/1", nbytes=64),
        m.ObjectHeader(store=STORE, key="theirs/2", nbytes=32),
    ]
    assert push.places == [(0, 16), (1, 0)]
    assert (push.tokens, push.loss_tokens, push.rows) == ([3, 3], [2, 2], {"env": [5, 5]})
    assert push.spans(0) == [0, 0]
    assert [sample.group_size for sample in samples] == [None, None, 4]


def test_content_is_what_is_said_beside_it_wherever_it_was_put() -> None:
    """Who replays after a crash puts it again, under another key."""
    again = replace(ONE, reference=Reference(StoredObject(STORE, "theirs/2", 32), 0, 32))
    others = [replace(ONE, policy_version=1), replace(ONE, group_id="g", group_size=2)]
    unnamed = replace(ONE, sample_id=None)
    sums = [
        sample.checksum
        for sample in encode_references([ONE, again, *others, unnamed], [STORE], None)
    ]
    assert (sums[0], sums[-1]) == (sums[1], None)
    assert len(set(sums)) == 4


@pytest.mark.parametrize(
    ("sample", "reason", "why"),
    [
        (replace(ONE, tokens=4), "bad-metadata", "takes 40 bytes with these fields"),
        (replace(ONE, tokens=0), "bad-metadata", "has 0 tokens"),
        (replace(ONE, loss_tokens=3), "bad-metadata", "all but the first at most"),
        (replace(ONE, rows={}), "bad-metadata", "its ragged fields are"),
        (replace(ONE, rows={"env": -3}), "bad-metadata", "has -3 rows"),
        (replace(ONE, reference=Reference(STORED, 40, 32)), "bad-metadata", "at 40 of 64"),
        (replace(ONE, reference=Reference(STORED, -8, 32)), "bad-metadata", "at -8 of 64"),
        (replace(ONE, schema=Schema(())), "no-input-ids", "no field input_ids"),
        ({"input_ids": [1]}, "bad-sample", "is no ReferencedSample but dict"),
    ],
)
def test_what_cannot_be_as_it_is_said(sample: ReferencedSample, reason: str, why: str) -> None:
    with pytest.raises(SampleRefused, match=why) as refused:
        encode_references([ONE, sample], [STORE], None)
    assert refused.value.reason == reason


def test_counts_may_be_of_arrays() -> None:
    values: dict[str, Any] = {
        "tokens": np.int64(3),
        "loss_tokens": np.ones(2, bool).sum(),
        "rows": {"env": np.int32(5)},
    }
    samples = encode_references([replace(ONE, **values)], [STORE], None)
    assert header(samples, "me", 7) == header(encode_references([ONE], [STORE], None), "me", 7)


def test_a_store_that_is_not_allowed() -> None:
    with pytest.raises(SampleRefused, match="start the dispatcher with it in --payload-stores"):
        encode_references([ONE], [], None)


def test_a_sample_that_lies_in_a_store_can_be_pushed(store: FileStore) -> None:
    """`examples/stored_sample.py`."""
    ids, mask = np.arange(5), np.array([0, 1, 1, 0, 1], bool)
    referenced = stored_sample(store.address, "worker-3/17", ids, mask)
    (sample,) = encode_references([referenced], [store.address], None)
    assert (sample.tokens, sample.loss_tokens) == (5, 3)
    assert sample.reference is not None
    (span,) = store.get([sample.reference])
    assert span == memoryview(ids.tobytes() + mask.tobytes() + bytes(3))
