"""A rank finds in a payload what the dispatcher gathered, without moving a byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import assemble, codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_workers.rank.payload import arrays, cut
from tests.support.wire.frames import feed
from tests.workers.support.peers import SCHEMA, micro_batch, sample


def received(frame: bytes) -> tuple[m.MicroBatch, memoryview]:
    """What a rank decodes of a frame."""
    (found,) = feed(FrameReader(FrameLimits(1 << 20, 1 << 20)), frame)
    message = codec.decode(found)
    assert isinstance(message, m.MicroBatch)
    return message, found.payload


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6))
def test_every_field_is_the_concatenation_over_the_samples(lists: list[list[int]]) -> None:
    header, payload = received(micro_batch(0, 0, *(sample(ids) for ids in lists)))
    blocks = cut(SCHEMA, header, payload)
    found = arrays(payload, blocks)
    assert found["input_ids"].tolist() == [token for ids in lists for token in ids]
    assert found["loss_mask"].tolist() == [True for ids in lists for _ in ids]
    assert found["reward"].tolist() == [sum(ids) for ids in lists]
    assert all(block.offset % 8 == 0 for block in blocks)
    with pytest.raises(ValueError, match="read-only"):
        found["input_ids"][0] = -100
    assert all(np.shares_memory(np.frombuffer(payload, np.uint8), one) for one in found.values())


def test_a_payload_of_another_size_than_described_is_an_error() -> None:
    header, payload = received(micro_batch(3, 1, sample([1, 2, 3])))
    with pytest.raises(ProtocolError, match=r"micro-batch 1 of step 3 describes \d+ payload bytes"):
        cut(SCHEMA, header, payload[:-8])


def test_a_filler_is_one_token() -> None:
    header, payload = received(b"".join(assemble.filler(0, 0, sample([7, 8]))))
    assert header.is_filler
    assert arrays(payload, cut(SCHEMA, header, payload))["input_ids"].tolist() == [7]


def test_ragged_fields_are_the_rows_of_all_samples() -> None:
    pixels = Field("pixels", DType.UINT8, per_token=False, shape=(2,), ragged=True)
    schema = Schema((Field.text("env"), Field("input_ids", DType.INT64), pixels))
    spans = (b"ab".ljust(8, b"\0") + bytes(8) + bytes([1, 2, 3, 4, 0, 0, 0, 0]), bytes(8))
    samples = [
        Sample(f"s{at}", 1, 1, schema, memoryview(span), rows=rows)
        for at, (span, rows) in enumerate(zip(spans, ((2, 2), (0, 0)), strict=True))
    ]
    header, payload = received(b"".join(assemble.micro_batch(0, 0, samples)))
    blocks = cut(schema, header, payload)
    assert [(block.rows, block.own) for block in blocks] == [(2, [2, 0]), (2, ()), (2, [2, 0])]
    found = arrays(payload, blocks)
    assert found["pixels"].tolist() == [[1, 2], [3, 4]]
    assert found["env"].tobytes() == b"ab"
    for rows, words in (
        (None, "MicroBatch has rows of none, the ragged fields are env, pixels"),
        ({"env": [2, 0], "pixels": [9, 9]}, "describes 64 payload bytes, the frame carries 32"),
    ):
        with pytest.raises(ProtocolError, match=words):
            cut(schema, header.model_copy(update={"rows": rows}), payload)
