"""Ragged fields and texts: rows of each sample's own, told with the push."""

from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import ConfigError, SampleRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from rollout_workers.producer.pushes import batches, header, payload

IDS = Field("input_ids", DType.INT64)
GRID = Field("grid", DType.INT64, per_token=False, shape=(3,), ragged=True)
ENV = Field.text("env")


def encoder(*known: Field) -> Encoder:
    """Of a run whose samples have these fields, or of one that has decided on none."""
    made = Encoder(ragged=("grid",))
    if known:
        made.on_schema(m.SchemaKnown(fields=m.field_headers(Schema(known)), set_by="declared"))
    return made


def encode(made: Encoder, **fields: Any) -> EncodedSample:
    return made.encode([RolloutSample({"input_ids": [5, 6, 7], **fields})])[0]


def values(sample: EncodedSample, name: str) -> bytes:
    place = sample.schema.slices(sample.tokens, sample.rows)[sample.schema.names.index(name)]
    return b"".join(payload([sample]))[place]


def test_samples_that_differ_in_rows_share_a_schema_and_a_push() -> None:
    made = encoder()
    samples = [
        encode(made, env=env, grid=np.arange(3 * images).reshape(images, 3))
        for env, images in (("math/gsm8k", 2), ("", 0), ("größe", 1))
    ]
    assert {sample.schema for sample in samples} == {Schema((ENV, GRID, IDS))}
    assert [sample.rows for sample in samples] == [(10, 2), (0, 0), (7, 1)]
    (together,) = batches(samples, 2**20)
    push = header(together, "p", 0)
    assert push.rows == {"env": [10, 0, 7], "grid": [2, 0, 1]}
    assert push.spans(sum(sample.nbytes for sample in samples)) == [s.nbytes for s in samples]
    assert values(samples[2], "env").decode() == "größe"
    assert np.frombuffer(values(samples[0], "grid"), np.int64).tolist() == [0, 1, 2, 3, 4, 5]


def test_an_empty_list_is_no_rows_once_their_shape_is_known() -> None:
    made = encoder(IDS, GRID)
    sample = encode(made, grid=[])
    assert (sample.schema, sample.rows) == (Schema((IDS, GRID)), (0,))
    assert encode(made, grid=[[1, 2, 3]]).rows == (1,)


def test_what_the_run_has_as_ragged_needs_no_name_here() -> None:
    made = Encoder()
    made.on_schema(m.SchemaKnown(fields=m.field_headers(Schema((GRID, IDS))), set_by="declared"))
    assert encode(made, grid=np.zeros((1, 3), np.int64)).rows == (1,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grid": 3}, "grid is ragged, and one number has no rows"),
        ({"grid": np.zeros((0, 0))}, r"grid has values of the shape \[0\]"),
        ({"env": "\ud800"}, "env is no text that UTF-8 has"),
        ({"env": np.array(["a"])}, "env holds strings; text is one str a sample"),
        ({"env": b"bytes"}, "env is bytes"),
        ({"pixels": np.zeros((4, 2))}, r"4 rows for 3 tokens.*ragged=\('pixels',\)"),
        ({"grid_cu_rows": [1, 2, 3]}, "may not be called"),
        ({"input_ids": "abc"}, "input_ids must be integers"),
        ({"loss_mask": "abc"}, "loss_mask must be zeros and ones"),
    ],
)
def test_what_is_no_ragged_field_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleRefused, match=words):
        encode(encoder(), **fields)


@pytest.mark.parametrize(
    ("known", "fields", "words"),
    [
        (ENV, {"env": [1, 2, 3]}, "env is int64; the run's samples have it as str"),
        (ENV, {"env": np.zeros(3, np.uint8)}, "env is uint8; the run's samples have it as str"),
        (Field("env", DType.UINT8), {"env": "abc"}, "env is str; the run's samples .* as uint8"),
    ],
)
def test_text_is_no_number(known: Field, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleRefused, match=words):
        encode(encoder(known, IDS), **fields)


@pytest.mark.parametrize(
    ("per_sample", "ragged", "words"),
    [
        (("a", "b"), ("b",), "b is named in per_sample and in ragged"),
        ((), ("input_ids",), "input_ids is per token"),
        (("input_ids",), (), "input_ids is per token"),
    ],
)
def test_names_that_contradict_each_other_are_refused(
    per_sample: tuple[str, ...], ragged: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Encoder(per_sample, ragged)
