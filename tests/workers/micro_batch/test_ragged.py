"""Ragged fields and texts from push to micro-batch: each sample's own rows, whatever the plan."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.protocol import assemble, codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import LossConfig
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.producer.encode import Encoder, RolloutSample
from rollout_workers.producer.pushes import batches, header, payload
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import cut
from tests.support.schemas import schemas
from tests.workers.support.peers import arrived, step

HEADER = step(0, 1, num_samples=1, tokens=1, loss_tokens=1, loss_samples=1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=9)


def pushed(
    values: list[dict[str, Any]], ragged: tuple[str, ...] = (), per_sample: tuple[str, ...] = ()
) -> list[Sample]:
    """Samples as the dispatcher has them of a producer that pushed these values."""
    encoder, found = Encoder(per_sample, ragged), list[Sample]()
    for group in batches(encoder.encode(map(RolloutSample, values)), 2**20):
        message = header(group, "p", len(found))
        parts = payload(group)
        nbytes = sum(memoryview(part).nbytes for part in parts)
        push, received = arrived([codec.encode(message, nbytes), *parts])
        assert isinstance(push, m.Push)
        spans, at = [], 0
        for size in push.spans(len(received)):
            spans.append(received[at : at + size])
            at += size
        found += assemble.samples_of(push, spans)
    return found


def trained(
    buffers: Sequence[Buffer], schema: Schema, layout: Collation = Collation.PACKED
) -> MicroBatch:
    """The micro-batch that a training loop gets of this frame."""
    message, received = arrived(buffers)
    assert isinstance(message, m.MicroBatch)
    blocks = cut(schema, message, received)
    config = CollateConfig(LossConfig(1), layout)
    return collate(Received(message, received, blocks), HEADER, config)


def random_value(field: Field, tokens: int, rows: int, seed: int) -> Any:
    chance = np.random.default_rng(seed)
    lead = (tokens,) if field.per_token else (rows,) if field.ragged else ()
    values = torch.from_numpy(chance.integers(0, 2, (*lead, *field.shape)))
    return values.to(getattr(torch, field.dtype))


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schema, list[dict[str, Any]]]:
    """A schema with `input_ids`, and some samples of it."""
    schema = draw(schemas(Field("input_ids", DType.INT64)))
    values = [
        {
            item.name: draw(TEXT)
            if item.is_text
            else random_value(item, tokens, draw(st.integers(0, 4)), draw(st.integers(0, 99)))
            for item in schema.fields
        }
        for tokens in draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    ]
    return schema, values


@given(data=st.data(), run=runs(), layout=st.sampled_from(Collation))
def test_each_sample_is_trained_on_as_it_was_pushed(
    data: st.DataObject, run: tuple[Schema, list[dict[str, Any]]], layout: Collation
) -> None:
    schema, values = run
    ragged = tuple(item.name for item in schema.fields if item.ragged and not item.is_text)
    others = [item.name for item in schema.fields if not item.per_token and not item.ragged]
    samples = pushed(values, ragged, tuple(others))
    order = data.draw(st.permutations(range(len(values))))
    cut_at = data.draw(st.integers(1, len(values)))
    for part in (order[:cut_at], order[cut_at:]):
        if part:
            frame = assemble.micro_batch(0, 0, [samples[at] for at in part])
            found = trained(frame, samples[0].schema, layout)
            check(found, [values[at] for at in part], schema)


def check(found: MicroBatch, values: list[dict[str, Any]], schema: Schema) -> None:
    for item in schema.fields:
        expected = [sample[item.name] for sample in values]
        if item.is_text:
            assert found.text[item.name] == tuple(expected)
            assert item.name not in found
        elif item.ragged:
            cu_rows = found[item.name + "_cu_rows"]
            assert cu_rows.dtype is torch.int32
            assert cu_rows.tolist() == [0, *np.cumsum([len(one) for one in expected])]
            assert torch.equal(found[item.name], torch.cat(expected))
        elif not item.per_token:
            assert torch.equal(found[item.name], torch.stack(expected))


@pytest.mark.parametrize("layout", list(Collation))
def test_a_filler_has_no_rows_and_no_text(layout: Collation) -> None:
    pixels = np.ones((4, 2), np.float32)
    (sample,) = pushed([{"input_ids": [7, 8], "pixels": pixels, "env": "math"}], ("pixels",))
    found = trained(assemble.filler(0, 0, sample), sample.schema, layout)
    assert found.is_filler
    assert found.pixels.shape == (0, 2)
    assert found.pixels_cu_rows.tolist() == [0, 0]
    assert found.text["env"] == ("",)


def test_what_is_no_utf8_does_not_end_a_run() -> None:
    """Another client's: the dispatcher looks at no text, and other ranks would wait for one."""
    schema = Schema((Field.text("env"), Field("input_ids", DType.INT64)))
    span = b"\xff\xfeok".ljust(8, b"\0") + bytes(8)
    sample = Sample("s", 1, 1, schema, memoryview(span), rows=(4,))
    found = trained(assemble.micro_batch(0, 0, [sample]), schema)
    assert found.text["env"] == ("\ufffd\ufffdok",)


def test_a_ragged_tensor_may_be_written_into() -> None:
    (sample,) = pushed([{"input_ids": [7, 8], "pixels": np.ones((4, 2))}], ("pixels",))
    for layout in Collation:
        message, received = arrived(assemble.micro_batch(0, 0, [sample]))
        assert isinstance(message, m.MicroBatch)
        whole = Received(message, received, cut(sample.schema, message, received))
        config = CollateConfig(LossConfig(1), layout)
        collate(whole, HEADER, config).pixels.zero_()
        assert collate(whole, HEADER, config).pixels.sum() == 8
